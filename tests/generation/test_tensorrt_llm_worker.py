"""Weights of TensorRT-LLM's workers against the tensors that were sent.

The modules are fused and sharded like TensorRT-LLM's.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_fake import PACKAGE, uninstalled_after
from helpers.models import tiny_llama_folder
from safetensors.torch import load_file
from torch import Tensor

from reinforce_rl.generation.engine.buckets import (
    bit_sum,
    describe,
    join_offers,
    make_buffer,
    shared_buffer,
)
from reinforce_rl.generation.trtllm import worker as of_worker
from reinforce_rl.generation.trtllm.host import check_held
from reinforce_rl.generation.trtllm.worker import fused_name

EXTENSION = "reinforce_rl.generation.trtllm.worker.WeightsOfTrainer"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def workers_of():
    """Return a function that makes the workers of a folder's model."""

    def make(folder: Path, count: int, dtype: str = "float32") -> list[Any]:
        fake = importlib.import_module("tensorrt_llm.worker")
        return [
            fake.worker_of(EXTENSION, folder, dtype, rank, count, lambda _: None)
            for rank in range(count)
        ]

    with uninstalled_after():
        sys.path.insert(0, str(PACKAGE))
        yield make


def bucket_of(tensors: dict[str, Tensor], count: int) -> tuple[Any, dict[str, Any]]:
    """Return a buffer, which must stay alive, and the bucket in it for `count` workers."""
    size = sum(tensor.numel() for tensor in tensors.values())
    buffer, path = shared_buffer(size, next(iter(tensors.values())).dtype)
    views = {}
    start = 0
    for name, tensor in tensors.items():
        views[name] = buffer[start : start + tensor.numel()].view(tensor.shape)
        views[name].copy_(tensor)
        start += tensor.numel()
    return buffer, {
        **describe(buffer, views),
        "places": {f"cpu:{rank}": path for rank in range(count)},
    }


def update(workers: list[Any], tensors: dict[str, Tensor]) -> list[Any]:
    """Send the tensors in two buckets; return each worker's report."""
    first = [name for name in tensors if ".layers.0." in name]
    rest = [name for name in tensors if name not in first]
    for part in (first, rest):
        buffer, bucket = bucket_of({name: tensors[name] for name in part}, len(workers))
        for worker in workers:
            assert worker.load_bucket(bucket) is None
        del buffer
    return [worker.load_bucket(None) for worker in workers]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("count", "groups"), [(1, 2), (2, 2), (2, 1), (4, 2)])
def test_what_came_is_held_on_any_number_of_workers(tmp_path, workers_of, tied, count, groups):
    """Two groups of heads on four workers, and one on two, are each held twice.

    63 tokens are padded.
    """
    folder = tiny_llama_folder(tmp_path, vocab_size=63, tied=tied, groups=groups)
    workers = workers_of(folder, count)
    tensors = load_file(folder / "model.safetensors")
    for scale in (1.0, 0.5):
        check_held(
            update(workers, {name: scale * tensor for name, tensor in tensors.items()}), groups
        )


def test_sums_are_of_the_dtype_in_which_the_engine_computes(tmp_path, workers_of):
    folder = tiny_llama_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    check_held(update(workers_of(folder, 2, "bfloat16"), tensors), 2)


def fault_of(workers: list[Any], tensors: dict[str, Tensor]) -> str:
    with pytest.raises(RuntimeError) as raised:
        check_held(update(workers, tensors), 2)
    return str(raised.value)


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_that_is_not_sent_leaves_its_module_as_it_was_and_is_named(
    tmp_path, workers_of, count
):
    folder = tiny_llama_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[DOWN]
    fault = fault_of(workers_of(folder, count), tensors)
    assert f"given nothing: {DOWN}" in fault
    assert "tensorrt_llm.check_weights=false" in fault


def test_a_name_that_the_engine_does_not_know_is_named(tmp_path, workers_of):
    folder = tiny_llama_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.last_proj.weight"] = tensors.pop(DOWN)
    fault = fault_of(workers_of(folder, 1), tensors)
    assert "of no parameter: model.layers.1.mlp.last_proj.weight" in fault
    assert f"given nothing: {DOWN}" in fault


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.norm", "model.norm.weight"),
        ("lm_head", "model.embed_tokens.weight"),
    ],
)
def test_one_changed_element_on_one_worker_is_named(tmp_path, workers_of, path, name):
    folder = tiny_llama_folder(tmp_path)
    workers = workers_of(folder, 2)
    tensors = load_file(folder / "model.safetensors")
    model = workers[1].engine.model_engine.model
    finalise = type(workers[1]).update_weights

    def change(self, handles=None):
        finalise(self, handles)
        if handles is None:
            model.get_submodule(path).weight.data.view(-1)[3] *= 1 + 2**-23

    type(workers[1]).update_weights = change
    assert f"old or wrong: {name}" in fault_of(workers, tensors)


def test_a_worker_that_leaves_a_module_alone_is_found(tmp_path, workers_of):
    """A worker whose module matches no name keeps the previous update."""
    folder = tiny_llama_folder(tmp_path)
    workers = workers_of(folder, 1)
    tensors = load_file(folder / "model.safetensors")
    check_held(update(workers, tensors), 2)
    del workers[0].engine.model_engine.model.parts["model.layers.1.mlp.gate_up_proj"]
    fault = fault_of(workers, {name: 2 * tensor for name, tensor in tensors.items()})
    assert "old or wrong: model.layers.1.mlp.gate_up_proj.weight" in fault


def test_the_parts_of_what_is_fused():
    path = "model.layers.3"
    assert fused_name(f"{path}.self_attn.k_proj.bias") == f"{path}.self_attn.qkv_proj.bias"
    assert fused_name(f"{path}.mlp.up_proj.weight") == f"{path}.mlp.gate_up_proj.weight"
    assert fused_name("model.norm.weight") == "model.norm.weight"


def test_another_attribute_of_the_module_is_not_there():
    with pytest.raises(AttributeError, match="Workers"):
        of_worker.Workers  # noqa: B018


class TestBitSum:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_the_sum_of_the_parts_in_any_order_and_with_zeros(self, dtype):
        whole = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        parts = [*whole[:, :5].T.split(2), whole[:, 5:]]
        padded = torch.cat([whole.flip(0), whole.new_zeros(3, 8)])
        assert bit_sum(padded) == bit_sum(whole) == sum(map(bit_sum, parts)) % 2**64

    def test_one_bit_counts(self):
        tensor = torch.randn(64, generator=torch.Generator().manual_seed(0))
        changed = tensor.clone()
        changed.view(torch.int32)[17] ^= 1
        assert bit_sum(changed) != bit_sum(tensor)


def test_a_bucket_for_several_devices_has_a_place_on_each():
    buffer, offer = make_buffer(64, torch.float32, torch.device("cpu"), "cpu:0")
    other, offer_of_other = make_buffer(64, torch.float32, torch.device("cpu"), "cpu:1")
    views = {"a": buffer[:6].view(2, 3)}
    offers = [offer(buffer, views), offer_of_other(other, {"a": other[:6].view(2, 3)})]
    bucket = join_offers(offers)
    assert list(bucket["places"]) == ["cpu:0", "cpu:1"]
    assert len(set(bucket["places"].values())) == 2
    assert json.loads(json.dumps(bucket))["tensors"][0][:3] == ["a", 0, [2, 3]]
