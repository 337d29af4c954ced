"""A reward function behind the reward server: requests of texts to a pool of processes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reinforce_rl.reward_server.scoring import RequestScorer, Samples
from reinforce_rl.rewards import base, wire
from reinforce_rl.rewards.function_process.pool import PING, FunctionPool
from reinforce_rl.rewards.wire import read_samples


@dataclass(frozen=True)
class FunctionScorer:
    """What a `RewardServer` is given in place of a reward model.

    Attributes:
        pool: started.
        function: its name in the pool.
        max_length, vocab_size: none; it reads no tokens.
    """

    pool: FunctionPool
    function: str
    max_length: None = None
    vocab_size: None = None


class FunctionRequestScorer(RequestScorer):
    """Answers requests of texts by a reward function; all of a merged batch are under way at once.

    Args:
        scorer: the function.
    """

    def __init__(self, scorer: FunctionScorer):
        super().__init__(None, None)
        self._function = scorer
        self._canary = {"canary": secrets.token_hex(16)}  # no client's sample is answered without the function

    @property
    def input_forms(self) -> tuple[str, ...]:
        """Texts alone."""
        return (wire.TEXT_FORM,)

    def canary_inputs(self, length: int = 1) -> list[dict[str, Any]]:
        """A sample that a worker process answers without calling the function, which need not like made-up ones."""
        return [
            {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [text]}
            for name, text in (
                (wire.PROMPTS, ""),
                (wire.RESPONSES, ""),
                (wire.METADATA, json.dumps(self._canary)),
            )
        ]

    def _read(self, request: Mapping[str, np.ndarray]) -> Samples:
        wire.check_inputs(set(request.keys()), self.input_forms)
        samples, status = read_samples(request)
        return Samples([], status, samples)

    def _score_requests(self, samples: list[Samples]) -> list[dict[str, np.ndarray]]:
        pending = []
        for one in samples:
            good = np.flatnonzero(one.status == base.STATUS_OK)
            texts = [text for text in one.texts if text is not None]
            is_canary = all(dict(text.record) == self._canary for text in texts)
            function = PING if is_canary else self._function.function
            pending.append((one, good, self._function.pool.submit(function, texts, self._beat)))
        answers = []
        for one, good, scores in pending:
            status, rewards = one.status.copy(), np.full(len(one.status), np.nan, np.float32)
            answer = scores.result()
            status[good], rewards[good] = answer.status, answer.values
            answers.append({wire.REWARDS: rewards[:, None], wire.STATUS: status[:, None]})
        return answers
