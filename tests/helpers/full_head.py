"""Inputs of an output layer, and its log-probs and entropies from whole logits by plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def head_inputs(
    positions: int, tokens: int, rows: int, hidden_size: int = 5, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random (hidden [n, h], weight [rows, h], targets [n] below `tokens`), the first two float64 with gradient.

    `scale` is about the standard deviation of the logits. Padded rows of the weight are not zero, so that it shows
    where they are used.
    """
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.float64, "generator": generator}
    hidden = torch.randn(positions, hidden_size, **options) * scale / hidden_size**0.5
    weight = torch.randn(rows, hidden_size, **options)
    targets = torch.randint(0, tokens, (positions,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def full_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, both [n]."""
    table = torch.log_softmax(hidden @ weight.t() / temperature, dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(dim=-1)
