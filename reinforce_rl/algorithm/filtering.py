"""Dynamic filtering: prompts whose samples all earn the same teach nothing (DAPO, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

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
