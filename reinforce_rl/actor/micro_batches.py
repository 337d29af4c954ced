"""How sequences are cut into forward and backward passes. It never changes a gradient, only time and memory."""

from __future__ import annotations

from collections.abc import Callable

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


def packed_micro_batches(
    group_ids: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, size: int, max_tokens: int | None = None
) -> list[Tensor]:
    """Row indices for `PackedGroups`: samples of a prompt lie together where there is room, longest group first.

    Args:
        group_ids, prompt_lengths, response_lengths: int64 [N].
        size: sequences in a pass, where `max_tokens` is None.
        max_tokens: of a pass, a prompt counted once. A sequence that is longer alone is a pass of its own.

    Returns:
        int64 indices; every row is in one pass.
    """
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    prompts, responses = prompt_lengths.tolist(), response_lengths.tolist()

    def cost(rows: list[int]) -> int:
        """What adding rows of one prompt to a pass without it takes from what it has room for."""
        return len(rows) if max_tokens is None else prompts[rows[0]] + sum(responses[row] for row in rows)

    most = size if max_tokens is None else max_tokens
    passes: list[list[int]] = []
    used = most
    for rows in sorted(groups.values(), key=cost, reverse=True):
        parts = [rows] if cost(rows) <= most else _parts(rows, cost, most)
        for part in parts:
            if used + cost(part) > most:
                passes.append([])
                used = 0
            passes[-1] += part
            used += cost(part)
    return [torch.tensor(rows, dtype=torch.long) for rows in passes]


def _parts(rows: list[int], cost: Callable[[list[int]], int], most: int) -> list[list[int]]:
    """Rows of one prompt in as few parts as have room for them, in their order."""
    parts: list[list[int]] = []
    for row in rows:
        if not parts or cost([*parts[-1], row]) > most:
            parts.append([])
        parts[-1].append(row)
    return parts


def packed_tokens(group_ids: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> int:
    """Tokens of the sequences with each prompt counted once."""
    prompts = dict(zip(group_ids.tolist(), prompt_lengths.tolist(), strict=True))
    return sum(prompts.values()) + int(response_lengths.sum())


def padding(lengths: Tensor, groups: list[Tensor], pad_to: int = 0) -> tuple[int, int]:
    """Tokens of the sequences, and tokens of the passes with their padding.

    Args:
        lengths: int64 [N].
        groups: of `micro_batches`.
        pad_to: tokens that each row has at least.
    """
    padded = sum(len(rows) * max(int(lengths[rows].max()), pad_to) for rows in groups)
    return int(lengths[torch.cat(groups)].sum()) if groups else 0, padded
