"""The cut of a sequence over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from reinforce_rl.megatron.model.attention import chunk_ends, positions_below, zigzag_positions


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 5])
def test_every_position_lies_on_one_rank_and_all_have_the_same_work(size, chunk):
    length = 2 * size * chunk
    shares = [zigzag_positions(length, size, rank) for rank in range(size)]
    assert torch.cat(shares).sort().values.tolist() == list(range(length))
    for share in shares:
        assert share.tolist() == sorted(share.tolist())
        # A position attends to itself and all before it.
        assert int((share + 1).sum()) == length * (length + 1) // 2 // size


def test_the_documented_order():
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_chunks_and_padding_are_counted_without_the_positions(size):
    for length in (2 * size, 8 * size):
        for rank in range(size):
            share = zigzag_positions(length, size, rank)
            assert chunk_ends(length, size, rank) == tuple(int(chunk[-1]) + 1 for chunk in share.chunk(2))
            for bound in range(length + 3):
                assert positions_below(bound, length, size, rank) == int((share < bound).sum())
