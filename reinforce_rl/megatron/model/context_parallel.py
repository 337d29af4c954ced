"""Context parallelism: each rank holds two chunks of every sequence, one near its start and one near its end.

With n ranks a sequence is cut into 2n chunks, and rank r holds chunks r and 2n - 1 - r. Causal attention to a late
position costs more than to an early one, and so each rank has the same work (Llama 3, arXiv:2407.21783, section
3.3.2). Keys and values are gathered whole; queries stay where they are.

Notation: n ranks, s positions, c = s / 2n positions of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_positions(length: int, size: int, rank: int, device: Any = None) -> Tensor:
    """int64 [s / n]: the positions that a rank holds, ascending.

    Args:
        length: s, a multiple of 2n.
        size: n.
        rank: whose.
    """
    chunks = torch.arange(length, device=device).view(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def chunk_ends(length: int, size: int, rank: int) -> tuple[int, int]:
    """Where a rank's two chunks end, each of c positions; arguments as of `zigzag_positions`."""
    return (rank + 1) * length // (2 * size), (2 * size - rank) * length // (2 * size)


def positions_below(bound: int, length: int, size: int, rank: int) -> int:
    """How many of a rank's positions are below a bound; the other arguments as of `zigzag_positions`."""
    chunk = length // (2 * size)
    return sum(min(max(bound - end + chunk, 0), chunk) for end in chunk_ends(length, size, rank))


def gather_positions(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All positions in order, from the ranks' shares: [k, s / n, ...] to [k, s, ...], with gradient.

    A collective call, and so is its backward pass.
    """
    shares: Tensor = _Gather.apply(values, group)  # type: ignore[assignment]
    early, late = shares.chunk(2, dim=2)  # [n, k, c, ...]
    in_order = torch.cat((early, late.flip(0)))
    return in_order.transpose(0, 1).flatten(1, 2)


def sum_of_shares(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, each of which goes on to compute the same loss from it; a collective call.

    The gradient of a share is that of the sum: the ranks' losses are one, so it must not be added up.
    """
    return _Sum.apply(share, group)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        shares = values.new_empty((group.size() * len(values), *values.shape[1:]))
        dist.all_gather_into_tensor(shares, values.contiguous(), group=group)
        return shares.unflatten(0, (group.size(), -1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # Every rank's queries look at these keys and values.
        gradient = gradient.contiguous()
        if gradient.is_cuda:
            own = torch.empty_like(gradient[0])
            dist.reduce_scatter_tensor(own, gradient.flatten(0, 1), group=ctx.group)
            return own, None
        dist.all_reduce(gradient, group=ctx.group)  # gloo has no faster reduce-scatter
        return gradient[ctx.group.rank()], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
