"""The layers of a decode step: megatron's own parts, called one after the other for a single token a row.

megatron's layers are written for long sequences and for gradients. For one token a row most of a step would be their
bookkeeping: sines and cosines computed anew in each layer, autograd functions, hooks for offloading and profiling.

Notation: R rows, h hidden, g key-value groups of this rank, n query heads a group, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from reinforce_rl.megatron.kv_cache import KVCache


def decode_layers(block: Any, embedded: Tensor | None, rotary: Tensor, cache: KVCache) -> Tensor:
    """What megatron's `TransformerBlock` computes of one token a row, without gradient.

    Args:
        block: of a model that `transformer_config` describes, without overrides.
        embedded: [1, R, h] on the first stage; None on later ones, which were given their input.
        rotary: the angles, float32 [1, R, 1, d].
        cache: keys and values, extended by this call.

    Returns:
        [1, R, h], after the final norm on the last stage.
    """
    hidden: Tensor = block.input_tensor if embedded is None else embedded
    half = rotary.shape[-1] // 2
    sine = rotary.sin()
    sine[..., :half].neg_()  # of x rolled by half its length, this makes the rotation
    cosine, sine = rotary.cos().to(hidden.dtype), sine.to(hidden.dtype)

    def rotated(x: Tensor) -> Tensor:
        return torch.addcmul(x * cosine, x.roll(half, dims=-1), sine)

    for layer in block.layers:
        attention, mlp = layer.self_attention, layer.mlp
        mixed, _ = attention.linear_qkv(layer.input_layernorm(hidden))
        groups = attention.num_query_groups_per_partition
        mixed = mixed.view(1, mixed.shape[1], groups, -1, rotary.shape[-1])  # [1, R, g, n + 2, d]
        query, key, value = mixed.split((mixed.shape[3] - 2, 1, 1), dim=3)
        query, key, value = (part.flatten(2, 3) for part in (query, key, value))
        if attention.q_layernorm is not None:
            query, key = attention.q_layernorm(query), attention.k_layernorm(key)
        context = attention.core_attention(rotated(query), rotated(key), value, cache)
        hidden = _add(attention.linear_proj(context), hidden)
        gate, up = mlp.linear_fc1(layer.pre_mlp_layernorm(hidden))[0].chunk(2, dim=-1)
        hidden = _add(mlp.linear_fc2(F.silu(gate).mul_(up)), hidden)
    return hidden if block.final_layernorm is None else block.final_layernorm(hidden)


def _add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
    output, bias = output_and_bias
    return residual + (output if bias is None else output + bias)
