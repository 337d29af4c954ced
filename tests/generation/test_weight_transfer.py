"""How weights are cut into buckets, and what is in them; that whole runs deliver them is in test_tensorrt_llm.py."""

from __future__ import annotations

import base64
import inspect
import io
import math
import pickle
import re
from typing import Any

import pytest
import torch
from helpers.lora import EVERY, lora_model
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from reinforce_rl.errors import ConfigError
from reinforce_rl.generation.trtllm import weight_transfer
from reinforce_rl.generation.trtllm.weight_transfer import (
    _elements,
    _views,
    device_uuid,
    packed_handles,
    plan_buckets,
    send_weights,
)
from reinforce_rl.megatron.hf_weights import HFFolder, export_hf_folder
from reinforce_rl.megatron.lora import MergedWeights
from reinforce_rl.megatron.weight_map import Row

# What the worker of TensorRT-LLM 1.2 lets a pickle import, by llmapi/rlhf_utils.py and serialization.py.
BUILTINS = ("list", "tuple", "str", "int", "float", "bool", "bytes", "dict", "NoneType", "type")
MODULES = r"^torch.*"


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


class AsTheWorker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert re.match(MODULES, module) or (module == "builtins" and name in BUILTINS), f"Import {module} | {name}"
        return super().find_class(module, name)


def handles_in(packed: str) -> list[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    return AsTheWorker(io.BytesIO(base64.b64decode(packed))).load()


def cuda_handle(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """What `reduce_tensor` makes of a tensor on a GPU, with made-up handles."""
    arguments = inspect.signature(rebuild_cuda_tensor).bind(
        tensor_cls=type(tensor),
        tensor_size=tensor.size(),
        tensor_stride=tensor.stride(),
        tensor_offset=tensor.storage_offset(),
        storage_cls=torch.UntypedStorage,
        dtype=tensor.dtype,
        storage_device=3,
        storage_handle=b"handle",
        storage_size_bytes=tensor.untyped_storage().nbytes(),
        storage_offset_bytes=0,
        requires_grad=tensor.requires_grad,
        ref_counter_handle=b"counter",
        ref_counter_offset=0,
        event_handle=b"event",
        event_sync_required=True,
    )
    return rebuild_cuda_tensor, arguments.args


def test_a_worker_can_unpickle_the_handles_and_put_its_device_in(monkeypatch):
    monkeypatch.setattr(weight_transfer, "handle_of", cuda_handle)
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}
    found = handles_in(packed_handles(tensors))
    assert [(name, function) for name, (function, _) in found] == [(name, rebuild_cuda_tensor) for name in tensors]
    assert [arguments for _, (_, arguments) in found] == [cuda_handle(tensor)[1] for tensor in tensors.values()]
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[6] == "storage_device"


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [
        pytest.param(torch.float32, False, id="fp32"),
        pytest.param(torch.bfloat16, False, id="bf16"),
        pytest.param(torch.float32, True, id="lora"),
    ],
)
def test_buckets_hold_the_exported_weights_and_share_one_bounded_buffer(dtype, lora, tmp_path, mesh, monkeypatch):
    folder = tiny_llama_folder(tmp_path / "model")
    lm = lora_model(folder, mesh, EVERY, dtype) if lora else megatron_model(folder, mesh, dtype)
    values = MergedWeights(lm) if lora else None
    export_hf_folder(lm, folder, tmp_path / "exported", values=values)

    received: list[tuple[str, Tensor]] = []
    memory = set()

    def handle_of(tensor: Tensor) -> tuple[Any, ...]:
        memory.add((tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()))
        return torch.clone, (tensor,)

    def deliver(handles: dict[str, str]) -> None:
        ((device, packed),) = handles.items()
        assert device == "here"
        found: list[tuple[str, Any]] = pickle.loads(base64.b64decode(packed))
        tensors = [(name, function(*arguments)) for name, (function, arguments) in found]
        received.extend(tensors)
        sizes.append(sum(tensor.numel() for _, tensor in tensors) * dtype.itemsize)

    sizes: list[int] = []
    monkeypatch.setattr(weight_transfer, "device_uuid", lambda _: "here")
    monkeypatch.setattr(weight_transfer, "handle_of", handle_of)
    limit = 20_000
    send_weights(lm, deliver, max_bytes=limit, hosts_worker=True, values=values)

    expected = HFFolder(tmp_path / "exported")
    assert len(received) == len(dict(received)) and dict(received).keys() == expected.names
    for name, tensor in received:
        assert tensor.dtype == dtype and torch.equal(tensor, expected.read(name))
    ((_, nbytes),) = memory
    assert nbytes <= limit and max(sizes) <= limit and len(sizes) > sum(sizes) / limit > 2
