"""What is made of raw rewards before advantages are taken of them: standardised, scaled, clipped, less penalties.

Notation: N sequences of the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import MAX_REWARD
from reinforce_rl.algorithm.filtering import TOLERANCE
from reinforce_rl.algorithm.moments import RunningMoments
from reinforce_rl.errors import DivergedError, RewardServerError


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
