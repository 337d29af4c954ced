"""RMSNorm and SwiGLU whose backward pass needs less of the forward pass.

Of both, autograd keeps every intermediate result. What is needed is the input, which exists anyway, and a number a
row. That is a fifth of a layer's activations.

Notation: h hidden, f the MLP's width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467), in float32 where x is bf16."""
    if not torch.is_grad_enabled():
        return _normalised(x, weight, eps)[0]
    found: Any = _RMSNorm.apply(x, weight, eps)
    return found


def swiglu(x: Tensor) -> Tensor:
    """silu(a) * b of the halves a, b of the last axis (arXiv:2002.05202): [..., 2 f] to [..., f]."""
    found: Any = _SwiGLU.apply(x)
    return found


def _normalised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / sqrt(mean(x^2) + eps)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found, scale = _normalised(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With n = x scale, dx = scale (g w - n mean(g w n)), and dw sums g n over all rows."""
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        product = gradient * normal
        grad_weight = product.flatten(0, -2).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            mean = (product @ weight.to(scale.dtype))[..., None] / x.shape[-1]
            grad_x = (gradient * weight).to(scale.dtype).sub_(normal.mul_(mean)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, dim=-1)
        return F.silu(a).mul_(b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        found = torch.empty_like(x)
        grad_a, grad_b = found.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(a), out=grad_b)
        grad_a.copy_(torch.ops.aten.silu_backward(gradient * b, a))
        return found
