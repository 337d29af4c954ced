"""Kernels of the fake, as custom operators: one launch each on fake CUDA tensors, plain torch on a CPU.

Norm, SwiGLU, RoPE and the accumulating GEMM compute in fp32 and round once, as transformer_engine_torch's do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine import KERNELS


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _kernel(name, mutates=()):
    """Register a function as `fake_te::name`; it is counted where it runs."""

    def register(function):
        operator = torch.library.custom_op(f"fake_te::{name}", function, mutates_args=mutates)

        def call(*args):
            KERNELS[name] += 1
            return operator(*args)

        call.register_fake = operator.register_fake
        return call

    return register


@_kernel("rmsnorm_fwd")
def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = (_wide(x).square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (_wide(x) * scale * _wide(weight)).to(x.dtype), scale


@rmsnorm_fwd.register_fake
def _(x, weight, eps):
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


@_kernel("rmsnorm_bwd")
def rmsnorm_bwd(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normal, wide = _wide(x) * scale, _wide(grad)
    scaled = wide * _wide(weight)
    dx = scale * (scaled - normal * (scaled * normal).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), (wide * normal).flatten(0, -2).sum(dim=0).to(weight.dtype)


@rmsnorm_bwd.register_fake
def _(grad, x, scale, weight):
    return torch.empty_like(x), torch.empty_like(weight)


@_kernel("swiglu")
def swiglu(x: Tensor) -> Tensor:
    a, b = _wide(x).chunk(2, dim=-1)
    return (F.silu(a) * b).to(x.dtype)


@swiglu.register_fake
def _(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@_kernel("dswiglu")
def dswiglu(grad: Tensor, x: Tensor) -> Tensor:
    (a, b), wide = _wide(x).chunk(2, dim=-1), _wide(grad)
    sigmoid = a.sigmoid()
    return torch.cat((wide * b * sigmoid * (1 + a * (1 - sigmoid)), wide * a * sigmoid), dim=-1).to(x.dtype)


@dswiglu.register_fake
def _(grad, x):
    return torch.empty_like(x)


@_kernel("rope")
def rope(t: Tensor, angles: Tensor, backward: bool) -> Tensor:
    a, b = _wide(t).chunk(2, dim=-1)
    rotated = torch.cat((b, -a) if backward else (-b, a), dim=-1)
    return (_wide(t) * angles.cos() + rotated * angles.sin()).to(t.dtype)


@rope.register_fake
def _(t, angles, backward):
    return t.new_empty(t.shape)


@_kernel("wgrad_accumulate", mutates=("main_grad",))
def wgrad_accumulate(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    main_grad.addmm_(grad.t().to(main_grad.dtype), x.to(main_grad.dtype))


@wgrad_accumulate.register_fake
def _(main_grad, grad, x):
    return None


@_kernel("adam", mutates=("params", "exp_avg", "exp_avg_sq"))
def adam(
    grads: list[Tensor],
    params: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    weight_decay: float,
) -> None:
    for g, p, m, v in zip(grads, params, exp_avg, exp_avg_sq, strict=True):
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        p.sub_(lr * (update + weight_decay * p))


@adam.register_fake
def _(grads, params, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, step, weight_decay):
    return None


@_kernel("l2norm")
def l2norm(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm()[None], norms


@l2norm.register_fake
def _(tensors):
    first = tensors[0]
    return first.new_empty(1, dtype=torch.float32), first.new_empty(len(tensors), dtype=torch.float32)


@_kernel("scale", mutates=("targets",))
def scale(sources: list[Tensor], targets: list[Tensor], factor: float) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * factor)


@scale.register_fake
def _(sources, targets, factor):
    return None
