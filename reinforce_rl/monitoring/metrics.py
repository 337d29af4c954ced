"""Metrics of a step over data-parallel ranks. Names are NeMo-Aligner's where it has one.

Rewards are averaged over scored samples only: a failed sample does not count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforce_rl.algorithm.advantages import turn_starts
from reinforce_rl.algorithm.kl import KL_ESTIMATORS, sequence_kl
from reinforce_rl.algorithm.rewards import RunningMoments, has_reward_variance
from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch

if TYPE_CHECKING:
    from reinforce_rl.megatron.optimizer import OptimizerUpdate

GAP_SHARES = {
    "generator_logprob_diff_median": 0.5,
    "generator_logprob_diff_p99": 0.99,
    "generator_logprob_diff_max": 1.0,
}
GatherOverRanks = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Mean:
    """Sum and count of a mean, additive over ranks."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Tensor, where: Tensor | None = None) -> Mean:
        chosen = values if where is None else values[where]
        return cls(float(chosen.double().sum()), float(chosen.numel()))


Statistics = dict[str, "Mean | RunningMoments"]  # `RunningMoments` report their deviation


def rollout_means(batch: RolloutBatch) -> Statistics:
    """Return the statistics of a scored batch."""
    scored = torch.isfinite(batch.rewards)
    means: Statistics = {
        "rewards": Mean.of(batch.rewards, scored),
        "reward_std": RunningMoments.of(batch.rewards[scored]),
        "response_lengths": Mean.of(batch.policy_lengths),
        "prompt_lengths": Mean.of(batch.prompt_lengths),
        "fraction_of_samples_properly_ended": Mean.of(batch.is_end),
        "fraction_of_samples_scored": Mean.of(scored),
        "fraction_of_samples_valid": Mean.of(batch.valid),
    }
    if batch.policy_mask is not None:
        means["turns"] = Mean.of(turns_of(batch))
    for name, values in batch.source_rewards.items():
        means[f"rewards_{name}"] = Mean.of(values, torch.isfinite(values))
    return means


def turns_of(batch: RolloutBatch) -> Tensor:
    """Return the number of the policy's answers in each episode, int64 [N].

    An environment writes at least one token between two answers.
    """
    return turn_starts(batch.response_mask).sum(dim=1)


def validation_means(batch: RolloutBatch, prompts: Sequence[Prompt]) -> Statistics:
    """Return the statistics of a scored batch, and of each named validation set as NAME/... ."""
    means = rollout_means(batch)
    for name in dict.fromkeys(prompt.set_name for prompt in prompts if prompt.set_name):
        ids = torch.tensor([prompt.id for prompt in prompts if prompt.set_name == name])
        part = batch.select(torch.isin(batch.group_ids, ids).nonzero()[:, 0])
        means |= {f"{name}/{key}": value for key, value in rollout_means(part).items()}
    return means


def reinforce_means(batch: ReinforceBatch) -> Statistics:
    """Return the statistics of advantages, baselines and KL, over the valid samples."""
    rollouts = batch.rollouts
    valid = batch.rollouts.valid
    advantages = batch.sequence_advantages
    spread, has_zero_std = group_spread(rollouts.rewards, rollouts.group_ids, valid)
    means: Statistics = {
        "reward_group_std": Mean.of(spread),
        "fraction_of_groups_with_zero_std": Mean.of(has_zero_std),
        "init_policy_kl": Mean.of(batch.kl, valid),
        "rewards_with_kl": Mean.of(batch.rewards_with_kl, valid),
        "baseline": Mean.of(batch.baseline, valid),
        "advantage_mean": Mean.of(advantages, batch.trains),
        "advantage_std": RunningMoments.of(advantages[batch.trains]),
        "advantage_magnitude": Mean.of(advantages.abs(), valid),
        "fraction_of_samples_trained": Mean.of(batch.trains),
    }
    if rollouts.log_probs is not None and rollouts.init_log_probs is not None:
        for name in KL_ESTIMATORS:
            values = sequence_kl(
                rollouts.log_probs, rollouts.init_log_probs, rollouts.response_mask, estimator=name
            )
            means[f"kl_{name}"] = Mean.of(values, valid)
    return means


