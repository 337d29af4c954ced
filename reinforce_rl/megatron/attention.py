"""Core attention for megatron's layers on torch's scaled_dot_product_attention, with a KV cache for generation.

megatron hands whatever is given as `attention_mask` through to the core attention untouched. Here that is None for
a plain causal pass over right-padded sequences (padding lies behind every real token, so causality alone hides it),
or a `KVCache`. In `packed_seq_params` it hands through `PackedGroups`, which know how to attend. With context
parallelism, a pass without a cache is over a rank's share of the positions.

Notation: s sequence, b batch, h query heads, g key-value groups, d head size, L cache slots.
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
    from reinforce_rl.megatron.packing import PackedGroups


class KVCache:
    """Keys and values of b sequences, with slot p of a row holding its position p.

    Args:
        layers: numbers of this rank's layers, from 0 in the whole model.
        batch: rows.
        groups: key-value groups on this tensor-parallel rank.
        slots: the longest sequence, prompt and response.
        head_size: d.
        window: tokens that a position attends to, itself included; None for all before it.
    """

    def __init__(
        self,
        layers: range,
        batch: int,
        groups: int,
        slots: int,
        head_size: int,
        dtype: torch.dtype,
        device: Any,
        window: int | None = None,
    ):
        self._first_layer = layers.start
        shape = (len(layers), 2, batch, groups, slots, head_size)
        self._store = torch.zeros(shape, dtype=dtype, device=device)
        # int64 [b]: the position that each row's next token takes; None while the prompts are read.
        self.positions: Tensor | None = None
        self._used_slots = 0
        self._window = window
        self._mask: Tensor | None = None

    def begin_decoding(self, prompt_lengths: Tensor, num_samples: int) -> None:
        """Turn the cache of P prompts into that of P * num_samples rows, one prefill serving them all.

        Args:
            prompt_lengths: int64 [P].
            num_samples: rows a prompt, prompt-major.
        """
        self._store = self._store.repeat_interleave(num_samples, dim=2)
        self.at(prompt_lengths.repeat_interleave(num_samples))

    def at(self, positions: Tensor) -> None:
        """Set the position int64 [b] that each row's next token takes."""
        self.positions = positions
        self._used_slots = int(positions.max()) + 1
        slots = torch.arange(self._used_slots, device=positions.device)
        self._mask = visible(positions[:, None], slots[None, :], self._window)[:, None, None, :]

    def keep(self, rows: Tensor) -> None:
        """Drop every row but these (int64 [b']); what finished no longer costs anything."""
        self._store = self._store.index_select(2, rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store this step's keys and values and attend over all stored so far.

        Args:
            layer: its number in the whole model, from 0.
            query: [b, h, s, d]; key, value: [b, g, s, d].

        Returns:
            [b, h, s, d].
        """
        keys, values = self._store[layer - self._first_layer]
        if self.positions is None:
            width = key.shape[2]
            keys[:, :, :width] = key
            values[:, :, :width] = value
            return causal_attention(query, key, value, scale, self._window)
        rows = torch.arange(key.shape[0], device=key.device)
        keys[rows, :, self.positions] = key[:, :, 0]
        values[rows, :, self.positions] = value[:, :, 0]
        batch, heads, _, head_size = query.shape
        groups = keys.shape[1]
        # One query a row: the heads of a group stand in for the sequence axis, so keys are read once a group.
        grouped = query.view(batch, groups, heads // groups, head_size)
        used = self._used_slots
        out = F.scaled_dot_product_attention(
            grouped, keys[:, :, :used], values[:, :, :used], attn_mask=self._mask, scale=scale
        )
        return out.view(batch, heads, 1, head_size)


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
        self._scale = softmax_scale
        # megatron's (left, right) counts the tokens beside a position's own.
        self._window = None if config.window_size is None else config.window_size[0] + 1
        self._layer = layer_number - 1  # megatron counts from 1
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
            return packed_seq_params.attend(query, key, value, self._scale).flatten(2)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if attention_mask is not None:
            out = attention_mask.attend(self._layer, q, k, v, self._scale)
        elif self._cp_group.size() > 1:
            out = causal_attention_of_share(q, k, v, self._scale, self._window, self._cp_group)
        else:
            out = causal_attention(q, k, v, self._scale, self._window)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
