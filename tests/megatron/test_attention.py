"""Attention with CPU kernels and emulated GPU kernels, against one query at a time.

The split of a sequence over context-parallel ranks is tested too.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.flash import flash_on_cpu
from torch.nn.attention.bias import causal_lower_right

from reinforce_rl.megatron.model import attention
from reinforce_rl.megatron.model.attention import (
    causal_attention,
    causal_attention_of_share,
    chunk_ends,
    flash_attention,
    flash_takes,
    positions_below,
    zigzag_positions,
)

HEADS = 4
GROUPS = 2
SIZE = 8
KERNELS = {"flash": flash_on_cpu, "cpu": contextlib.nullcontext}


def drawn(batch: int, queries: int, keys: int) -> list[torch.Tensor]:
    """Return random query, key and value, with gradient."""
    generator = torch.Generator().manual_seed(batch + 100 * queries + keys)
    shapes = [
        (batch, heads, length, SIZE)
        for heads, length in ((HEADS, queries), (GROUPS, keys), (GROUPS, keys))
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


def one_by_one(query, key, value, positions, window, scale):
    """Attend with each query separately over its visible keys.

    `positions` holds the position of each query among the keys.
    """
    rows = []
    for row in range(len(query)):
        heads = []
        for head in range(HEADS):
            outs = []
            for index, position in enumerate(positions):
                first = 0 if window is None else max(position - window + 1, 0)
                seen = slice(first, position + 1)
                group = head // (HEADS // GROUPS)
                weights = (key[row, group, seen] @ query[row, head, index] * scale).softmax(dim=0)
                outs.append(weights @ value[row, group, seen])
            heads.append(torch.stack(outs))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def assert_same(outputs, expected, inputs):
    """Compare values and gradients of a sum with unequal weights."""
    weights = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(0), dtype=expected.dtype
    )
    torch.testing.assert_close(outputs, expected, atol=1e-12, rtol=0)
    gradients = [
        torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True)
        for out in (outputs, expected)
    ]
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 3, 7, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_whole_sequences(batch, window, kernel):
    for length in (1, 2, 7, 8):
        inputs = drawn(batch, length, length)
        with KERNELS[kernel]():
            outputs = causal_attention(*inputs, 0.4, window)
            expected = one_by_one(*inputs, range(length), window, 0.4)
            assert_same(outputs, expected, inputs)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_flash_attention_ends_with_the_last_key(window):
    for queries, keys in ((1, 1), (1, 9), (4, 9), (9, 9)):
        inputs = drawn(2, queries, keys)
        with flash_on_cpu():
            outputs = flash_attention(*inputs, None, window)
            expected = one_by_one(*inputs, range(keys - queries, keys), window, SIZE**-0.5)
            assert_same(outputs, expected, inputs)
        if window is None:  # torch's own handling of the same alignment
            q, k, v = inputs
            k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
            torch.testing.assert_close(
                outputs, F.scaled_dot_product_attention(q, k, v, causal_lower_right(queries, keys))
            )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize(("size", "chunk"), [(2, 1), (2, 3), (3, 2)])
def test_shares_of_context_parallel_ranks(size, chunk, window, kernel, monkeypatch):
    """Each rank's share equals the results of whole sequences at its positions."""
    length = 2 * size * chunk
    inputs = drawn(2, length, length)
    query, key, value = inputs
    whole = torch.stack((key, value)).permute(0, 3, 1, 2, 4)
    monkeypatch.setattr(attention, "gather_positions", lambda shares, group: whole)
    for rank in range(size):
        local_positions = zigzag_positions(length, size, rank)
        group = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        shares = (part[:, :, local_positions] for part in inputs)
        calls = []
        with flash_on_cpu(calls) if kernel == "flash" else contextlib.nullcontext():
            outputs = causal_attention_of_share(*shares, 0.3, window, group)
            expected = one_by_one(
                query[:, :, local_positions], key, value, local_positions.tolist(), window, 0.3
            )
            assert_same(
                outputs,
                expected,
                inputs,
            )


def test_what_flash_attention_takes():
    gpu = torch.device("cuda")
    bf16 = torch.bfloat16
    assert flash_takes(gpu, bf16, 128)
    assert flash_takes(gpu, torch.float16, 256)
    assert not flash_takes(torch.device("cpu"), bf16, 128)
    assert not flash_takes(gpu, torch.float32, 128)
    assert not flash_takes(gpu, bf16, 264)
    assert not flash_takes(gpu, bf16, 60)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 5])
def test_every_position_lies_on_one_rank_and_all_have_the_same_work(size, chunk):
    length = 2 * size * chunk
    shares = [zigzag_positions(length, size, rank) for rank in range(size)]
    assert torch.cat(shares).sort().values.tolist() == list(range(length))
    for share in shares:
        assert share.tolist() == sorted(share.tolist())
        # A position attends to itself and all before it.
        expected = length * (length + 1) // 2 // size
        assert int((share + 1).sum()) == expected


def test_the_documented_order():
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_and_padding_are_counted_without_the_positions(size):
    for length in (2 * size, 8 * size):
        for rank in range(size):
            share = zigzag_positions(length, size, rank)
            ends = tuple(int(chunk[-1]) + 1 for chunk in share.chunk(2))
            assert chunk_ends(length, size, rank) == ends
            for bound in range(length + 3):
                assert positions_below(bound, length, size, rank) == int((share < bound).sum())
