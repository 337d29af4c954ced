"""Matrix products of decoding on the CPU, from weights that oneDNN has laid out for few rows.

A decode step multiplies each weight by a handful of rows. torch's BLAS is made for many: from a packed weight oneDNN
computes such a product three times as fast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from reinforce_rl.megatron.model import CausalLM

# oneDNN chooses a layout for so many rows; the product is right for any number of them.
_ROWS = 16
_DTYPES = (torch.float32, torch.bfloat16)


class _PackedProduct:
    """Takes the place of the product inside one of megatron's linear layers; communication stays megatron's."""

    def __init__(self, weight: Tensor):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, bias, "none", [], "")


@contextlib.contextmanager
def packed_weights(lm: CausalLM) -> Iterator[None]:
    """Inside the block the linear layers multiply by packed copies of the weights that they have now.

    The copies take as much memory as the weights. No gradient may flow, and weights may not change. Nothing happens
    where oneDNN does not compute: on a GPU, or in float64.
    """
    layers: list[Any] = []
    if lm.mesh.device.type == "cpu" and lm.config.params_dtype in _DTYPES and torch.backends.mkldnn.is_available():
        layers = [m for m in lm.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    try:
        for layer in layers:
            is_head = layer is lm.output_layer
            layer._forward_impl = _PackedProduct(lm.output_weight if is_head else layer.weight)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("_forward_impl", None)
