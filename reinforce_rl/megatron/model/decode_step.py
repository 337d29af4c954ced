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
    from reinforce_rl.megatron.model.flash_cache import FlashCache
    from reinforce_rl.megatron.model.kv_cache import KVCache


def decode_layers(block: Any, embedded: Tensor | None, rotary: Tensor, cache: KVCache | FlashCache) -> Tensor:
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
    rotations: tuple[Tensor, Tensor] | None = None
    half = rotary.shape[-1] // 2
    for layer in block.layers:
        attention, mlp = layer.self_attention, layer.mlp
        mixed, _ = attention.linear_qkv(layer.input_layernorm(hidden))
        rows, groups = mixed.shape[1], attention.num_query_groups_per_partition
        mixed = mixed.view(rows, groups, -1, rotary.shape[-1])  # [R, g, n + 2, d]
        if attention.q_layernorm is not None:
            query, key, value = mixed.split((mixed.shape[2] - 2, 1, 1), dim=2)
            mixed = torch.cat((attention.q_layernorm(query), attention.k_layernorm(key), value), dim=2)
        core = attention.core_attention
        if rotations is None:
            rotations = _rotations(rotary, mixed.shape[2] - 2, core.scale or rotary.shape[-1] ** -0.5, mixed.dtype)
        cosine, sine = rotations
        mixed = torch.addcmul(mixed * cosine, mixed.roll(half, dims=-1), sine)
        context = cache.step(core.layer, mixed[:, :, :-2], mixed[:, :, -2:])
        hidden = _add(attention.linear_proj(context.view(1, rows, -1)), hidden)
        gate, up = mlp.linear_fc1(layer.pre_mlp_layernorm(hidden))[0].chunk(2, dim=-1)
        hidden = _add(mlp.linear_fc2(F.silu(gate).mul_(up)), hidden)
    return hidden if block.final_layernorm is None else block.final_layernorm(hidden)


def _rotations(rotary: Tensor, heads: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors [R, 1, n + 2, d] of a group's queries, key and value, and of these rolled by half their length.

    Together they rotate queries and keys, scale queries, and leave values as they are.

    Args:
        rotary: the angles, [1, R, 1, d].
        heads: n.
        scale: of the scores.
    """
    angles = rotary[0, :, None]  # [R, 1, 1, d]
    cosine, sine = angles.cos(), angles.sin()
    sine[..., : sine.shape[-1] // 2].neg_()
    queries = [part.mul(scale).expand(-1, -1, heads, -1) for part in (cosine, sine)]
    return (
        torch.cat((queries[0], cosine, torch.ones_like(cosine)), dim=2).to(dtype),
        torch.cat((queries[1], sine, torch.zeros_like(sine)), dim=2).to(dtype),
    )


def _add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
    output, bias = output_and_bias
    return residual + (output if bias is None else output + bias)
