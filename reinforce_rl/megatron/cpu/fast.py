"""Faster products on a CPU.

Weight gradients are added directly to megatron's buffers, and decode steps use packed weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from reinforce_rl.megatron.model.layers import IN_PLACE, was_added


def add_gradients_in_place(lm: Any) -> None:
    """Make later backward passes add to the gradient buffers directly."""
    has_head = lm.post_process and lm.architecture.num_labels is None
    is_shared = has_head and lm.share_embeddings_and_output_weights
    tensor_parallel.layers.fused_weight_gradient_mlp_cuda = _Kernel  # type: ignore[attr-defined]
    for module in lm.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not hasattr(weight, "main_grad"):
            continue  # frozen, or tied to the embedding
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = True
        elif isinstance(module, VocabParallelEmbedding):
            module.forward = partial(_look_up, module, is_shared)  # type: ignore[method-assign]
            # megatron sets this for a shared weight, and would then add the placeholder of
            # `was_added` to the gradient. See `_RowsOf`.
            weight.zero_out_wgrad = False
        else:
            continue
        setattr(weight, IN_PLACE, True)


class _Kernel:
    """Replaces Apex's `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(grad_output.t(), inputs)


def _look_up(embedding: Any, is_shared: bool, tokens: Tensor) -> Tensor:
    """Look up int64 [b, s] to [b, s, h].

    With sequence parallelism the result is this rank's share of [s, b, h].
    """
    if embedding.tp_group.size() == 1:
        return _RowsOf.apply(embedding.weight, tokens, is_shared)  # type: ignore[no-any-return]
    first = embedding.vocab_start_index
    mine = (tokens >= first) & (tokens < embedding.vocab_end_index)
    rows: Any = _RowsOf.apply(embedding.weight, torch.where(mine, tokens - first, 0), is_shared)
    rows = rows * mine[..., None]
    if embedding.reduce_scatter_embeddings:
        shares = rows.transpose(0, 1).contiguous()
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(
            shares, group=embedding.tp_group
        )
    return tensor_parallel.reduce_from_tensor_model_parallel_region(rows, group=embedding.tp_group)


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, is_shared: bool) -> Tensor:
        ctx.save_for_backward(weight, tokens)
        ctx.is_shared = is_shared
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        weight, tokens = ctx.saved_tensors
        weight.main_grad.index_add_(0, tokens.flatten(), gradient.flatten(0, -2))
        # For a tied weight only the output layer returns a gradient, as autograd would sum the two
        # placeholders.
        return None if ctx.is_shared else was_added(weight), None, None


_ROWS = 16  # oneDNN's layout is optimized for this many; the product is correct for any number


def packed_product(weight: Tensor) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """Return the function (x, bias) -> x weight^T + bias on a packed copy of the weight.

    None on a GPU, or for a dtype that oneDNN does not support on this CPU.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    has_bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype != torch.float32 and not has_bf16:
        return None
    copy = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
