"""Which rectangles a range of a flattened tensor is, and Adam's state before its first step."""

from __future__ import annotations

import itertools

import pytest
import torch

from reinforce_rl.megatron.optimizer_state import rectangles


@pytest.mark.parametrize("shape", [(7,), (1,), (3, 5), (5, 1), (1, 6), (2, 3, 4)])
def test_rectangles_are_the_range_in_order(shape):
    whole = torch.arange(torch.Size(shape).numel())
    for start, end in itertools.combinations_with_replacement(range(len(whole) + 1), 2):
        found = rectangles(shape, start, end)
        cut = [whole.view(shape)[tuple(map(slice, at, map(sum, zip(at, size, strict=True))))] for at, size in found]
        assert [part.shape for part in cut] == [torch.Size(size) for _, size in found]
        assert torch.equal(torch.cat([whole[:0], *(part.flatten() for part in cut)]), whole[start:end])
        assert len(found) <= 2 * len(shape) - 1
    assert rectangles(shape, 5, 3) == []
