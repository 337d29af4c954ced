"""Attention's forward and backward pass at many lengths, against the softmax written out in fp32.

cuDNN's masked backward gives NaN where length % 128 == 64 (pytorch#196678), so half of the lengths are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_checks.base import CPU, CUDA, Context, Finding, best_seconds, judged
from reinforce_rl.megatron.attention import causal_attention, masked_attention, visible

LENGTHS = (64, 192, 320, 448, 576, 704, 832, 960, 1088, 1216, 1, 63, 100, 128, 129, 256, 511, 700, 768, 1024)
BATCH, HEADS, GROUPS, HEAD_SIZE = 2, 8, 2, 64
WINDOW = 48
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # norm of the difference over the norm
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def check(context: Context) -> Finding:
    lengths = [length for length in LENGTHS if length < 300] if context.mode == CPU else LENGTHS
    rows, faults, torch_nan = [], [], []
    for dtype in TOLERANCES:
        for length in lengths:
            for kind in ("causal", "masked", "window"):
                row = of_length(kind, length, dtype, context.device)
                rows.append(row)
                if not row["worst"] <= TOLERANCES[dtype]:  # NaN is no pass
                    faults.append(
                        f"{kind} at {length} in {row['dtype']}: {row['of']} is off by {row['worst']:.2g}, expected "
                        f"{TOLERANCES[dtype]:g} at most"
                    )
            if dtype == torch.bfloat16 and not _finite_by_torch(length, context.device):
                torch_nan.append(length)
    worst = {
        f"{kind} {name}": max(row["worst"] for row in rows if (row["kind"], row["dtype"]) == (kind, name))
        for kind in ("causal", "masked", "window")
        for name in ("float32", "bfloat16")
    }
    numbers: dict[str, Any] = {"lengths": list(lengths), "worst": worst}
    numbers["lengths at which torch's own choice has a masked backward pass that is not finite"] = torch_nan
    if context.mode == CUDA:
        numbers["milliseconds"] = [_times(length) for length in (704, 1024, 4096)]
    if len(faults) > 5:
        faults = [*faults[:5], f"and {len(faults) - 5} more"]
    return judged(
        faults, f"{len(rows)} cases at {len(lengths)} lengths, bf16 within {max(worst.values()):.1e}", numbers
    )


def _inputs(length: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key, value and the gradient of the result, the same for a length."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, heads, length, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _mask(kind: str, length: int, device: str) -> Tensor:
    """bool, as it broadcasts to [b, 1, s, s]: causal, and for "masked" rows that begin with padding."""
    at = torch.arange(length, device=device)
    if kind == "window":
        return visible(at[:, None], at[None, :], WINDOW)
    mask = visible(at[:, None], at[None, :], None).expand(BATCH, 1, length, length).clone()
    if kind == "masked":
        mask[0, :, length // 2 :, : length // 4] = False
    return mask


def of_length(kind: str, length: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The largest relative error of the result and of the three gradients."""
    mask = _mask(kind, length, device)
    ours: dict[str, Attend] = {
        "causal": lambda q, k, v: causal_attention(q, k, v, None),
        "window": lambda q, k, v: causal_attention(q, k, v, None, WINDOW),
        "masked": lambda q, k, v: masked_attention(q, k, v, mask, None),
    }
    inputs = _inputs(length, dtype, device)
    found = _with_gradients(ours[kind], inputs)
    expected = _with_gradients(lambda q, k, v: _written_out(q, k, v, mask), [value.float() for value in inputs])
    errors = {}
    for name, own, right in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
        # At length 1 the scores have no gradient: what is there is rounding.
        size = right.norm().clamp(min=1e-2 * inputs[3].float().norm())
        error = float((own.float() - right).norm() / size)
        errors[name] = error if math.isfinite(error) else math.inf
    of = max(errors, key=lambda name: errors[name])
    return {"kind": kind, "length": length, "dtype": str(dtype)[6:], "worst": errors[of], "of": of}


def _with_gradients(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    parts = [value.detach().requires_grad_() for value in inputs[:3]]
    out = attend(*parts)
    return [out.detach(), *torch.autograd.grad(out, parts, inputs[3])]


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    key, value = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2) / HEAD_SIZE**0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value


def _finite_by_torch(length: int, device: str) -> bool:
    """Whether the masked backward pass is finite where torch chooses the kernel."""
    mask = _mask("masked", length, device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    found = _with_gradients(attend, _inputs(length, torch.bfloat16, device))
    return all(bool(value.isfinite().all()) for value in found)


def _times(length: int) -> dict[str, Any]:
    """Forward and backward in bf16, by this project and by torch's own choice."""
    inputs, mask = _inputs(length, torch.bfloat16, CUDA), _mask("masked", length, CUDA)
    sides: dict[str, Attend] = {
        "causal": lambda q, k, v: causal_attention(q, k, v, None),
        "causal, torch's choice": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
        "masked": lambda q, k, v: masked_attention(q, k, v, mask, None),
        "masked, torch's choice": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=True
        ),
    }
    row: dict[str, Any] = {"length": length}
    for name, attend in sides.items():
        row[name] = 1e3 * best_seconds(lambda attend=attend: _with_gradients(attend, inputs), CUDA)
    return row
