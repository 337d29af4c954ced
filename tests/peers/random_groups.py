"""Random batches of groups for both sides of tests/peers.

They are off-policy enough that ratios clip.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# prompts, samples of each; one batch of each
SHAPES = (3, 2), (4, 3), (5, 4), (6, 5), (3, 5), (4, 2)


@dataclass(frozen=True)
class Batch:
    """N = prompts * samples responses of up to T tokens. Padding holds garbage, as it may in a run.

    Attributes:
        rewards: float64 [N], of order 1. One group's rewards differ by 1e-5 or so, and one group's
            are equal.
        group_ids: int64 [N], the samples of a prompt next to each other.
        mask: bool [N, T], True on response tokens, from the left; every response has one at least.
        log_probs: float64 [N, T], of the policy that trains.
        old_log_probs: float64 [N, T], of the policy before the step's first update.
        generator_log_probs: float64 [N, T], of the engine that sampled.
        reference_log_probs: float64 [N, T].
        entropy: float64 [N, T], any positive numbers.
        scored: bool [N], False for the few samples that have no reward.
    """

    rewards: Tensor
    group_ids: Tensor
    mask: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    generator_log_probs: Tensor
    reference_log_probs: Tensor
    entropy: Tensor
    scored: Tensor


def random_batch(seed: int) -> Batch:
    prompts, samples = SHAPES[seed]
    generator = torch.Generator().manual_seed(seed)
    count = prompts * samples
    width = 9

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rewards = normal(prompts, samples)
    rewards[1] = 0.7 + 1e-5 * normal(samples)
    rewards[2] = -0.3
    lengths = torch.randint(1, width + 1, (count,), generator=generator)
    # the batch is as wide as its longest, and one response is a single token
    lengths[0] = width
    lengths[1] = 1
    old = -0.2 - normal(count, width).abs()
    scored = torch.ones(count, dtype=torch.bool)
    scored[samples - 1] = False  # one of the first group
    scored[-samples:] = False  # and all but one of the last
    scored[-1] = True
    mask = torch.arange(width) < lengths[:, None]
    return Batch(
        rewards=rewards.flatten(),
        group_ids=torch.arange(prompts).repeat_interleave(samples),
        mask=mask,
        log_probs=old + 0.25 * normal(count, width),
        old_log_probs=old,
        generator_log_probs=old + 0.2 * normal(count, width),
        reference_log_probs=old + 0.3 * normal(count, width),
        entropy=normal(count, width).abs(),
        scored=scored,
    )


def write_batches(path: Path, batches: list[Batch]) -> None:
    """Write batches as numpy's archive, whose format is the same on either side.

    Keys are `<seed>/<field>`.
    """
    arrays = {}
    for i, batch in enumerate(batches):
        for field in fields(Batch):
            arrays[f"{i}/{field.name}"] = getattr(batch, field.name).numpy()
    np.savez(path, **arrays)
