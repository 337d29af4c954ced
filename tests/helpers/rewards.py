"""Reward requests, and an in-process reward source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from reinforce_rl.rewards.base import STATUS_INTERNAL, STATUS_OK, RewardRequest, Rewards


def request_of(sequences: Sequence[Sequence[int]]) -> RewardRequest:
    """Return a request of right-padded token ids, without texts."""
    width = max((len(sequence) for sequence in sequences), default=0)
    rows = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
    texts = ("",) * len(sequences)
    return RewardRequest(
        torch.tensor(rows, dtype=torch.long).reshape(len(rows), width), lengths, texts, texts
    )


@dataclass(frozen=True)
class ReadyRewards:
    """A completed future of rewards."""

    rewards: Rewards

    def result(self) -> Rewards:
        return self.rewards


class FunctionReward:
    """Score token ids with a function; NaN is a failed sample."""

    def __init__(self, score: Callable[[list[int]], float], prompt_tokens: int):
        self._score = score
        self._prompt_tokens = prompt_tokens

    def infer_rm(self, request: RewardRequest) -> ReadyRewards:
        rows = zip(request.tokens.tolist(), request.lengths.tolist(), strict=True)
        responses = [row[self._prompt_tokens : length] for row, length in rows]
        values = torch.tensor([self._score(response) for response in responses])
        status = torch.where(torch.isnan(values), STATUS_INTERNAL, STATUS_OK).int()
        return ReadyRewards(Rewards(values.float(), status))

    def close(self) -> None:
        pass
