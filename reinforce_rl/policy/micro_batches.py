"""Split sequences into micro-batches. The split affects time and memory, never the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def micro_batches(lengths: Tensor, size: int, max_tokens: int | None = None) -> list[Tensor]:
    """Return row indices by micro-batch, longest sequences first; every row is in exactly one.

    Rows of similar length share padding, and an out-of-memory error shows up in the first pass.

    Args:
        lengths: int64 [N], tokens.
        size: sequences per micro-batch; ignored if `max_tokens` is set.
        max_tokens: bound on rows times the longest row, padding included. A longer sequence gets a
            micro-batch to itself.
    """
    return micro_batches_of_episodes(lengths, torch.arange(len(lengths)), size, max_tokens)


def micro_batches_of_episodes(
    lengths: Tensor, rows: Tensor, size: int, max_tokens: int | None = None
) -> list[Tensor]:
    """Return row indices by micro-batch, as `micro_batches` does, of episodes in several contexts.

    Args:
        lengths: int64 [M], tokens of each context.
        rows: int64 [M], the row of each context's episode.
        size: contexts per micro-batch; ignored if `max_tokens` is set.
        max_tokens: bound on contexts times the longest. A larger episode gets a micro-batch to
            itself.
    """
    counts = torch.bincount(rows)
    longest = torch.zeros_like(counts).scatter_reduce(0, rows, lengths, "amax")
    order = torch.sort(longest, descending=True, stable=True).indices.tolist()
    limit = size if max_tokens is None else max_tokens
    groups: list[list[int]] = []
    contexts = 0  # of the last micro-batch
    cost = 0  # of each of them
    for row in order:
        count = int(counts[row])
        if not groups or (contexts + count) * cost > limit:
            groups.append([])
            contexts = 0
            # No context of the episodes that follow is longer.
            cost = 1 if max_tokens is None else max(int(longest[row]), 1)
        groups[-1].append(row)
        contexts += count
    return [torch.tensor(group, dtype=torch.long) for group in groups]


def packed_micro_batches(
    group_ids: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    size: int,
    max_tokens: int | None = None,
) -> list[Tensor]:
    """Return row indices by pass for `PackedGroups`.

    Samples of a prompt stay together if they fit into a pass.

    Args:
        group_ids, prompt_lengths, response_lengths: int64 [N].
        size: sequences per pass; ignored if `max_tokens` is set.
        max_tokens: tokens per pass, each prompt counted once. A longer sequence gets a pass to
            itself.
    """
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    prompts = prompt_lengths.tolist()
    responses = response_lengths.tolist()

    def cost(rows: list[int]) -> int:
        if max_tokens is None:
            return len(rows)
        return prompts[rows[0]] + sum(responses[row] for row in rows)

    limit = size if max_tokens is None else max_tokens
    passes: list[list[int]] = []
    used = limit
    for rows in sorted(groups.values(), key=cost, reverse=True):
        for part in _parts(rows, cost, limit):
            if used + cost(part) > limit:
                passes.append([])
                used = 0
            passes[-1] += part
            used += cost(part)
    return [torch.tensor(rows, dtype=torch.long) for rows in passes]


def _parts(rows: list[int], cost: Callable[[list[int]], int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = []
    for row in rows:
        if not parts or cost([*parts[-1], row]) > limit:
            parts.append([])
        parts[-1].append(row)
    return parts


def packed_tokens(group_ids: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> int:
    """Count tokens, each prompt once."""
    prompts = dict(zip(group_ids.tolist(), prompt_lengths.tolist(), strict=True))
    return sum(prompts.values()) + int(response_lengths.sum())


def padding(lengths: Tensor, groups: list[Tensor], pad_to: int = 0) -> tuple[int, int]:
    """Return the number of tokens without padding, and with the padding of each pass.

    `lengths` is int64 [N]. Rows are padded to at least `pad_to`.
    """
    padded = sum(len(rows) * max(int(lengths[rows].max()), pad_to) for rows in groups)
    return int(lengths[torch.cat(groups)].sum()) if groups else 0, padded
