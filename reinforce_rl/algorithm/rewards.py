"""Reward shaping before advantages: standardise, scale, clip, penalise.

Notation: N sequences of the global batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import MAX_REWARD
from reinforce_rl.errors import DivergedError, RewardServerError

TOLERANCE = 1e-6  # rewards closer than this count as equal: float32 rounding at order one


@dataclass
class RunningMoments:
    """Running mean and variance; its fields are its whole state."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @classmethod
    def of(cls, values: Tensor) -> RunningMoments:
        if values.numel() == 0:
            return cls()
        exact = values.double()
        mean = exact.mean()
        return cls(float(values.numel()), float(mean), float((exact - mean).square().sum()))

    @property
    def deviation(self) -> float:
        """Sample standard deviation (count - 1); 0 before the second value."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def merge(self, other: RunningMoments) -> None:
        """Merge another's moments without cancellation (Chan et al. 1979)."""
        total = self.count + other.count
        if not total:
            return
        shift = other.mean - self.mean
        self.squares += other.squares + shift * shift * self.count * other.count / total
        self.mean += shift * other.count / total
        self.count = total

    def decay(self, factor: float) -> None:
        """Multiply the weight of all past values by `factor`."""
        self.count *= factor
        self.squares *= factor

    def update(self, values: Tensor) -> None:
        self.merge(RunningMoments.of(values))


class RewardShaping(Protocol):
    """The keys of `trainer.reinforce.reward_shaping`, in the order in which they are applied."""

    # none; given: (r - mean) / std; running: with moments of past steps
    standardization: Literal["none", "given", "running"]
    mean: float  # of given
    std: float  # of given
    scale: float
    clip: float | None  # bound on the absolute value; None for no bound
    length_penalty: float  # per response token


def shape_rewards(
    rewards: Tensor,
    valid: Tensor,
    response_lengths: Tensor,
    shaping: RewardShaping,
    past: RunningMoments,
) -> Tensor:
    """Return the shaped rewards [N]; invalid samples have arbitrary values.

    `past` are the moments of past steps' raw rewards; the first step uses its own.
    """
    shaped = rewards
    if shaping.standardization == "given":
        shaped = (shaped - shaping.mean) / shaping.std
    elif shaping.standardization == "running":
        if past.count < 2:
            past = RunningMoments.of(rewards[valid])
        # Do not amplify rewards that differ by rounding only.
        differed = past.deviation > TOLERANCE * max(abs(past.mean), 1.0)
        level = torch.where(valid, 0.0, shaped)
        shaped = (shaped - past.mean) / past.deviation if differed else level
    shaped = shaped * shaping.scale
    if shaping.clip is not None:
        shaped = shaped.clamp(-shaping.clip, shaping.clip)
    return shaped - shaping.length_penalty * response_lengths


def subtract_truncation_penalty(
    rewards: Tensor,
    response_lengths: Tensor,
    is_end: Tensor,
    *,
    penalty: float,
    buffer: int,
    max_length: int,
) -> Tensor:
    """Return rewards [N] less `penalty` where a response was cut at `max_length` tokens.

    Responses that ended within the last `buffer` tokens have a linear part of it.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.
    """
    overlong = (~is_end).to(rewards.dtype)
    if buffer > 0:
        into = response_lengths - (max_length - buffer)
        overlong = (into / buffer).clamp(0.0, 1.0).where(is_end, 1.0)
    return rewards - penalty * overlong


def subtract_kl(rewards: Tensor, kl: Tensor, beta: float, valid: Tensor, step: int) -> Tensor:
    """Return shaped rewards [N] less beta times the KL [N].

    Raises:
        DivergedError: log-probs of valid samples are not finite.
        RewardServerError: valid rewards are not finite, or too large for float32 to distinguish.
    """
    if not bool(kl[valid].isfinite().all()):
        raise DivergedError(
            f"log-probs of the responses of step {step} are not finite",
            key="algorithm.log_probs.not_finite",
        )
    rewards_with_kl = rewards - beta * kl
    beyond = (valid & ~(rewards_with_kl.abs() <= MAX_REWARD)).nonzero()[:, 0].tolist()
    if beyond:
        raise RewardServerError(
            f"{len(beyond)} of {int(valid.sum())} rewards of step {step} are not finite or above "
            f"{MAX_REWARD:g} in absolute value. The first is a shaped reward of "
            f"{float(rewards[beyond[0]]):g}, minus beta = {beta:g} times a KL of "
            f"{float(kl[beyond[0]]):g} nats. Scale or clip the rewards "
            "(trainer.reinforce.reward_shaping), or lower "
            "trainer.reinforce.initial_policy_kl_penalty",
            key="algorithm.reward.out_of_range",
        )
    return rewards_with_kl


def has_reward_variance(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return bool [N]: True if the valid samples of the sample's group differ in reward."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    exact = rewards.double()
    highest, lowest = (
        exact.new_full((len(groups),), worst).scatter_reduce(
            0, index, exact.where(valid, worst), kind
        )
        for worst, kind in ((-torch.inf, "amax"), (torch.inf, "amin"))
    )
    size = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return (highest - lowest > TOLERANCE * size)[index]
