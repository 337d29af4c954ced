"""Core attention for megatron's layers on torch's scaled_dot_product_attention.

megatron hands whatever is given as `attention_mask` through to the core attention untouched. Here that is None for
a plain causal pass over right-padded sequences (padding lies behind every real token, so causality alone hides it),
or a `KVCache`. In `packed_seq_params` it hands through `PackedGroups`, which know how to attend. With context
parallelism, a pass without a cache is over a rank's share of the positions.

Notation: s sequence, b batch, h query heads, g key-value groups, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.errors import ReinforceError
from reinforce_rl.megatron.context_parallel import gather_positions, zigzag_positions

if TYPE_CHECKING:
    from reinforce_rl.megatron.kv_cache import KVCache
    from reinforce_rl.megatron.packing import PackedGroups


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None = None
) -> Tensor:
    """Causal attention with grouped keys: query [b, h, s, d], key and value [b, g, s, d] to [b, h, s, d]."""
    grouped = key.shape[1] != query.shape[1]
    length = query.shape[2]
    if window is None or length <= window:  # without a mask, torch has faster kernels
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    positions = torch.arange(length, device=query.device)
    return masked_attention(query, key, value, visible(positions[:, None], positions[None, :], window), scale)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Attention with grouped keys where `mask`, bool, [b, 1, s, t] or as it broadcasts to that, is True.

    Args:
        query: [b, h, s, d].
        key, value: [b, g, t, d].

    Returns:
        [b, h, s, d].
    """
    grouped = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def causal_attention_of_share(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, group: dist.ProcessGroup
) -> Tensor:
    """As `causal_attention` of whole sequences, for the positions that this context-parallel rank holds.

    A collective call, and so is its backward pass.

    Args:
        query: [b, h, s / n, d]; key, value: [b, g, s / n, d], at this rank's `zigzag_positions`.

    Returns:
        [b, h, s / n, d].
    """
    shares = torch.stack((key, value)).permute(0, 3, 1, 2, 4)  # [2, s / n, b, g, d]
    keys, values = gather_positions(shares, group).permute(0, 2, 3, 1, 4)
    own = zigzag_positions(keys.shape[2], group.size(), group.rank(), device=query.device)
    others = torch.arange(keys.shape[2], device=query.device)
    parts = []
    for queries, positions in zip(query.chunk(2, dim=2), own.chunk(2), strict=True):
        end = int(positions[-1]) + 1
        mask = visible(positions[:, None], others[None, :end], window)
        parts.append(masked_attention(queries, keys[:, :, :end], values[:, :, :end], mask, scale))
    return torch.cat(parts, dim=2)


def visible(positions: Tensor, others: Tensor, window: int | None) -> Tensor:
    """Whether each position attends to each other one; the two broadcast."""
    mask = others <= positions
    return mask if window is None else mask & (others > positions - window)


class CoreAttention(torch.nn.Module):
    """megatron's core-attention slot, filled with torch's own kernel. Arguments are megatron's."""

    def __init__(
        self, config: Any, layer_number: int, pg_collection: Any, softmax_scale: float | None = None, **_: Any
    ):
        super().__init__()
        if config.attention_dropout:
            raise ReinforceError(f"attention_dropout is {config.attention_dropout}; only 0 is supported")
        self.scale = softmax_scale
        # megatron's (left, right) counts the tokens beside a position's own.
        self._window = None if config.window_size is None else config.window_size[0] + 1
        self.layer = layer_number - 1  # megatron counts from 1
        self._cp_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: KVCache | None,
        packed_seq_params: PackedGroups | None = None,
        **_: Any,
    ) -> Tensor:
        """query [s, b, h, d], key and value [s, b, g, d] to [s, b, h * d]."""
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
