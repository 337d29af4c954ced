"""Causal attention on torch's kernels for megatron's layers, and its context parallelism.

The kernel is chosen here because torch prefers cuDNN on Hopper, which plans anew for each shape and
whose masked backward gives NaN at some lengths (pytorch#196678). Used instead: flash attention
without a mask for bf16 on a GPU, the memory-efficient kernel for fp32, the fused kernel on a CPU.

With n context-parallel ranks a sequence is cut into 2n chunks. Rank r holds chunks r and
2n - 1 - r, which balances causal work (Llama 3, arXiv:2407.21783, section 3.3.2). Keys and values
are gathered whole.

Notation: s sequence, b batch, h query heads, g key-value groups, d head size, c = s / 2n positions
of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from reinforce_rl.errors import ReinforceError


def zigzag_positions(length: int, size: int, rank: int, device: Any = None) -> Tensor:
    """Return the positions that a context-parallel rank holds: int64 [s / n], ascending."""
    chunks = torch.arange(length, device=device).view(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def chunk_ends(length: int, size: int, rank: int) -> tuple[int, int]:
    """Return the ends of a rank's two chunks. Takes the arguments of `zigzag_positions`."""
    return (rank + 1) * length // (2 * size), (2 * size - rank) * length // (2 * size)


def positions_below(bound: int, length: int, size: int, rank: int) -> int:
    """Count a rank's positions below `bound`. Takes the arguments of `zigzag_positions` too."""
    chunk = length // (2 * size)
    return sum(min(max(bound - end + chunk, 0), chunk) for end in chunk_ends(length, size, rank))


def gather_positions(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather positions in order: [k, s / n, ...] to [k, s, ...].

    A collective call, also in the backward pass.
    """
    shares: Tensor = _Gather.apply(values, group)  # type: ignore[assignment]
    early, late = shares.chunk(2, dim=2)  # [n, k, c, ...]
    in_order = torch.cat((early, late.flip(0)))
    return in_order.transpose(0, 1).flatten(1, 2)


def sum_of_shares(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks; a collective call.

    All ranks compute the same loss from the sum, so the gradient is the identity.
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
        # Every rank's queries attend to these keys and values.
        gradient = gradient.contiguous()
        if gradient.is_cuda:
            local_gradient = torch.empty_like(gradient[0])
            dist.reduce_scatter_tensor(local_gradient, gradient.flatten(0, 1), group=ctx.group)
            return local_gradient, None
        dist.all_reduce(gradient, group=ctx.group)  # gloo's reduce-scatter is no faster
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


def flash_takes(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if flash attention supports this device, dtype and head size."""
    low_precision = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and low_precision and head_size <= 256 and head_size % 8 == 0


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Compute causal attention with the last query aligned to the last key.

    query [b, h, s, d], key and value [b, g, t, d] with t >= s, to [b, h, s, d].
    """
    if window is None or key.shape[2] <= window:
        # `is_causal` of `scaled_dot_product_attention` aligns the first query and key. This
        # operator aligns the last, like torch's `causal_lower_right`.
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, scale=scale
        )[0]
    batch = len(query)
    lengths = [query.shape[2], key.shape[2]]
    kind = {"dtype": torch.int32, "device": query.device}
    starts = [torch.arange(0, batch * length + 1, length, **kind) for length in lengths]
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    out = flash_attention_of_sequences(query, key, value, starts, lengths, scale, window)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)


def flash_attention_of_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: list[Tensor],
    longest: list[int],
    scale: float | None,
    window: Any,
) -> Tensor:
    """Apply `flash_attention` within each of n sequences packed without padding.

    query [all queries, h, d], key and value [all keys, g, d] to [all queries, h, d]. `starts` are
    the cumulative lengths of queries and of keys, int32 [n + 1] each; `longest` are the largest
    lengths of a sequence. Calls the operator under `torch.nn.attention.varlen.varlen_attn`, which
    torch 2.9 lacks.
    """
    # With a window, causality comes from (left, right), which excludes the position itself.
    is_causal = window is None
    left = -1 if window is None else window - 1
    options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *starts, *longest, 0.0, is_causal, False, **options
    )[0]


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None = None
) -> Tensor:
    """Compute causal attention with grouped keys.

    query [b, h, s, d], key and value [b, g, s, d] to [b, h, s, d].
    """
    if flash_takes(query.device, query.dtype, query.shape[3]):
        return flash_attention(query, key, value, scale, window)
    length = query.shape[2]
    if window is None or length <= window:  # torch's kernels are faster without a mask
        return _attention(query, key, value, scale, is_causal=True)
    positions = torch.arange(length, device=query.device)
    return masked_attention(
        query, key, value, visible(positions[:, None], positions[None, :], window), scale
    )


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Compute grouped attention under a bool mask that broadcasts to [b, 1, s, t].

    `flash_attention` has the shapes.
    """
    return _attention(query, key, value, scale, attn_mask=mask)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, **options: Any
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if query.device.type == "cpu":
        return F.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=repeats > 1, **options
        )
    # The memory-efficient kernel lacks grouped keys; enable_gqa would fall back to unfused code.
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, scale=scale, **options)


def causal_attention_of_share(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Compute `causal_attention` at this rank's `zigzag_positions`.

    A collective call, also in the backward pass. query [b, h, s / n, d], key and value
    [b, g, s / n, d] to [b, h, s / n, d].
    """
    shares = torch.stack((key, value)).permute(0, 3, 1, 2, 4)  # [2, s / n, b, g, d]
    keys, values = gather_positions(shares, group).permute(0, 2, 3, 1, 4)
    flash = flash_takes(query.device, query.dtype, query.shape[3])
    others = None if flash else torch.arange(keys.shape[2], device=query.device)
    parts = []
    for queries, end in zip(
        query.chunk(2, dim=2), chunk_ends(keys.shape[2], group.size(), group.rank()), strict=True
    ):
        seen = keys[:, :, :end], values[:, :, :end]
        if others is None:
            parts.append(flash_attention(queries, *seen, scale, window))
        else:
            mask = visible(others[end - queries.shape[2] : end, None], others[None, :end], window)
            parts.append(masked_attention(queries, *seen, mask, scale))
    return torch.cat(parts, dim=2)


def visible(positions: Tensor, others: Tensor, window: int | None) -> Tensor:
    mask = others <= positions
    return mask if window is None else mask & (others > positions - window)


class CoreAttention(torch.nn.Module):
    """Core attention for megatron's layer spec, on torch's kernels, with megatron's arguments."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: Any,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__()
        if config.attention_dropout:
            raise ReinforceError(
                f"attention_dropout is {config.attention_dropout}; only 0 is supported",
                key="model.attention_dropout.not_supported",
            )
        self.scale = softmax_scale
        # megatron's (left, right) excludes the position itself.
        self._window = None if config.window_size is None else config.window_size[0] + 1
        self.layer = layer_number - 1  # megatron counts from 1
        self._cp_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """query [s, b, h, d], key and value [s, b, g, d] to [s, b, h * d].

        megatron passes two arguments through unchanged: `attention_mask`, here a `KVCache` or
        `FlashCache`, or None for a causal pass over right-padded sequences, and
        `packed_seq_params`, here `PackedGroups` or None.
        """
        if packed_seq_params is not None:
            return packed_seq_params.attend(query, key, value, self.scale).flatten(2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if attention_mask is not None:
            out = attention_mask.attend(self.layer, q, k, v, self.scale)
        elif self._cp_group.size() > 1:
            out = causal_attention_of_share(q, k, v, self.scale, self._window, self._cp_group)
        else:
            out = causal_attention(q, k, v, self.scale, self._window)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
