"""Kernels of the fake as custom operators.

They are one launch each on fake CUDA tensors, and plain torch on a CPU. Norm, SwiGLU, RoPE and the
accumulating GEMM compute in fp32 and round once, like transformer_engine_torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine import KERNELS


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _kernel(name, shapes, mutates=()):
    """Register a function as `fake_te::name`, which counts its calls.

    `shapes` is the implementation for tensors without data.
    """

    def register(function):
        operator = torch.library.custom_op(f"fake_te::{name}", function, mutates_args=mutates)
        operator.register_fake(shapes)

        def call(*args):
            KERNELS[name] += 1
            return operator(*args)

        call.operator = operator
        return call

    return register


def _derive(kernel, saved, backward):
    """Give a kernel its derivative.

    `saved` selects tensors of its inputs and output; `backward` takes them after the gradient.
    """

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*saved(inputs, output))
        # Else the second output of a norm would get a gradient of zeros, a kernel more.
        ctx.set_materialize_grads(False)

    def derivative(ctx, grad, *_):
        return backward(grad, *ctx.saved_tensors)

    kernel.operator.register_autograd(derivative, setup_context=setup_context)


def _nothing(*args):
    return None


def _norm_and_scale(x, weight, eps):
    scale = x.new_empty((*x.shape[:-1], 1))
    return torch.empty_like(x), _wide(scale)


@_kernel("rmsnorm_fwd", _norm_and_scale)
def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = (_wide(x).square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (_wide(x) * scale * _wide(weight)).to(x.dtype), scale


@_kernel(
    "rmsnorm_bwd", lambda grad, x, scale, weight: (torch.empty_like(x), torch.empty_like(weight))
)
def rmsnorm_bwd(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    normal = _wide(x) * scale
    wide = _wide(grad)
    scaled = wide * _wide(weight)
    mean = (scaled * normal).mean(dim=-1, keepdim=True)
    dx = scale * (scaled - normal * mean)
    dweight = (wide * normal).flatten(0, -2).sum(dim=0)
    return dx.to(x.dtype), dweight.to(weight.dtype)


def _norm_gradients(grad, x, scale, weight):
    dx, dweight = rmsnorm_bwd(grad.contiguous(), x, scale, weight)
    return dx, dweight, None


_derive(rmsnorm_fwd, lambda inputs, output: (inputs[0], output[1], inputs[1]), _norm_gradients)


@_kernel("swiglu", lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def swiglu(x: Tensor) -> Tensor:
    a, b = _wide(x).chunk(2, dim=-1)
    return (F.silu(a) * b).to(x.dtype)


@_kernel("dswiglu", lambda grad, x: torch.empty_like(x))
def dswiglu(grad: Tensor, x: Tensor) -> Tensor:
    a, b = _wide(x).chunk(2, dim=-1)
    wide = _wide(grad)
    sigmoid = a.sigmoid()
    of_a = wide * b * sigmoid * (1 + a * (1 - sigmoid))
    of_b = wide * a * sigmoid
    return torch.cat((of_a, of_b), dim=-1).to(x.dtype)


_derive(swiglu, lambda inputs, _: inputs, lambda grad, x: dswiglu(grad.contiguous(), x))


@_kernel("rope", lambda t, angles, backward: t.new_empty(t.shape))
def rope(t: Tensor, angles: Tensor, backward: bool) -> Tensor:
    a, b = _wide(t).chunk(2, dim=-1)
    rotated = torch.cat((b, -a) if backward else (-b, a), dim=-1)
    return (_wide(t) * angles.cos() + rotated * angles.sin()).to(t.dtype)


_derive(rope, lambda inputs, _: inputs[1:2], lambda *saved: (rope(*saved, True), None, None))


@_kernel("wgrad_accumulate", _nothing, mutates=("main_grad",))
def wgrad_accumulate(main_grad: Tensor, grad: Tensor, x: Tensor, overwrite: bool) -> None:
    rows = grad.t().to(main_grad.dtype)
    columns = x.to(main_grad.dtype)
    main_grad.addmm_(rows, columns, beta=0 if overwrite else 1)


@_kernel("adam", _nothing, mutates=("params", "exp_avg", "exp_avg_sq"))
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
        mean = m / (1 - beta1**step)
        variance = v / (1 - beta2**step)
        update = mean / (variance.sqrt() + eps)
        p.sub_(lr * (update + weight_decay * p))


@_kernel("l2norm", lambda tensors: tensors[0].new_empty(1, dtype=torch.float32))
def l2norm(tensors: list[Tensor]) -> Tensor:
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm()[None]


@_kernel("scale", _nothing, mutates=("targets",))
def scale(sources: list[Tensor], targets: list[Tensor], factor: float) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * factor)
