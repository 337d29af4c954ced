"""Decoding without megatron's bookkeeping: linear layers without what gradients need, on a CPU from packed weights.

A decode step multiplies each weight by a handful of rows. torch's BLAS is made for many: from a packed weight oneDNN
computes such a product two to three times as fast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.megatron.model.layer_spec import LINEAR, linear_parts
from reinforce_rl.megatron.model.model import CausalLM

# oneDNN chooses a layout for so many rows; the product is right for any number of them.
_ROWS = 16


class _Forward:
    """Takes the place of a layer's `forward`; hooks of the layer, such as LoRA's, see the same inputs and outputs.

    Args:
        layer: neither gathers its output nor has sequence parallelism.
        weight: of the layer; the output layer may have none of its own.
        packed: multiply by a copy that oneDNN has laid out.
    """

    def __init__(self, layer: Any, weight: Tensor, packed: bool):
        weight = weight.detach()
        self._product: Callable[[Tensor, Tensor | None], Tensor]
        if packed:
            copy = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            self._product = lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
        else:
            self._product = lambda x, bias: F.linear(x, weight, bias)
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


def _onednn_knows(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    # Older CPUs have no instructions for bf16, and oneDNN no product without them.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def lean_decoding(lm: CausalLM) -> Iterator[None]:
    """Inside the block decode steps call megatron's parts without its bookkeeping; see `decode_step`.

    The linear layers compute without gradient, from the weights that they have at its start.

    Only within `CausalLM.whole_sequences`. On a CPU there is a packed copy of the weights where oneDNN knows their
    dtype: float32, and bf16 if the CPU has that.
    """
    packed = lm.mesh.device.type == "cpu" and _onednn_knows(lm.config.params_dtype)
    head = getattr(lm, "output_layer", None)  # on the last stage
    layers: list[Any] = [m for m in lm.modules() if isinstance(m, LINEAR)]
    try:
        for layer in layers:
            layer.forward = _Forward(layer, lm.output_weight if layer is head else layer.weight, packed)
        lm.decodes_lean = True
        yield
    finally:
        lm.decodes_lean = False
        for layer in layers:
            layer.__dict__.pop("forward", None)
