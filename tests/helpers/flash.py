"""torch's flash attention operators on the CPU, which has none, in plain torch.

The semantics are from flash-attention's description of `flash_attn_varlen_func` (causality and
windows are aligned to the lower right corner of the score matrix) and from
`torch.nn.attention.varlen` and `.bias`, which call the same operators. The autograd formulas are
torch's: only the forward and backward kernels are replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.library import Library

from reinforce_rl.generation.native import generator as native
from reinforce_rl.megatron.model import attention, decoding, sequences


@contextlib.contextmanager
def flash_on_cpu(calls: list[tuple[int, ...]] | None = None) -> Iterator[None]:
    """Emulate flash attention on the CPU in any dtype.

    `calls` records (sequences, queries, keys) of each forward call.
    """
    library = Library("aten", "IMPL")

    def of_sequences(
        q,
        k,
        v,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        dropout,
        causal,
        _,
        *,
        scale=None,
        **sides,
    ):
        _check(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout)
        if calls is not None:
            calls.append((len(starts_q) - 1, len(q), len(k)))
        out = torch.empty_like(q)
        for of_q, of_k in _sequences(starts_q, starts_k):
            each = (part.transpose(0, 1) for part in (q[of_q], k[of_k], v[of_k]))
            attended = _attended(*each, _sides(causal, **sides), scale)[0]
            out[of_q] = attended.transpose(0, 1)
        log_sum_exp = q.new_zeros(q.shape[1], len(q))
        return out, log_sum_exp, torch.zeros(2), torch.zeros(0), q.new_zeros(0)

    def of_sequences_backward(grad, q, k, v, _, __, starts_q, starts_k, *rest, scale=None, **sides):
        causal = rest[3]
        gradients = [torch.zeros_like(part) for part in (q, k, v)]
        for of_q, of_k in _sequences(starts_q, starts_k):
            each = (part.transpose(0, 1) for part in (grad[of_q], q[of_q], k[of_k], v[of_k]))
            parts = _gradients(*each, _sides(causal, **sides), scale)
            for total, where, part in zip(gradients, (of_q, of_k, of_k), parts, strict=True):
                total[where] = part.transpose(0, 1)
        return tuple(gradients)

    def dense(q, k, v, dropout, causal, _=False, *, scale=None):
        assert dropout == 0
        _check_heads(*(part.transpose(1, 2) for part in (q, k, v)))
        assert q.shape[2] <= k.shape[2]
        sides = _sides(causal)
        rows = zip(q, k, v, strict=True)
        out = torch.stack([_attended(*row, sides, scale)[0] for row in rows])
        nothing = torch.zeros(0)
        return out, nothing, None, None, q.shape[2], k.shape[2], nothing, nothing, nothing

    def dense_backward(grad, q, k, v, *rest, scale=None):
        causal = rest[7]
        sides = _sides(causal)
        rows = zip(grad, q, k, v, strict=True)
        parts = [_gradients(*row, sides, scale) for row in rows]
        return tuple(torch.stack(each) for each in zip(*parts, strict=True))

    library.impl("_flash_attention_forward", of_sequences, "CPU")
    library.impl("_flash_attention_backward", of_sequences_backward, "CPU")
    library.impl("_scaled_dot_product_flash_attention", dense, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", dense_backward, "CPU")
    before = attention.flash_takes
    attention.flash_takes = lambda *_: True
    sequences.flash_takes = attention.flash_takes
    try:
        yield
    finally:
        attention.flash_takes = before
        sequences.flash_takes = before
        library._destroy()


def _sides(
    causal: bool, window_size_left: int | None = None, window_size_right: int | None = None
) -> tuple[int, int]:
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    return left, 0 if causal else right


def _sequences(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    ends = zip(
        starts_q.tolist(),
        starts_q[1:].tolist(),
        starts_k.tolist(),
        starts_k[1:].tolist(),
        strict=False,
    )
    for start_q, end_q, start_k, end_k in ends:
        yield slice(start_q, end_q), slice(start_k, end_k)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, sides: tuple[int, int], scale: float | None
) -> tuple[Tensor, ...]:
    """Return the output and the values that its gradient needs, of torch's kernel for a CPU.

    Args:
        q: [h, s, d]; k, v: [g, t, d].
        sides: visible keys left and right of the lower-right-aligned diagonal; -1 for all.
    """
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    diagonal = k.shape[1] - q.shape[1]
    left, right = sides
    if left >= 0:
        visible = visible.triu(diagonal - left)
    if right >= 0:
        visible = visible.tril(diagonal + right)
    mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
    heads_per_group = len(q) // len(k)
    k = k.repeat_interleave(heads_per_group, dim=0)
    v = v.repeat_interleave(heads_per_group, dim=0)
    inputs = (q[None], k[None], v[None])
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log_sum = forward(*inputs, attn_mask=mask, scale=scale)
    return out[0], log_sum, *inputs, mask


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sides: tuple[int, int], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    out, log_sum, *inputs, mask = _attended(q, k, v, sides, scale)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = (grad[None], *inputs, out[None], log_sum, 0.0, False)
    of_q, of_k, of_v = backward(*given, attn_mask=mask, scale=scale)
    groups = (len(k), -1)
    of_k = of_k[0].unflatten(0, groups).sum(1)
    of_v = of_v[0].unflatten(0, groups).sum(1)
    return of_q[0], of_k, of_v


def _check(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout) -> None:
    """Check the kernel's requirements; reject slow and untested cases."""
    _check_heads(q, k, v)
    assert dropout == 0
    for starts, tokens, longest in ((starts_q, len(q), longest_q), (starts_k, len(k), longest_k)):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        lengths = starts.diff()
        assert starts[0] == 0
        assert starts[-1] == tokens
        assert lengths.min() > 0, "an empty sequence"
        assert lengths.max() == longest
    assert bool((starts_q.diff() <= starts_k.diff()).all()), "the first queries would see nothing"


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q and k or v, [..., heads, d]."""
    assert k.shape == v.shape
    assert q.shape[-2] % k.shape[-2] == 0
    assert q.shape[-1] % 8 == 0, "the kernel reads 16 bytes at a time"
    assert all(part.stride(-1) == 1 for part in (q, k, v))


def emulated_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    used: Tensor,
    most: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Emulate `decoding.varlen_attention` for graph capture: read no values on the host.

    Outputs that the kernel leaves undefined are NaN: queries beyond `most`, or outside all
    sequences.
    """
    for bounds in (query_starts, starts, used):
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
    assert len(query_starts) == len(starts) == len(used) + 1
    at = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(query_starts, at, right=True) - 1
    of_none = (sequence >= len(used)) | (at - query_starts[sequence] >= most[0])
    sequence = sequence.clamp(max=len(used) - 1)
    tokens = torch.arange(len(key), device=query.device)
    first = starts[sequence][:, None]
    count = used[sequence][:, None].clamp(max=most[1])
    seen = (tokens >= first) & (tokens < first + count)  # [q, k]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("qgd,kgd->gqk", query.to(wide), key.to(wide))
    scores = scores.masked_fill(~seen, -torch.inf)
    log_sum = scores.logsumexp(dim=-1).masked_fill(of_none, torch.nan)
    weights = scores.softmax(dim=-1)
    out = torch.einsum("gqk,kgd->qgd", weights, value.to(wide)).to(query.dtype)
    return out.masked_fill(of_none[:, None, None], torch.nan), log_sum


def decode_statically(patch: pytest.MonkeyPatch) -> None:
    """Make the native engine decode like on a GPU in bf16, with an emulated kernel."""
    patch.setattr(decoding, "varlen_attention", emulated_varlen_attention)
    patch.setattr(native, "can_decode_statically", lambda *_: True)
