"""What a step inherits from those before it: the moments of their rewards, and beta."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from reinforce_rl.algorithm.kl import KLCoefficient
from reinforce_rl.algorithm.moments import RunningMoments
from reinforce_rl.data.batches import ReinforceBatch

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig


class PastSteps:
    """Over the valid samples of all steps before the present one.

    Args:
        beta: of the first step.
        window: steps that `moving_average` looks back on.
        decay: of a sample's weight in `exponential_moving_average`, from a step to the next.

    Attributes:
        scores: as they came.
        rewards: less their KL.
        last_rewards: those of each of the last `window` steps.
        decayed_rewards: those of all steps, the older the less.
        beta: of the present step.
    """

    def __init__(self, beta: KLCoefficient, window: int, decay: float):
        self.scores = RunningMoments()
        self.rewards = RunningMoments()
        self.last_rewards = deque[RunningMoments](maxlen=window)
        self.decayed_rewards = RunningMoments()
        self.beta = beta
        self._decay = decay

    @classmethod
    def of(cls, cfg: ReinforceConfig) -> PastSteps:
        """Begin a run with the settings of `trainer.reinforce`."""
        beta = KLCoefficient(cfg.initial_policy_kl_penalty, cfg.kl_target, cfg.kl_horizon)
        return cls(beta, cfg.baseline_window, cfg.baseline_decay)

    def reward_mean(self, estimator: str) -> float:
        """The baseline of an estimator that looks back: samples have the weight of their step. 0 before the first."""
        if estimator == "moving_average":
            last = RunningMoments()
            for step in self.last_rewards:
                last.merge(step)
            return last.mean
        return (self.decayed_rewards if estimator == "exponential_moving_average" else self.rewards).mean

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
        self.last_rewards.append(RunningMoments.of(rewards))
        self.decayed_rewards.decay(self._decay)
        self.decayed_rewards.update(rewards)
        self.beta.update(float(kl.double().mean()), len(kl))

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "past_scores": dataclasses.asdict(self.scores),
            "past_rewards": dataclasses.asdict(self.rewards),
            "last_rewards": [dataclasses.asdict(step) for step in self.last_rewards],
            "decayed_rewards": dataclasses.asdict(self.decayed_rewards),
            "kl_coefficient": self.beta.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. A beta that is not steered is the configuration's, so that it can be changed."""
        self.scores = RunningMoments(**state["past_scores"])
        self.rewards = RunningMoments(**state["past_rewards"])
        # A checkpoint of an earlier release has neither of these.
        last = (RunningMoments(**step) for step in state.get("last_rewards", ()))
        self.last_rewards = deque(last, self.last_rewards.maxlen)
        self.decayed_rewards = RunningMoments(**state.get("decayed_rewards", {}))
        if self.beta.target is not None:
            self.beta.value = state["kl_coefficient"]
