"""Layer modules of megatron and torch, or optionally of Transformer Engine.

RMSNorm and SwiGLU save only the input and one number per row for the backward pass, where autograd
would keep every intermediate. This saves a fifth of a layer's activations.

Transformer Engine's linear layers add weight gradients to megatron's fp32 buffer
(`fuse_weight_gradients`), and its RoPE is in fp32. Its other parts are not used: its norm fused
into the next linear layer runs the same kernels without FP8 (v2.11), its attention has no KV cache,
packed groups or torch's flash kernel, and its cross-entropy needs all logits at once.

Notation: n positions, h hidden, f the MLP's width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.utils import get_te_version, is_te_min_version
from torch import Tensor
from torch.autograd.function import once_differentiable

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.model.attention import CoreAttention

# Attribute of weights whose gradient is added directly to `main_grad`.
IN_PLACE = "gradient_is_added_in_place"
# Lower bound of Transformer Engine in the extra `dev` of megatron-core 0.16.1, which also requires
# < 2.12.
OLDEST_VERSION = "2.9.0"
# Without Transformer Engine, megatron mocks this name with an object that isinstance() rejects.
_TE_LINEAR: tuple[Any, ...] = (te.TELinear,) if te.HAVE_TE else ()
# bf16 products can be kept in float32 on a GPU from torch 2.8 on.
_KEEPS_PRODUCTS = "dtype_out" in torch.ops.aten.mm.overloads()
# All tensor-parallel linear layers.
LINEAR: tuple[Any, ...] = (ColumnParallelLinear, RowParallelLinear, *_TE_LINEAR)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis, in at least float32.

    Source: arXiv:1910.07467.
    """
    if not torch.is_grad_enabled():
        return _normalised(x, weight, eps)[0]
    output: Any = _RMSNorm.apply(x, weight, eps)
    return output


def swiglu(x: Tensor) -> Tensor:
    """Compute silu(a) * b for the halves a, b of the last axis: [..., 2 f] to [..., f].

    Source: arXiv:2002.05202.
    """
    if not torch.is_grad_enabled():
        return _gated(x)
    output: Any = _SwiGLU.apply(x)
    return output


