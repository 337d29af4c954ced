"""A reward source inside the test's own process, for tests whose subject is not the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from reinforce_rl.rewards.base import STATUS_INTERNAL, STATUS_OK, RewardRequest, Rewards


@dataclass(frozen=True)
class ReadyRewards:
    """A future that has its answer already."""

    rewards: Rewards

    def result(self) -> Rewards:
        return self.rewards


class FunctionReward:
    """Scores a request with a function of the response's token ids; NaN stands for a failed sample."""

    def __init__(self, score: Callable[[list[int]], float], prompt_tokens: int):
        self._score = score
        self._prompt_tokens = prompt_tokens

    def infer_rm(self, request: RewardRequest) -> ReadyRewards:
        rows = zip(request.tokens.tolist(), request.lengths.tolist(), strict=True)
        values = torch.tensor([self._score(row[self._prompt_tokens : length]) for row, length in rows])
        status = torch.where(torch.isnan(values), STATUS_INTERNAL, STATUS_OK).int()
        return ReadyRewards(Rewards(values.float(), status))

    def close(self) -> None:
        pass
