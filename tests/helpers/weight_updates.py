"""Planned weight updates, and log-probs under each version of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from helpers.policies import all_logits
from torch import Tensor

from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.megatron.model.model import CausalLM

Action = Literal["continue", "load", "stop"]


class PlannedUpdates:
    """`WeightUpdates` that calls its actions in turn, then returns "continue" forever.

    Args:
        load: the function that `load` calls.
    """

    def __init__(
        self,
        *actions: Action | Callable[[], Action],
        load: Callable[[], object] = lambda: None,
        version: int = 0,
    ):
        self._actions = list(actions)
        self._load = load
        self.version = version
        self.running: list[int] = []  # arguments of `next_action`

    def next_action(self, unfinished: int) -> Action:
        self.running.append(unfinished)
        action = self._actions.pop(0) if self._actions else "continue"
        return action() if callable(action) else action

    def load(self) -> None:
        self._load()
        self.version += 1


class Versions:
    """Keeps the weights of each version."""

    def __init__(self, lm: CausalLM):
        self._lm = lm
        self._kept = dict[int, list[Tensor]]()

    def keep(self, version: int) -> None:
        self._kept[version] = [parameter.detach().clone() for parameter in self._lm.parameters()]

    @torch.no_grad()
    def gaps(
        self, version: int, responses: Sequence[PartialResponse], temperature: float = 1.0
    ) -> list[list[float]]:
        """Return how far each token's log-prob is from its value under a version's weights."""
        present = [parameter.detach().clone() for parameter in self._lm.parameters()]
        self.restore(version)
        gaps = []
        for response in responses:
            prompt = response.prompt.tokens
            tokens = torch.tensor(response.tokens)
            sequence = torch.tensor([[*prompt, *response.tokens]])
            logits = all_logits(self._lm, sequence)[0, len(prompt) - 1 : -1]
            table = torch.log_softmax(logits.float() / temperature, -1)
            log_probs = table.gather(1, tokens[:, None])[:, 0]
            gaps.append((log_probs - torch.tensor(response.log_probs)).abs().tolist())
        self._put(present)
        return gaps

    def restore(self, version: int) -> None:
        self._put(self._kept[version])

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self._lm.parameters(), weights, strict=True):
            parameter.copy_(value)
