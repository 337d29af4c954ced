"""Checksums and buckets of weights, and a vLLM worker's comparisons; without vLLM."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from reinforce_rl.generation.engine.buckets import checksum, describe, received, shared_buffer
from reinforce_rl.generation.vllm.worker import WeightsOfTrainer
from reinforce_rl.utils.process import PACKAGE_PARENT

CPU = torch.device("cpu")
WIDTH = 4096
SIZES = (1, 5, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH + 17)


def by_hand(tensor: Tensor) -> int:
    kind = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    words = tensor.contiguous().view(-1).view(kind).tolist()
    whole = len(words) // WIDTH * WIDTH
    by_row = sum((i // WIDTH + 1) * word for i, word in enumerate(words[:whole]))
    by_column = sum((i % WIDTH + 1) * word for i, word in enumerate(words[:whole]))
    rest = sum((i + 1) * word for i, word in enumerate(words[whole:]))
    total = len(words)
    for part in (by_row, by_column, rest):
        total = (total * 0x9E3779B97F4A7C15 + part) % 2**64
    return total


def random_tensor(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestChecksum:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_the_sum_that_it_says(self, size, dtype):
        assert checksum(random_tensor(size, dtype)) == by_hand(random_tensor(size, dtype))

    def test_wraps_where_the_sum_is_larger_than_its_bits(self):
        extreme = torch.full((64 * WIDTH,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
        assert checksum(extreme) == by_hand(extreme)

    def test_of_a_slice_or_a_transpose_equals_its_copys(self):
        whole = random_tensor(600).view(20, 30)
        for part in (whole[3:7], whole.T, whole[:, 5:6]):
            assert checksum(part) == checksum(part.clone())

    @given(st.sampled_from(SIZES), st.data())
    def test_any_bit_counts(self, size, data):
        tensor = random_tensor(size)
        changed = tensor.clone()
        element = data.draw(st.integers(0, size - 1))
        bit = data.draw(st.integers(0, 30))
        changed.view(torch.int32)[element] ^= 1 << bit
        assert checksum(changed) != checksum(tensor)

    @given(st.sampled_from(SIZES[1:]), st.data())
    def test_any_exchange_counts(self, size, data):
        tensor = random_tensor(size)
        indices = st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True)
        i, j = data.draw(indices)
        changed = tensor.clone()
        changed[[i, j]] = tensor[[j, i]]
        assert checksum(changed) != checksum(tensor)

    def test_order_sign_of_zero_and_length_count(self):
        tensor = random_tensor(2 * WIDTH + 3)
        assert checksum(tensor.roll(1)) != checksum(tensor)
        assert checksum(tensor.flip(0)) != checksum(tensor)
        assert checksum(torch.tensor([-0.0])) != checksum(torch.tensor([0.0]))
        assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))


NAMES = {"a.weight": (3, 5), "b.weight": (3, 5), "c.bias": (7,)}


class Sent:
    """A bucket of three tensors, as made by the trainer."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.buffer, path = shared_buffer(192, dtype)
        self.views = {}
        for i, (name, shape) in enumerate(NAMES.items()):
            count = torch.Size(shape).numel()
            self.views[name] = self.buffer[64 * i : 64 * i + count].view(shape)
            self.views[name].copy_(random_tensor(count, dtype, seed=i).view(shape))
        self.bucket: dict[str, Any] = {**describe(self.buffer, self.views), "places": {"cpu": path}}

    def arrive(self) -> dict[str, Tensor]:
        return dict(received(self.bucket, "cpu", CPU))


class TestBuckets:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_tensors_arrive_in_order_with_memory_of_their_own(self, dtype):
        sent = Sent(dtype)
        tensors = sent.arrive()
        expected = {name: view.clone() for name, view in sent.views.items()}
        sent.buffer.zero_()  # the next bucket would overwrite it
        assert list(tensors) == list(NAMES)
        for name in NAMES:
            assert tensors[name].dtype == dtype
            assert torch.equal(tensors[name], expected[name])

    def test_another_process_reads_them(self):
        sent = Sent()
        code = (
            "import json, pickle, sys, torch; from reinforce_rl.generation.engine.buckets import "
            "received;"
            "bucket = pickle.load(sys.stdin.buffer);"
            "print(json.dumps([[n, t.tolist()] for n, t in received(bucket, 'cpu', "
            "torch.device('cpu'))]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=pickle.dumps(sent.bucket),
            capture_output=True,
            timeout=60,
            cwd=PACKAGE_PARENT,
        )
        assert json.loads(done.stdout) == [
            [name, view.tolist()] for name, view in sent.views.items()
        ], done.stderr

    @pytest.mark.parametrize(
        ("name", "place"), [("a.weight", 14), ("b.weight", 64), ("c.bias", 130)]
    )
    def test_a_changed_tensor_is_named(self, name, place):
        sent = Sent()
        sent.buffer[place] += 1e-7
        with pytest.raises(RuntimeError, match=f"^{name} arrived otherwise than it was sent"):
            sent.arrive()

    def test_two_tensors_in_each_others_place_are_seen(self):
        sent = Sent()
        first, second = sent.bucket["tensors"][:2]
        place = first[1]
        first[1] = second[1]
        second[1] = place
        with pytest.raises(RuntimeError, match=r"^a\.weight arrived otherwise"):
            sent.arrive()

    def test_a_tensor_that_begins_elsewhere_is_named(self):
        sent = Sent()
        sent.bucket["tensors"][1][1] += 1
        with pytest.raises(RuntimeError, match=r"^b\.weight arrived otherwise"):
            sent.arrive()

    def test_a_device_without_weights_is_named_beside_those_with(self):
        with pytest.raises(RuntimeError, match="no weights came for GPU-1, but for cpu"):
            next(received(Sent().bucket, "GPU-1", CPU))
        with pytest.raises(RuntimeError, match="but for no device"):
            next(received({**Sent().bucket, "places": {}}, "cpu", CPU))


