"""How weights are cut into buckets; that they arrive is in test_tensorrt_llm.py."""

from __future__ import annotations

import math

import pytest
import torch

from reinforce_rl.errors import ConfigError
from reinforce_rl.generation.weight_transfer import _elements, _views, device_uuid, plan_buckets
from reinforce_rl.megatron.weight_map import Row


def rows_of(*sizes: tuple[str, int]) -> list[Row]:
    return [Row(f"{parameter}.{i}", parameter, (size,), 1, None) for i, (parameter, size) in enumerate(sizes)]


def test_buckets_are_full_but_keep_what_an_engine_fuses():
    rows = rows_of(("a", 64), ("qkv", 64), ("qkv", 64), ("qkv", 64), ("b", 64), ("c", 640), ("d", 1))
    buckets = plan_buckets(rows, 256)
    assert [[row.megatron for row in bucket] for bucket in buckets] == [
        ["a", "qkv", "qkv", "qkv"],
        ["b"],
        ["c"],
        ["d"],
    ]
    assert [row for bucket in buckets for row in bucket] == rows
    assert [_elements(bucket) for bucket in buckets] == [256, 64, 640, 64]


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_views_do_not_overlap(limit):
    rows = rows_of(("a", 3), ("b", 65), ("c", 64), ("d", 1))
    for bucket in plan_buckets(rows, limit):
        buffer = torch.zeros(_elements(bucket))
        for view in _views(buffer, bucket).values():
            view += 1
        assert int(buffer.sum()) == sum(math.prod(row.shape) for row in bucket)
        assert int(buffer.max()) == 1


def test_a_device_without_cuda_is_refused():
    with pytest.raises(ConfigError, match="the ranks compute on cpu; it needs CUDA"):
        device_uuid(torch.device("cpu"))
