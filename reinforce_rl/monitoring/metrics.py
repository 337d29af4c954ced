"""The numbers of a rollout batch, as sums and counts that add up over data-parallel ranks.

Names are NeMo-Aligner's. Rewards are averaged over the samples that were scored: a failed one is not a reward of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforce_rl.rollout import ReinforceBatch, RolloutBatch


@dataclass(frozen=True)
class Mean:
    """A mean before it is taken: what to add up over ranks."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Tensor, where: Tensor | None = None) -> Mean:
        """Of a [N] tensor, or of its entries where a bool [N] mask is True."""
        chosen = values if where is None else values[where]
        return cls(float(chosen.double().sum()), float(chosen.numel()))


def rollout_means(batch: RolloutBatch) -> dict[str, Mean]:
    """What is known of a batch once it is scored."""
    scored = torch.isfinite(batch.rewards)
    return {
        "rewards": Mean.of(batch.rewards, scored),
        "response_lengths": Mean.of(batch.response_lengths),
        "prompt_lengths": Mean.of(batch.prompt_lengths),
        "fraction_of_samples_properly_ended": Mean.of(batch.is_end),
        "fraction_of_samples_scored": Mean.of(scored),
        "fraction_of_samples_valid": Mean.of(batch.valid),
    }


def reinforce_means(batch: ReinforceBatch) -> dict[str, Mean]:
    """What the algorithm made of a batch, over its valid samples."""
    valid = batch.rollouts.valid
    return {
        "init_policy_kl": Mean.of(batch.kl, valid),
        "rewards_with_kl": Mean.of(batch.rewards_with_kl, valid),
        "baseline": Mean.of(batch.baseline, valid),
        "advantage_magnitude": Mean.of(batch.advantages.abs(), valid),
    }


def take_means(means: Mapping[str, Mean], sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """The means over all ranks; NaN where nothing was counted.

    Args:
        means: of this rank; every rank has the same names.
        sum_over_ranks: adds a float64 [names, 2] tensor up over the data-parallel ranks.
    """
    local = torch.tensor([[m.total, m.count] for m in means.values()], dtype=torch.float64)
    totals = sum_over_ranks(local).cpu()
    return {
        name: float(total / count) if count else float("nan")
        for name, (total, count) in zip(means, totals.tolist(), strict=True)
    }
