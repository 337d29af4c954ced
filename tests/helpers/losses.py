"""Losses with the policy gradient only."""

from __future__ import annotations

import torch
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators, LossInputs, LossSettings, policy_loss


def reinforce_loss(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    trains: Tensor,
    denominators: Denominators,
    aggregation: str = "sequence_sum",
) -> Tensor:
    """Compute REINFORCE with one advantage per response: [N]."""
    inputs = LossInputs(mask, advantages[:, None].expand(mask.shape), trains)
    return policy_loss(log_probs, None, inputs, denominators, LossSettings(aggregation))[0]


def random_batch(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs [rows, width], mask, advantages [rows] and the rows that train.

    Responses may be empty.
    """
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, width, dtype=torch.float64, generator=generator) * 5
    lengths = torch.randint(0, width + 1, (rows,), generator=generator)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    advantages = torch.randn(rows, dtype=torch.float64, generator=generator)
    valid = torch.rand(rows, generator=generator) < 0.7
    return log_probs, mask, advantages, valid