def vocabulary_logits(
    hidden: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    packed: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> Tensor:
    """Compute hidden weight^T in at least float32: [n, h] and [V, h] to [n, V].

    On a CPU, products of bf16 are rounded to bf16.

    Args:
        out: the result is written to it, without gradient.
        packed: the product with a packed copy of the weight, without gradient.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if packed is not None:
        return packed(hidden, None).to(dtype)
    if hidden.dtype == dtype:
        return torch.mm(hidden, weight.t(), out=out)
    if hidden.is_cuda and _KEEPS_PRODUCTS:  # bf16 would round a logit of 20 by up to 0.06
        if out is None:
            return torch.mm(hidden, weight.t(), out_dtype=dtype)
        return torch.mm(hidden, weight.t(), out_dtype=dtype, out=out)
    product = hidden @ weight.t()
    return product.to(dtype) if out is None else out.copy_(product)


def _gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a).mul_(b)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (
        torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        .square_()
        .div_(x.shape[-1])
        .add_(eps)
        .rsqrt_()
    )
    return (wide * scale).mul_(weight).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, scale = _normalised(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With n = x scale, dx = scale (g w - n mean(g w n)), and dw sums g n over all rows."""
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        product = gradient * normal
        grad_weight = (
            product.flatten(0, -2).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            mean = (product @ weight.to(scale.dtype))[..., None] / x.shape[-1]
            grad_x = (
                (gradient * weight).to(scale.dtype).sub_(normal.mul_(mean)).mul_(scale).to(x.dtype)
            )
        return grad_x, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_a, grad_b = grad_x.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(a), out=grad_b)
        grad_a.copy_(torch.ops.aten.silu_backward(gradient * b, a))
        return grad_x


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with megatron's constructor and sequence parallelism.

    megatron's `WrappedTorchNorm` refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        # Same device choice as megatron's layers; torch would default to the CPU.
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # torch's kernel is fused on a GPU
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class TESwiGLU:
    """Transformer Engine's SwiGLU.

    It is not a Module, since megatron asks every module of an MLP for its sharded state.
    """

    def __init__(self, config: TransformerConfig):
        self._function: Any = te.TEActivationOp(config)  # type: ignore[operator]

    def __call__(self, x: Tensor) -> Tensor:
        return self._function(x)


def block_spec(
    architecture: Architecture, config: TransformerConfig, pp_rank: int, *, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return a stage's layer spec.

    With Transformer Engine, `config` is modified. Raises ConfigError if it is missing or too old.
    """
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts: Any = layer.submodules
    attention = parts.self_attention.submodules
    mlp = parts.mlp.submodules
    norm = RMSNorm
    mlp.activation_func = swiglu
    if transformer_engine:
        _check_installed()
        norm = te.TENorm
        mlp.activation_func = TESwiGLU
        attention.linear_qkv = te.TEColumnParallelLinear
        mlp.linear_fc1 = te.TEColumnParallelLinear
        attention.linear_proj = te.TERowParallelLinear
        mlp.linear_fc2 = te.TERowParallelLinear
        config.apply_rope_fusion = True
        # With this cache, which is for FP8 only, a layer's first pass would overwrite the gradient
        # buffer instead of adding to it.
        config.disable_parameter_transpose_cache = True
    parts.input_layernorm = norm
    parts.pre_mlp_layernorm = norm
    attention.core_attention = CoreAttention
    if architecture.qk_norm:
        attention.q_layernorm = norm
        attention.k_layernorm = norm
    if architecture.output_bias:
        attention.linear_proj = _with_bias(attention.linear_proj)
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, pp_rank=pp_rank),
        layer_norm=norm,  # type: ignore[arg-type]
    )


def _check_installed() -> None:
    if te.HAVE_TE and is_te_min_version(OLDEST_VERSION):
        return
    installed = (
        f"Transformer Engine {get_te_version()} is installed"
        if te.HAVE_TE
        else "Transformer Engine is not there"
    )
    advice = "Install it (docs/gpu.md), or set model.transformer_engine=false"
    expected = f"expected {OLDEST_VERSION} or later"
    sentence = f"model.transformer_engine is true, but {installed}; {expected}. {advice}"
    raise ConfigError([Fault(sentence, key="config.transformer_engine.missing_or_old")])


def _with_bias(linear: Any) -> Any:
    # megatron's config has no option for a bias of attention's output projection only.
    class Biased(linear):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **{**options, "bias": True})

    return Biased


def linear_parts(layer: Any) -> tuple[bool, Tensor | None, bool]:
    """Return if a linear layer is row-parallel, its bias, and if the bias is left to the caller.

    The products of a row-parallel layer are summed over ranks.
    """
    if isinstance(layer, _TE_LINEAR):
        bias = layer.bias if layer.use_bias else None  # without a bias, `bias` is an empty tensor
        return layer.parallel_mode == "row", bias, layer.te_return_bias
    return isinstance(layer, RowParallelLinear), layer.bias, layer.skip_bias_add


def fuse_weight_gradients(lm: torch.nn.Module) -> None:
    """Let Transformer Engine's layers add weight gradients to megatron's buffers.

    There is no bf16 copy of the gradients then.
    """
    modules: list[Any] = list(lm.modules())
    for module in modules:
        if isinstance(module, _TE_LINEAR):
            module.fuse_wgrad_accumulation = hasattr(module.weight, "main_grad")


def buffer_of(weight: Tensor) -> Tensor | None:
    """Return the buffer that accumulates a weight's gradient; None if autograd accumulates it."""
    if getattr(weight, IN_PLACE, False):
        return weight.main_grad  # type: ignore[attr-defined]
    return None


def was_added(weight: Tensor) -> Tensor:
    """Return a placeholder for a gradient that is already in the buffer.

    megatron's hook requires a gradient, but ignores it.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)
