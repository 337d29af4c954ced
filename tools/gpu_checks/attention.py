"""Attention's forward and backward pass at many lengths, against the softmax written out in fp32.

cuDNN's masked backward gives NaN where length % 128 == 64 (pytorch#196678), so half of the lengths
are of this kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_checks.base import CPU, CUDA, Context, Finding, best_seconds, judged
from reinforce_rl.megatron.model.attention import causal_attention, masked_attention, visible

LENGTHS = (
    64,
    192,
    320,
    448,
    576,
    704,
    832,
    960,
    1088,
    1216,
    1,
    63,
    100,
    128,
    129,
    256,
    511,
    700,
    768,
    1024,
)
BATCH = 2
HEADS = 8
GROUPS = 2
HEAD_SIZE = 64
WINDOW = 48
# of a position: norm of the difference over the norm
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SHOWN_FAULTS = 5
KINDS = ("causal", "window", "masked")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def check(context: Context) -> Finding:
    lengths = [length for length in LENGTHS if context.mode != CPU or length < 300]
    cases = [(kind, length, dtype) for dtype in TOLERANCES for length in lengths for kind in KINDS]
    errors = {case: worst_error(*case, context.device) for case in cases}
    faults = [
        f"{kind} at {length} in {str(dtype)[6:]}: {name} is off by {error:.2g}, "
        f"expected {TOLERANCES[dtype]:g} at most"
        for (kind, length, dtype), (error, name) in errors.items()
        if not error <= TOLERANCES[dtype]
    ]
    hidden = len(faults) - SHOWN_FAULTS
    if hidden > 0:
        faults = faults[:SHOWN_FAULTS]
        faults.append(f"and {hidden} more")
    numbers: dict[str, Any] = {}
    for dtype in TOLERANCES:
        for kind in KINDS:
            of_lengths = [errors[kind, length, dtype][0] for length in lengths]
            name = str(dtype).removeprefix("torch.")
            numbers[f"worst {kind} {name}"] = max(of_lengths)
    bad = [length for length in lengths if not _finite_by_torch(length, context.device)]
    numbers["lengths at which torch's own choice has no finite masked backward pass"] = bad
    if context.mode == CUDA:
        numbers["milliseconds"] = [_times(length) for length in (704, 1024, 4096)]
    return judged(
        faults,
        f"{len(cases)} cases at {len(lengths)} lengths; torch's own choice fails at {bad}",
        numbers,
    )


def _mask(kind: str, length: int, device: str) -> Tensor:
    """bool, broadcasts to [b, 1, s, s].

    It is causal, has a window, or hides tokens from the late tokens of a row.
    """
    positions = torch.arange(length, device=device)
    window = WINDOW if kind == "window" else None
    mask = visible(positions[:, None], positions[None, :], window)
    mask = mask.expand(BATCH, 1, length, length)
    if kind == "masked":
        mask = mask.clone()
        mask[0, :, length // 2 :, : length // 4] = False
    return mask


def _ours(kind: str, mask: Tensor) -> Attend:
    if kind == "masked":
        return lambda q, k, v: masked_attention(q, k, v, mask, None)
    return lambda q, k, v: causal_attention(q, k, v, None, WINDOW if kind == "window" else None)


def _torchs(kind: str, mask: Tensor) -> Attend:
    given = mask if kind == "masked" else None
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, given, is_causal=given is None, enable_gqa=True
    )


def _written_out(mask: Tensor) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (key, value))
        scores = (query @ key.transpose(-1, -2) / HEAD_SIZE**0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(dim=-1) @ value

    return attend


def _inputs(length: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key, value and the gradient of the result, the same for a length."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, heads, length, HEAD_SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _with_gradients(attend: Attend, inputs: list[Tensor]) -> list[Tensor]:
    parts = [value.detach().requires_grad_() for value in inputs[:3]]
    out = attend(*parts)
    return [out.detach(), *torch.autograd.grad(out, parts, inputs[3])]


def worst_error(kind: str, length: int, dtype: torch.dtype, device: str) -> tuple[float, str]:
    """The largest error of a position in the result and in its three gradients, and its tensor.

    NaN counts as infinity.
    """
    inputs = _inputs(length, dtype, device)
    mask = _mask(kind, length, device)
    computed = _with_gradients(_ours(kind, mask), inputs)
    expected = _with_gradients(_written_out(mask), [value.float() for value in inputs])
    errors = []
    for name, ours, right in zip(("output", "dq", "dk", "dv"), computed, expected, strict=True):
        difference = (ours.float() - right).norm(dim=-1)
        sizes = right.norm(dim=-1)
        # At length 1 the scores have no gradient: what is there is rounding.
        typical = sizes.square().mean().sqrt().clamp(min=1e-2 * HEAD_SIZE**0.5)
        error = float((difference / (sizes + typical)).max())
        errors.append((error if math.isfinite(error) else math.inf, name))
    return max(errors)


def _finite_by_torch(length: int, device: str) -> bool:
    """Whether the masked backward pass in bf16 is finite where torch chooses the kernel."""
    attend = _torchs("masked", _mask("masked", length, device))
    return all(
        bool(t.isfinite().all())
        for t in _with_gradients(attend, _inputs(length, torch.bfloat16, device))
    )


def _times(length: int) -> dict[str, Any]:
    """Forward and backward in bf16, by this project and by torch's own choice."""
    inputs = _inputs(length, torch.bfloat16, CUDA)
    row: dict[str, Any] = {"length": length}
    for kind in ("causal", "masked"):
        mask = _mask(kind, length, CUDA)
        for name, attend in (("ours", _ours(kind, mask)), ("torch's choice", _torchs(kind, mask))):
            row[f"{kind}, {name}"] = 1e3 * best_seconds(
                lambda attend=attend: _with_gradients(attend, inputs), CUDA
            )
    return row
