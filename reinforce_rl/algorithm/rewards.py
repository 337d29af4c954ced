"""What is made of raw rewards before advantages are taken of them: standardised, scaled, clipped, less penalties.

Notation: N sequences of the global batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import MAX_REWARD
from reinforce_rl.errors import DivergedError, RewardServerError


@dataclass
class RunningMoments:
    """Of everything seen so far; its fields are its whole state.

    Attributes:
        count: numbers seen.
        mean: of them; 0 before the first.
        squares: sum of their squared distances from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor) -> RunningMoments:
        """Of the numbers of a tensor."""
        if values.numel() == 0:
            return cls()
        exact = values.double()
        mean = exact.mean()
        return cls(float(values.numel()), float(mean), float((exact - mean).square().sum()))

    @property
    def deviation(self) -> float:
        """With count - 1 in the denominator; 0 before the second number."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def merge(self, other: RunningMoments) -> None:
        """Add what another has seen (Chan et al. 1979): no large sums are cancelled."""
        total = self.count + other.count
        if not total:
            return
        shift = other.mean - self.mean
        self.squares += other.squares + shift * shift * self.count * other.count / total
        self.mean += shift * other.count / total
        self.count = total

    def decay(self, factor: float) -> None:
        """Let each number seen so far count `factor` times as much as before."""
        self.count *= factor
        self.squares *= factor

    def update(self, values: Tensor) -> None:
        """Add the numbers of a tensor."""
        self.merge(RunningMoments.of(values))


@dataclass(frozen=True)
class RewardShaping:
    """How rewards are shaped, in this order.

    Attributes:
        standardisation: `none`; `given`: (r - mean) / deviation; `running`: the same with the moments of past steps,
            the first step with its own.
        mean, deviation: of `given`.
        scale: multiplies.
        clip: rewards are then kept within -clip .. clip; None for no bound.
        length_penalty: subtracted for each response token.
        truncation_penalty: subtracted from a response that was cut at max_length.
        overlong_buffer: tokens before max_length over which that penalty grows linearly from 0, ended responses
            included ("soft overlong punishment", DAPO, arXiv:2503.14476, equation 13); 0 for none.
        max_length: of a response, in tokens.
    """

    standardisation: str = "none"
    mean: float = 0.0
    deviation: float = 1.0
    scale: float = 1.0
    clip: float | None = None
    length_penalty: float = 0.0
    truncation_penalty: float = 0.0
    overlong_buffer: int = 0
    max_length: int = 1


def shape_rewards(
    rewards: Tensor,
    valid: Tensor,
    response_lengths: Tensor,
    is_end: Tensor,
    shaping: RewardShaping,
    past: RunningMoments,
) -> Tensor:
    """Shaped rewards.

    Args:
        rewards: [N], raw.
        valid: bool [N]; the others hold anything and keep it.
        response_lengths: int64 [N], tokens.
        is_end: bool [N], False where a response was cut at max_length.
        shaping: what to do.
        past: moments of the raw rewards of past steps.

    Returns:
        [N].
    """
    shaped = rewards
    if shaping.standardisation == "given":
        shaped = (shaped - shaping.mean) / shaping.deviation
    elif shaping.standardisation == "running":
        if past.count < 2:
            past = RunningMoments.of(rewards[valid])
        # Rewards that differed by rounding alone are left at zero instead of blown up.
        differed = past.deviation > TOLERANCE * max(abs(past.mean), 1.0)
        level = torch.where(valid, 0.0, shaped)
        shaped = (shaped - past.mean) / past.deviation if differed else level
    shaped = shaped * shaping.scale
    if shaping.clip is not None:
        shaped = shaped.clamp(-shaping.clip, shaping.clip)
    shaped = shaped - shaping.length_penalty * response_lengths
    if shaping.overlong_buffer > 0:
        into = response_lengths - (shaping.max_length - shaping.overlong_buffer)
        overlong = (into / shaping.overlong_buffer).clamp(0.0, 1.0)
        overlong = torch.where(is_end, overlong, 1.0)
    else:
        overlong = (~is_end).to(shaped.dtype)
    return shaped - shaping.truncation_penalty * overlong


def less_kl(rewards: Tensor, kl: Tensor, beta: float, valid: Tensor, step: int) -> Tensor:
    """Shaped rewards [N] less beta times the KL [N], of which advantages can be taken.

    Raises:
        DivergedError: log-probs of valid samples are not finite.
        RewardServerError: valid rewards are not finite, or too large for float32 to tell them apart.
    """
    if not bool(kl[valid].isfinite().all()):
        raise DivergedError(f"log-probs of the responses of step {step} are not finite")
    found = rewards - beta * kl
    beyond = (valid & ~(found.abs() <= MAX_REWARD)).nonzero()[:, 0].tolist()
    if beyond:
        raise RewardServerError(
            f"{len(beyond)} of {int(valid.sum())} rewards of step {step} are not finite or beyond {MAX_REWARD:g} in "
            f"size; the first is {float(rewards[beyond[0]]):g}, shaped, less beta = {beta:g} times its KL of "
            f"{float(kl[beyond[0]]):g} nats. Scale or clip rewards (trainer.reinforce.reward_shaping), or lower "
            "trainer.reinforce.initial_policy_kl_penalty"
        )
    return found


# Rewards of a group within this of each other are equal: float32 rounding of rewards of order one.
TOLERANCE = 1e-6


def in_group_with_spread(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Whether the valid samples of each sample's group differ in reward.

    Args:
        rewards: [N].
        group_ids: int64 [N], equal within a group.
        valid: bool [N]; the others' rewards hold anything.

    Returns:
        bool [N]. A group of fewer than two valid samples has no spread.
    """
    groups, index = torch.unique(group_ids, return_inverse=True)
    exact = rewards.double()
    highest = exact.new_full((len(groups),), -torch.inf).scatter_reduce(
        0, index, torch.where(valid, exact, -torch.inf), "amax"
    )
    lowest = exact.new_full((len(groups),), torch.inf).scatter_reduce(
        0, index, torch.where(valid, exact, torch.inf), "amin"
    )
    size = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1.0)
    return (highest - lowest > TOLERANCE * size)[index]
