"""Operators that torch's CPU build cannot run on fake CUDA tensors: attention's choice of a kernel, and RMSNorm.

The choice follows torch 2.13's order on Hopper (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`): cuDNN, flash,
memory-efficient, math, each where its conditions hold and `torch.nn.attention.sdpa_kernel` allows it. It is a rule
written down here, not torch's own answer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from reinforce_rl.preflight.fake_cuda.mode import LOW_PRECISION, FakeCuda, size_of

_MAX_HEAD = 256  # of flash and cuDNN
_aten = torch.ops.aten


def replace_kernels(gpu: FakeCuda) -> None:
    """Put the replacements into `torch.nn.functional`; other tensors still get torch's own."""
    torch_attention, torch_norm = F.scaled_dot_product_attention, F.rms_norm

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not (isinstance(query, FakeTensor) and query.device.type == "cuda"):
            options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return torch_attention(query, key, value, attn_mask, dropout_p, **options)
        for other in (key, value, attn_mask):
            if other is not None and other.device != query.device:
                raise RuntimeError(f"attention of queries on {query.device} with a tensor on {other.device}")
        if key.shape[1] != query.shape[1] and not enable_gqa:
            raise RuntimeError(f"attention of {query.shape[1]} heads with {key.shape[1]} key heads without enable_gqa")
        kernel = _choice(query, key, attn_mask, is_causal)
        shapes = f"q{list(query.shape)} k{list(key.shape)} {str(query.dtype)[6:]}"
        gpu.ledger.attention[f"{kernel} {shapes}{' masked' if attn_mask is not None else ''}"] += 1
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if kernel == "math":
            return _math(query, key, value, attn_mask, is_causal, factor)
        if kernel == "flash" or (kernel == "cudnn" and attn_mask is None):
            flash: Any = _aten._scaled_dot_product_flash_attention
            return flash(query, key, value, 0.0, is_causal, False, scale=factor)[0]
        if kernel == "cudnn":  # takes grouped keys; its costs are like the efficient kernel's
            key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
        bias = None
        if attn_mask is not None:
            bias = _bias(attn_mask, query.dtype).expand(*query.shape[:3], key.shape[2])
        keeps = torch.is_grad_enabled() and query.requires_grad
        efficient: Any = _aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, bias, keeps, 0.0, is_causal, scale=factor)[0]

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if not (isinstance(x, FakeTensor) and x.device.type == "cuda"):
            return torch_norm(x, shape, weight, eps)
        assert weight is not None
        if weight.device != x.device:
            raise RuntimeError(f"rms_norm of a tensor on {x.device} with a weight on {weight.device}")
        return _Norm.apply(x, weight, gpu)  # type: ignore[return-value]

    F.scaled_dot_product_attention = attention
    F.rms_norm = rms_norm


def _choice(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    low = query.dtype in LOW_PRECISION
    grouped = key.shape[1] != query.shape[1]
    fits = low and query.shape[-1] <= _MAX_HEAD and query.shape[-1] % 8 == 0
    square = not is_causal or query.shape[2] == key.shape[2]
    backends: Any = torch.backends.cuda
    if backends.cudnn_sdp_enabled() and fits and square:
        return "cudnn"
    if backends.flash_sdp_enabled() and fits and square and mask is None:
        return "flash"
    if backends.mem_efficient_sdp_enabled() and not grouped:
        return "efficient"
    if backends.math_sdp_enabled():
        return "math"
    raise RuntimeError("No available kernel. Aborting execution.")


def _math(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Keys and values repeated for each head, scores whole: its memory is what matters here."""
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    scores = torch.matmul(query * math.sqrt(scale), key.transpose(-1, -2) * math.sqrt(scale))
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores + _bias(mask, query.dtype)
    return torch.matmul(_aten._safe_softmax(scores, -1), value)


def _repeated(keys: Tensor, heads: int) -> Tensor:
    return keys if keys.shape[1] == heads else keys.repeat_interleave(heads // keys.shape[1], 1)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask.logical_not(), float("-inf"))


class _Norm(torch.autograd.Function):
    """One kernel forward and two backward, as torch has them on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gpu: FakeCuda) -> Tensor:
        rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        ctx.gpu = gpu
        gpu.launch("_fused_rms_norm", [x], nbytes=2 * size_of(x))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        ctx.gpu.launch("_fused_rms_norm_backward", [x], launches=2, nbytes=4 * size_of(x))
        return torch.empty_like(x), torch.empty_like(weight), None