def group_spread(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return each group's sample standard deviation (n - 1), and whether its rewards are all equal.

    Only groups of at least two valid samples count. A group lies on one rank.
    """
    differs = has_reward_variance(rewards, group_ids, valid)
    members = [(group_ids == group) & valid for group in torch.unique(group_ids)]
    members = [rows for rows in members if int(rows.sum()) > 1]
    spread = [float(rewards[rows].double().std()) for rows in members]
    has_zero_std = [not bool(differs[rows].any()) for rows in members]
    return torch.tensor(spread, dtype=torch.float64), torch.tensor(has_zero_std, dtype=torch.bool)


def reduce_metrics(statistics: Statistics, gather_over_ranks: GatherOverRanks) -> dict[str, float]:
    """Reduce to means and deviations over all ranks; NaN for a count of 0.

    Ranks may lack some statistics.
    """
    parts: list[Statistics] = gather_over_ranks(statistics)
    reduced = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        of_ranks = [part[name] for part in parts if name in part]
        moments = RunningMoments()
        for statistic in of_ranks:
            if isinstance(statistic, RunningMoments):
                moments.merge(statistic)
        means = [statistic for statistic in of_ranks if isinstance(statistic, Mean)]
        count = sum(statistic.count for statistic in means)
        if count:
            reduced[name] = sum(statistic.total for statistic in means) / count
        else:
            reduced[name] = moments.deviation if moments.count else float("nan")
    return reduced


def update_metrics(
    sums: Mapping[str, float],
    updates: Sequence[OptimizerUpdate],
    gather_over_ranks: GatherOverRanks,
) -> dict[str, float]:
    """Return the metrics of the optimizer steps on one rollout batch (at least one).

    `sums` are this rank's totals over all of them: `loss`, and the sums of `loss.policy_loss`.
    """
    parts: list[Mapping[str, float]] = gather_over_ranks(dict(sums))
    total = {
        name: sum(part.get(name, 0.0) for part in parts)
        for name in {name for part in parts for name in part}
    }
    metrics = {
        "actor_loss": total["loss"] / len(updates),
        "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "lr": updates[-1].lr,
        "skipped_step": float(any(update.skipped for update in updates)),
        "optimizer_steps": float(len(updates)),
    }
    tokens = total.get("tokens", 0.0)
    if tokens:
        metrics["clip_fraction"] = total["clipped"] / tokens
        # If all weights underflow to 0, nothing can be learned.
        squares = total["squares"]
        metrics["effective_sample_size"] = (
            total["weights"] ** 2 / (tokens * squares) if squares else 0.0
        )
    if total.get("padded_tokens"):
        metrics["padding_fraction"] = 1.0 - total["sequence_tokens"] / total["padded_tokens"]
    means = (
        "entropy",
        "generator_logprob_diff",
        "generator_kl",
        "generator_capped",
        "generator_masked",
    )
    return metrics | {
        name: total[name] / tokens if tokens else float("nan") for name in means if name in total
    }


def trained_token_metrics(
    batch: ReinforceBatch,
    log_probs: Tensor,
    *,
    version: int | None,
    sum_over_ranks: Callable[[Tensor], Tensor],
    gather_over_ranks: GatherOverRanks,
) -> dict[str, float]:
    """Return the entropy of the trained tokens and their gaps to the generator, over all ranks.

    Args:
        log_probs: float32 [N, T] by the policy before the update; NaN where no pass computed them.
        version: version of the policy's weights, for the gaps by age; None if all rollouts are of
            the current weights.
    """
    rollouts = batch.rollouts
    gaps = generator_gaps(batch, log_probs)
    statistics = sampled_entropy(log_probs[batch.trained_tokens])
    has_versions = rollouts.weight_versions is not None
    if version is not None and has_versions and rollouts.generator_log_probs is not None:
        statistics |= gap_by_age(gaps, weight_ages(batch, version))
    # One reduction for all statistics: a rank without samples has no ages, but must take part.
    return {
        **gap_quantiles(gaps, sum_over_ranks),
        **reduce_metrics(statistics, gather_over_ranks),
    }


def generator_gaps(batch: ReinforceBatch, log_probs: Tensor) -> Tensor:
    """Return `log_probs` [N, T] minus the generator's for the trained tokens, float32 [tokens].

    Empty if the generator reports no log-probs.
    """
    rollouts = batch.rollouts
    if rollouts.generator_log_probs is None:
        return torch.zeros(0)
    # A generator may pad its responses beyond the longest.
    generator_log_probs = rollouts.generator_log_probs[:, : rollouts.width]
    return (log_probs - generator_log_probs)[batch.trained_tokens]


def weight_ages(batch: ReinforceBatch, version: int) -> Tensor:
    """Return the age in steps, at `version`, of the weights that drew the trained tokens.

    int64 [tokens]. Raises ValueError if the batch has no versions.
    """
    rollouts = batch.rollouts
    if rollouts.weight_versions is None:
        raise ValueError("the versions of the weights that drew these rollouts are not known")
    return version - rollouts.weight_versions[:, : rollouts.width][batch.trained_tokens]


def gap_quantiles(gaps: Tensor, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return quantiles of the absolute `gaps`, float32 [tokens], over all ranks; {} without tokens.

    The quantile q of n tokens is the ceil(q n)-th smallest, exact for any layout. `total` sums over
    ranks. Nothing is gathered: absolute floats have the order of their bits, and a binary search
    finds the bits from the highest to the lowest.
    """
    bits = gaps.float().view(torch.int32) & 0x7FFFFFFF  # without the sign
    count = int(total(torch.tensor(len(bits))))
    places = torch.tensor([math.ceil(share * count) for share in GAP_SHARES.values()])
    quantiles = torch.zeros(len(places), dtype=torch.int32)
    for bit in range(30, -1, -1):
        larger = quantiles | 1 << bit
        smaller = total(torch.stack([(bits < candidate).sum() for candidate in larger]))
        quantiles = torch.where(smaller < places, larger, quantiles)
    return (
        dict(zip(GAP_SHARES, quantiles.view(torch.float32).tolist(), strict=True)) if count else {}
    )


def gap_by_age(gaps: Tensor, ages: Tensor) -> Statistics:
    """Return the mean absolute gap for each age of the weights; `ages` are int64 [tokens]."""
    return {
        f"generator_logprob_diff_age_{age}": Mean.of(gaps[ages == age].abs())
        for age in ages.unique().tolist()
    }


def sampled_entropy(log_probs: Tensor) -> Statistics:
    """Estimate the entropy: the mean of -log p of sampled tokens, float32 [tokens], without NaN."""
    return {"entropy_sampled": Mean.of(-log_probs, torch.isfinite(log_probs))}
