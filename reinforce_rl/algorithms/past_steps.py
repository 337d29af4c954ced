"""What a step inherits from those before it: the moments of their rewards, and beta."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reinforce_rl.algorithms.kl import KLCoefficient
from reinforce_rl.algorithms.moments import RunningMoments
from reinforce_rl.rollout import ReinforceBatch


class PastSteps:
    """Over the valid samples of all steps before the present one.

    Args:
        beta: of the first step.

    Attributes:
        scores: as they came.
        rewards: less their KL.
        beta: of the present step.
    """

    def __init__(self, beta: KLCoefficient):
        self.scores = RunningMoments()
        self.rewards = RunningMoments()
        self.beta = beta

    def add(self, batch: ReinforceBatch, gather_over_ranks: Callable[[Any], list[Any]]) -> None:
        """Take in a step, once it is done with.

        Args:
            batch: of this rank.
            gather_over_ranks: gives every data-parallel rank's object.
        """
        valid = batch.rollouts.valid
        parts = gather_over_ranks((batch.rollouts.rewards[valid], batch.rewards_with_kl[valid], batch.kl[valid]))
        scores, rewards, kl = (torch.cat(column) for column in zip(*parts, strict=True))
        self.scores.update(scores)
        self.rewards.update(rewards)
        self.beta.update(float(kl.double().mean()), len(kl))

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "past_scores": dataclasses.asdict(self.scores),
            "past_rewards": dataclasses.asdict(self.rewards),
            "kl_coefficient": self.beta.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. A beta that is not steered is the configuration's, so that it can be changed."""
        self.scores = RunningMoments(**state["past_scores"])
        self.rewards = RunningMoments(**state["past_rewards"])
        if self.beta.target is not None:
            self.beta.value = state["kl_coefficient"]
