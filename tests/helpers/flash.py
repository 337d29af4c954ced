"""What flash's kernel for sequences of unequal length computes, on a CPU, from nothing but the tensors it is given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reinforce_rl.generation.native import generator as native
from reinforce_rl.megatron.model import kv_cache


def emulated_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    used: Tensor,
    most: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """See `flash_cache.varlen_attention`. No value is looked at on the host, so that a graph may hold it.

    What the kernel does not compute is NaN: queries beyond `most` of a sequence, and those of none.
    """
    for bounds in (query_starts, starts, used):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous()
    assert len(query_starts) == len(starts) == len(used) + 1
    at = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(query_starts, at, right=True) - 1
    of_none = (sequence >= len(used)) | (at - query_starts[sequence] >= most[0])
    sequence = sequence.clamp(max=len(used) - 1)
    tokens = torch.arange(len(key), device=query.device)
    first, count = starts[sequence][:, None], used[sequence][:, None].clamp(max=most[1])
    seen = (tokens >= first) & (tokens < first + count)  # [q, k]
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.einsum("qgd,kgd->gqk", query.to(wide), key.to(wide)).masked_fill(~seen, float("-inf"))
    log_sum = scores.logsumexp(dim=-1).masked_fill(of_none, float("nan"))
    out = torch.einsum("gqk,kgd->qgd", scores.softmax(dim=-1), value.to(wide)).to(query.dtype)
    return out.masked_fill(of_none[:, None, None], float("nan")), log_sum


def decode_statically(patch: pytest.MonkeyPatch) -> None:
    """The native engine decodes as on a GPU in bf16, with the kernel emulated."""
    patch.setattr(kv_cache, "varlen_attention", emulated_varlen_attention)
    patch.setattr(native, "can_decode_statically", lambda *_: True)
