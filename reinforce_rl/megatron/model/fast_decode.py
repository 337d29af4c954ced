"""Single-token decode steps on megatron's modules without its bookkeeping (sines per layer, autograd, hooks).

Notation: R rows, h hidden, g key-value groups of this rank, n query heads a group, d head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.megatron.cpu.packed_weights import packed_product
from reinforce_rl.megatron.model.kv_cache import FlashCache, KVCache
from reinforce_rl.megatron.model.layers import linear_parts


def decode_layers(block: Any, embedded: Tensor | None, rotary: Tensor, cache: KVCache | FlashCache) -> Tensor:
    """Run a `TransformerBlock` on one token per row, without gradient.

    Args:
        block: built by `transformer_config` without overrides.
        embedded: [1, R, h] on the first stage; None on later ones, which use their input tensor.
        rotary: angles, float32 [1, R, 1, d].
        cache: extended by this call.

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
    """Return factors [R, 1, n + 2, d] for a group's (queries, key, value) and for the same rolled by d / 2.

    They rotate queries and keys, scale queries, and leave values unchanged. rotary: angles [1, R, 1, d].
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


@contextlib.contextmanager
def products_without_gradient(weights: Mapping[Any, Tensor]) -> Iterator[None]:
    """Make these linear layers multiply by their current weights inside the block, without gradient.

    Args:
        weights: weight per layer; no layer may gather its output or use sequence parallelism.
    """
    try:
        for layer, weight in weights.items():
            layer.forward = _Product(layer, weight.detach())
        yield
    finally:
        for layer in weights:
            layer.__dict__.pop("forward", None)


class _Product:
    """Replaces a layer's `forward`; its hooks, such as LoRA's, still run."""

    def __init__(self, layer: Any, weight: Tensor):
        self._product = packed_product(weight) or (lambda x, bias: F.linear(x, weight, bias))
        parts = linear_parts(layer)
        self._group = parts.group if parts.adds_up and parts.group.size() > 1 else None
        self._bias = None if parts.bias is None else parts.bias.detach()
        self._returns_bias = parts.returns_bias

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        added, returned = (None, self._bias) if self._returns_bias else (self._bias, None)
        if self._group is None:
            return self._product(x, added), returned
        out = self._product(x, None)
        dist.all_reduce(out, group=self._group)
        return out if added is None else out + added, returned
