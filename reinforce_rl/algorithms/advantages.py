"""Baselines and advantages of sampled sequences.

Notation: N samples, of any number of groups; the samples of a group answer one prompt. Everything here is detached:
an advantage weighs a gradient, it does not carry one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rloo_baseline(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """The leave-one-out baseline: for each sample the mean reward of the other valid samples of its group.

    Source: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019); Ahmadian et al., "Back to Basics"
    (arXiv:2402.14740), equation 8.

    Args:
        rewards: [N], any floating type; entries that are not valid may hold anything, NaN included.
        group_ids: [N], any integers; equal within a group.
        valid: bool [N]; False leaves a sample out of every sum and every count. None means all are valid.

    Returns:
        [N] in the dtype of `rewards`. Where a valid sample has no valid neighbour, its own reward, so that its
        advantage is 0: there is nothing to compare it with. Where a sample is not valid, 0.
    """
    rewards = rewards.detach()
    _check(rewards, group_ids, valid)
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    clean = torch.where(valid, rewards, 0.0)
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    counts = clean.new_zeros(num_groups).index_add(0, group, valid.to(clean.dtype))
    # Sums are taken of deviations from the group's mean: for large equal rewards, sum minus own would cancel badly.
    means = clean.new_zeros(num_groups).index_add(0, group, clean) / counts.clamp(min=1)
    deviations = torch.where(valid, rewards - means[group], 0.0)
    residue = clean.new_zeros(num_groups).index_add(0, group, deviations)[group]
    others = (counts[group] - 1).clamp(min=1)
    baseline = means[group] + (residue - deviations) / others
    alone = counts[group] < 2
    return torch.where(valid, torch.where(alone, rewards, baseline), 0.0)


def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """Leave-one-out advantages: reward minus `rloo_baseline`, 0 where not valid. See there for arguments.

    Returns:
        [N], without gradient.
    """
    baseline = rloo_baseline(rewards, group_ids, valid)
    advantages = rewards.detach() - baseline
    return advantages if valid is None else torch.where(valid, advantages, 0.0)


def batch_mean_baseline(rewards: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean reward of all valid samples, for each sample: [N] to [N]; 0 where not valid.

    It includes the sample itself, which scales the expected gradient by (N - 1) / N.
    """
    rewards = rewards.detach()
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    mean = torch.where(valid, rewards, 0.0).sum() / valid.sum().clamp(min=1)
    return torch.where(valid, mean, 0.0)


def _check(rewards: Tensor, group_ids: Tensor, valid: Tensor | None) -> None:
    shapes = {"rewards": rewards.shape, "group_ids": group_ids.shape}
    if valid is not None:
        shapes["valid"] = valid.shape
    if len(set(shapes.values())) > 1 or rewards.dim() != 1:
        raise ValueError(f"expected 1-D tensors of one length, found { ({k: tuple(v) for k, v in shapes.items()}) }")
    if group_ids.is_floating_point():
        raise ValueError(f"group_ids must be integers, found {group_ids.dtype}")
    if valid is not None and valid.dtype != torch.bool:
        raise ValueError(f"valid must be a bool mask, found {valid.dtype}")
