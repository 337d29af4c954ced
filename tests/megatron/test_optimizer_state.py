"""Adam's state: the rectangles that a range of it is in a checkpoint, and its bytes while they wait in host memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from reinforce_rl.megatron.optimizer_state import HostCopies, rectangles


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


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 4096])
def test_every_byte_comes_back_to_the_same_tensor_and_its_views(block_bytes):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((3, 5), (17,), (0,), (2, 2, 2))]
    tensors.append(torch.randn(9, generator=generator).to(torch.bfloat16))
    before = [tensor.clone() for tensor in tensors]
    view = tensors[0][1:, 2]
    copies = HostCopies(pin=False, block_bytes=block_bytes)
    for _ in range(2):
        copies.take(tensors)
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
        assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in before]
        copies.give_back()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        assert torch.equal(view, before[0][1:, 2])
        tensors[1].add_(1)  # the second time other bytes go there and back
        before[1].add_(1)
    needed = sum(tensor.nbytes for tensor in tensors)
    assert len(copies._blocks) == -(-needed // block_bytes), "no more host memory than is needed, and none twice"


def test_a_part_of_a_storage_is_refused():
    whole = torch.zeros(10)
    with pytest.raises(ValueError, match="20 bytes cannot leave its storage of 40"):
        HostCopies(pin=False).take([whole[:5]])
    with pytest.raises(ValueError, match="cannot leave"):
        HostCopies(pin=False).take([torch.zeros(2, 3).t()])
    assert whole.untyped_storage().nbytes() == 40


def test_a_failed_take_frees_nothing():
    good, bad = torch.ones(4), torch.ones(4)[:2]
    with pytest.raises(ValueError, match="cannot leave"):
        HostCopies(pin=False).take([good, bad])
    assert torch.equal(good, torch.ones(4))
