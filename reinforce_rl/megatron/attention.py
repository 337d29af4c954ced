"""Core attention for megatron's layers on torch's scaled_dot_product_attention, with a KV cache for generation.

megatron hands whatever is given as `attention_mask` through to the core attention untouched. Here that is None for
a plain causal pass over right-padded sequences (padding lies behind every real token, so causality alone hides it),
or a `KVCache`.

Notation: s sequence, b batch, h query heads, g key-value groups, d head size, L cache slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.errors import ReinforceError


class KVCache:
    """Keys and values of b sequences, with slot p of a row holding its position p.

    Args:
        num_layers: layers on this rank.
        batch: rows.
        groups: key-value groups on this tensor-parallel rank.
        slots: the longest sequence, prompt and response.
        head_size: d.
        window: tokens that a position attends to, itself included; None for all before it.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        groups: int,
        slots: int,
        head_size: int,
        dtype: torch.dtype,
        device: Any,
        window: int | None = None,
    ):
        shape = (num_layers, 2, batch, groups, slots, head_size)
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
        self._mask = _visible(positions[:, None], slots[None, :], self._window)[:, None, None, :]

    def keep(self, rows: Tensor) -> None:
        """Drop every row but these (int64 [b']); what finished no longer costs anything."""
        self._store = self._store.index_select(2, rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Store this step's keys and values and attend over all stored so far.

        Args:
            layer: index on this rank, from 0.
            query: [b, h, s, d]; key, value: [b, g, s, d].

        Returns:
            [b, h, s, d].
        """
        keys, values = self._store[layer]
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
    mask = _visible(positions[:, None], positions[None, :], window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _visible(positions: Tensor, others: Tensor, window: int | None) -> Tensor:
    """Whether each position attends to each other one; the two broadcast."""
    mask = others <= positions
    return mask if window is None else mask & (others > positions - window)


class CoreAttention(torch.nn.Module):
    """megatron's core-attention slot, filled with torch's own kernel. Arguments are megatron's."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        if config.attention_dropout:
            raise ReinforceError(f"attention_dropout is {config.attention_dropout}; only 0 is supported")
        self._scale = softmax_scale
        # megatron's (left, right) counts the tokens beside a position's own.
        self._window = None if config.window_size is None else config.window_size[0] + 1
        self._layer = layer_number - 1  # megatron counts from 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: KVCache | None, **_: Any) -> Tensor:
        """query [s, b, h, d], key and value [s, b, g, d] to [s, b, h * d]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if attention_mask is None:
            out = causal_attention(q, k, v, self._scale, self._window)
        else:
            out = attention_mask.attend(self._layer, q, k, v, self._scale)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
