"""How sequences are cut into forward and backward passes. It never changes a gradient, only time and memory."""

from __future__ import annotations

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, size: int, max_tokens: int | None = None) -> list[Tensor]:
    """Row indices in groups, longest first, so that rows of like length share their padding.

    Longest first also shows an out-of-memory error at once rather than at the end of a pass.

    Args:
        lengths: int64 [N], tokens of each sequence.
        size: sequences in a group, where `max_tokens` is None.
        max_tokens: rows times the longest of them, padding included, stays within it: short sequences make large
            groups. A sequence that is longer alone is a group of its own.

    Returns:
        int64 indices; every row is in one group.
    """
    order = torch.sort(lengths, descending=True, stable=True).indices
    if max_tokens is None:
        return list(order.split(size)) if len(order) else []
    groups: list[list[int]] = []
    longest = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if not groups or (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = max(length, 1)
        groups[-1].append(row)
    return [torch.tensor(group, dtype=torch.long) for group in groups]


def padding(lengths: Tensor, groups: list[Tensor], pad_to: int = 0) -> tuple[int, int]:
    """Tokens of the sequences, and tokens of the passes with their padding.

    Args:
        lengths: int64 [N].
        groups: of `micro_batches`.
        pad_to: tokens that each row has at least.
    """
    padded = sum(len(rows) * max(int(lengths[rows].max()), pad_to) for rows in groups)
    return int(lengths[torch.cat(groups)].sum()) if groups else 0, padded
