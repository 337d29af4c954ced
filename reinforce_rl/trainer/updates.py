"""Split a rollout batch into optimizer steps, and count a run's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.data.batches import ReinforceBatch

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig


def mini_batches(
    group_ids_of_ranks: Sequence[Tensor],
    dp_rank: int,
    prompts_per_update: int | None,
    epochs: int,
    seed: int,
) -> Iterator[Tensor]:
    """Yield this rank's rows of each optimizer step, equally often on every rank.

    Rows are int64, and maybe none. Every sequence occurs once per epoch. The groups of a step depend
    only on their order over all ranks, not on the number of ranks.

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
    tokens = torch.where(batch.trains, batch.rollouts.response_lengths, 0)[rows].sum()
    counts = sum_over_ranks(torch.stack((batch.trains[rows].sum(), tokens)).double()).tolist()
    return Denominators(*counts, fixed_length=float(max_length))


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
