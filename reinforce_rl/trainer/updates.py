"""Split a rollout batch into optimizer steps, add up what they give, and count a run's steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.megatron.optimizer import OptimizerUpdate
    from reinforce_rl.policy.model import LossShare

# The number, and the prefix of the numbers, that are added over ranks.
LOSS = "loss"
SUM = "sum_"


def mini_batches(
    group_ids_of_ranks: Sequence[Tensor],
    dp_rank: int,
    prompts_per_update: int | None,
    epochs: int,
    seed: int,
) -> Iterator[Tensor]:
    """Yield this rank's rows of each optimizer step, equally often on every rank.

    Rows are int64, and maybe none. Every sequence occurs once per epoch. The groups of a step
    depend only on their order over all ranks, not on the number of ranks.

    Args:
        group_ids_of_ranks: int64 [sequences] of each data-parallel rank, in rank order; a group
            lies on one rank.
        prompts_per_update: groups per optimizer step, over all ranks; None for all.
        seed: of the order, which changes each epoch.
    """
    local_ids = group_ids_of_ranks[dp_rank]
    if prompts_per_update is None:
        for _ in range(epochs):
            yield torch.arange(len(local_ids))
        return
    all_ids = torch.cat([torch.as_tensor(ids, dtype=torch.long) for ids in group_ids_of_ranks])
    groups = torch.tensor(list(dict.fromkeys(all_ids.tolist())), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(groups), generator=generator)
        for groups_of_step in groups[order].split(prompts_per_update):
            yield torch.isin(local_ids, groups_of_step).nonzero()[:, 0]


def denominators_of(
    batch: ReinforceBatch,
    rows: Tensor,
    max_length: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Denominators:
    """Return what normalises the loss of these rows of each rank; a collective call."""
    tokens = torch.where(batch.trains, batch.rollouts.policy_lengths, 0)[rows].sum()
    counts = sum_over_ranks(torch.stack((batch.trains[rows].sum(), tokens)).double()).tolist()
    return Denominators(*counts, fixed_length=float(max_length))


@dataclass
class PolicyUpdate:
    """The optimizer steps on one rollout batch of N sequences with T response tokens."""

    # float32 [N, T] by the policy before the first step; NaN where no pass has computed them.
    log_probs: Tensor
    optimizer_steps: list[OptimizerUpdate] = field(default_factory=list)
    # This rank's loss and sums of `policy_loss`, over all steps; for `update_metrics`.
    loss_sums: Counter[str] = field(default_factory=Counter)
    # This rank's numbers of each step, for the `StepRecorder`.
    records: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def on(cls, rollouts: RolloutBatch) -> PolicyUpdate:
        """Return the update of a batch before its first optimizer step."""
        if rollouts.log_probs is None:
            return cls(torch.full(rollouts.response_mask.shape, math.nan))
        return cls(rollouts.log_probs[:, : rollouts.width])

    def add(self, share: LossShare, optimizer_step: OptimizerUpdate) -> None:
        """Add an optimizer step and this rank's share of its loss."""
        self.optimizer_steps.append(optimizer_step)
        self.records.append(update_numbers(share, optimizer_step))
        self.loss_sums.update({"loss": share.loss, **share.sums})
        if share.log_probs is not None:
            # A step has those of its own rows, and only if it is on-policy.
            is_unknown = share.log_probs.isnan()
            self.log_probs = torch.where(is_unknown, self.log_probs, share.log_probs)


def update_numbers(share: LossShare, update: OptimizerUpdate) -> dict[str, float]:
    """Return this rank's numbers of an optimizer step, for `StepRecorder.after_update`."""
    sums = {SUM + name: value for name, value in share.sums.items()}
    return {LOSS: share.loss, **vars(update), **sums}


def total_steps(cfg: ReinforceConfig, steps_per_epoch: int) -> int:
    """Return the run's rollout batches, resumes included; dynamic filtering may end it sooner."""
    by_epochs = cfg.max_epochs * steps_per_epoch
    return by_epochs if cfg.max_steps == -1 else min(cfg.max_steps, by_epochs)


def total_updates(
    cfg: ReinforceConfig,
    prompts_per_update: int | None,
    batch_sizes: Sequence[int],
) -> int:
    """Return the run's optimizer steps, the unit of learning-rate schedules.

    `batch_sizes` are the prompts of each rollout batch of an epoch; for `prompts_per_update` see
    `mini_batches`.
    """
    updates = [1] * len(batch_sizes)
    if prompts_per_update is not None:
        updates = [-(-size // prompts_per_update) for size in batch_sizes]
    epochs, rest = divmod(total_steps(cfg, len(batch_sizes)), len(batch_sizes))
    return cfg.reinforce_epochs * (epochs * sum(updates) + sum(updates[:rest]))
