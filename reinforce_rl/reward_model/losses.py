"""The losses of reward models, as sums: divided by counts over a whole global batch, they add up over any cut of it.

Notation: P pairs, N sequences, K attributes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The sum over pairs of -log sigmoid(s_chosen - s_rejected), in nats (Bradley and Terry, 1952).

    Args:
        chosen, rejected: scores [P].
    """
    return F.softplus(rejected - chosen).sum()


def squared_error(predicted: Tensor, targets: Tensor) -> Tensor:
    """The sum of (predicted - target)^2 over the targets that are given.

    Args:
        predicted: [N, K].
        targets: [N, K]; NaN where none is given, from which no gradient comes.
    """
    given = ~targets.isnan()
    difference = torch.where(given, predicted - targets.nan_to_num(), 0.0)
    return difference.square().sum()