def worker_of(updates: int = 1, *, is_tied: bool = False) -> WeightsOfTrainer:
    worker = WeightsOfTrainer()
    worker._updates = updates
    worker._arrived = {}
    worker.device = CPU
    text = SimpleNamespace(tie_word_embeddings=is_tied)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text))
    return worker


def rows_of(*sizes: int) -> list[Tensor]:
    """Return tensors whose elements are all distinct."""
    return list(torch.arange(sum(sizes)).split(list(sizes)))


class TestWorker:
    def test_the_columns_are_others_at_each_update_and_all_in_time(self):
        of_updates = [worker_of(i)._columns(64) for i in range(64)]
        lengths = {len(set(columns)) for columns in of_updates}
        assert lengths == {4}
        for earlier, later in itertools.pairwise(of_updates):
            assert earlier != later
        assert set().union(*of_updates) == set(range(64))

    @pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4)])
    def test_columns_of_a_narrow_weight_are_not_asked_for_twice(self, size, count):
        columns = worker_of(2)._columns(size)
        assert len(columns) == len(set(columns)) == count
        assert set(columns) <= set(range(size))

    @pytest.mark.parametrize("is_tied", [False, True])
    def test_tied_embeddings_are_passed_on_as_the_output_layer_too(self, is_tied):
        buffer, path = shared_buffer(64, torch.float32)
        views = {"model.embed_tokens.weight": buffer[:12].view(4, 3)}
        bucket = {**describe(buffer, views), "places": {"cpu": path}}
        worker = worker_of(is_tied=is_tied)
        expected = ["model.embed_tokens.weight"]
        if is_tied:
            expected.append("lm_head.weight")
        assert [name for name, _ in worker._noted(bucket)] == expected == list(worker._arrived)

    @pytest.mark.parametrize(
        ("rank", "workers", "sizes", "expected"),
        [
            (0, 1, (8, 4, 4), [*range(16)]),
            (0, 2, (4, 2, 2), [0, 1, 2, 3, 8, 9, 12, 13]),
            (1, 2, (4, 2, 2), [4, 5, 6, 7, 10, 11, 14, 15]),
            # Two heads of keys and values on four workers: each is on two.
            (1, 4, (2, 2, 2), [2, 3, 8, 9, 12, 13]),
            (2, 4, (2, 2, 2), [4, 5, 10, 11, 14, 15]),
            # A single head on all workers.
            (3, 4, (2, 4, 4), [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
        ],
    )
    def test_a_workers_rows_of_a_fused_weight(self, rank, workers, sizes: Sequence[int], expected):
        module = SimpleNamespace(output_partition_sizes=list(sizes), tp_rank=rank, tp_size=workers)
        assert worker_of()._shard(module, rows_of(8, 4, 4)).tolist() == expected

    def test_a_bias_is_compared_whole_or_in_the_workers_part(self):
        worker = worker_of()
        parts = rows_of(8, 4, 4)
        split = SimpleNamespace(output_partition_sizes=[4, 2, 2], tp_rank=1, tp_size=2)
        split.bias = torch.tensor([4, 5, 6, 7, 10, 11, 14, 15])
        assert worker._vector_matches(split, "bias", parts)
        split.bias[3] = 8
        assert not worker._vector_matches(split, "bias", parts)
        norm = SimpleNamespace(weight=torch.arange(8))
        assert worker._vector_matches(norm, "weight", rows_of(8))
        norm.weight = norm.weight.roll(1)
        assert not worker._vector_matches(norm, "weight", rows_of(8))


def test_shared_memory_goes_with_its_buffer():
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    buffer, path = shared_buffer(WIDTH, torch.float32)
    assert open_files() == before + 1
    buffer.fill_(3.0)
    assert torch.equal(torch.from_file(path, shared=True, size=WIDTH), buffer)
    del buffer
    assert open_files() == before
