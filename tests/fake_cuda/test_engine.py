"""The trainer's half of an engine on GPUs: the commands and weights for the engine's process.

Small tensors have real values here, so weights are compared bit for bit.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.workloads import check_collectives, take_turns
from helpers.lora import EVERY, lora_model, random_updates
from helpers.policies import megatron_model
from helpers.tiny_run import compose, tiny_overrides, tiny_trainer
from safetensors.torch import load_file
from torch import Tensor

from reinforce_rl.config.engines import EngineConfig, TensorRTLLMConfig, VLLMConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.finish_reasons import FINISH_LENGTH, FINISH_STOP
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.engine import Answer, EngineArguments, Request, buckets, process
from reinforce_rl.generation.engine.generator import EngineGenerator
from reinforce_rl.generation.engine.process import EngineAdapter
from reinforce_rl.generation.trtllm.adapter import TensorRTLLM
from reinforce_rl.generation.vllm.adapter import VLLM
from reinforce_rl.megatron.lora import PREFIX
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import MOMENTS, states_by_weight

BF16 = torch.bfloat16
ENGINES: dict[str, Callable[[], EngineAdapter]] = {
    "vllm": lambda: VLLM(VLLMConfig()),
    "tensorrt_llm": lambda: TensorRTLLM(TensorRTLLMConfig()),
}
BUCKET_BYTES = 4096  # no buffer is larger than the tensors whose values are known
PROMPTS = [Prompt(7, "", (6, 7, 8)), Prompt(9, "", (6, 9))]
PARAMS = SamplingParams(max_length=3, stop_token_ids=(2,))
ANSWERS = [
    Answer((11, 2), (-0.5, -0.25), stopped=True),
    Answer((12, 13, 14), (-1.0, -2.0, -3.0)),
    Answer((2,), (-4.0,), stopped=True),
    Answer((15, 16, 17), (-0.125, -5.0, -6.0)),
]


class PlayedEngine:
    """In place of `EngineProcess`: workers on GPU-0, GPU-1, ...

    The first one reads the buckets.
    """

    def __init__(self, events: list[str], adapter: EngineAdapter, *rest: Any):
        self.arguments: EngineArguments
        self.devices: Sequence[str] | None
        self.arguments, _, log, _, self.devices = rest
        self.folder: Path = log.parent
        self.places: list[set[str]] = []  # the devices of each bucket
        self.weights: list[dict[str, Tensor]] = []  # of each update, on the CPU
        self.adapters: list[tuple[dict[str, Tensor], dict[str, int]]] = []
        self._events = events
        self._arriving: dict[str, Tensor] = {}

    def start(self) -> list[str]:
        self._events.append("start")
        return [f"GPU-{number}" for number in range(self.arguments.tensor_parallel_size)]

    def call(self, command: str, *arguments: Any) -> None:
        self._events.append(command)
        if command == "update_weights":
            self._update(*arguments)

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        self._events.append("generate")
        expected = [prompt.tokens for prompt in PROMPTS for _ in range(2)]
        assert [request.tokens for request in requests] == expected
        return ANSWERS

    def load_adapter(self, write: Callable[[Path], None], sums: dict[str, int]) -> None:
        self._events.append("load_adapter")
        folder = self.folder / f"adapter_{len(self.adapters)}"
        write(folder)
        self.adapters.append((load_file(folder / "adapter_model.safetensors"), sums))

    def _update(self, bucket: Any) -> None:
        if bucket is None:
            self.weights.append(self._arriving)
            self._arriving = {}
            return
        self.places.append(set(bucket["places"]))
        for name, tensor in buckets.received(bucket, "GPU-0", torch.device("cuda", 0)):
            assert tensor.is_cuda
            assert tensor.dtype == BF16
            assert name not in self._arriving
            self._arriving[name] = tensor.cpu()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands to the engine and what is asked of CUDA, in order.

    IPC handles are places in a list.
    """
    commands: list[str] = []
    memory: list[Tensor] = []

    def number_of(tensor: Tensor) -> int:
        assert tensor.is_cuda
        memory.append(tensor)
        return len(memory) - 1

    def rebuilt(*arguments: Any) -> Tensor:
        assert arguments[6] == 0, "the receiver's number of the GPU, not the sender's"
        return memory[arguments[7]]

    monkeypatch.setattr(
        buckets, "ipc_place", lambda buffer: pickle.dumps((*[None] * 6, 3, number_of(buffer)))
    )
    monkeypatch.setattr(buckets, "rebuild_cuda_tensor", rebuilt)
    monkeypatch.setattr(process, "EngineProcess", functools.partial(PlayedEngine, commands))
    monkeypatch.setattr(torch.cuda.get_device_properties(0), "uuid", "0")
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: commands.append(name))
    return commands


def generator_of(lm: CausalLM, folder: Path, adapter: EngineAdapter, logs: Path) -> EngineGenerator:
    tokenizer = load_tokenizer(folder)
    options = {"model": folder, "max_seq_len": 16, "log_folder": logs}
    generator = EngineGenerator(lm, tokenizer, adapter, EngineConfig(), **options)
    generator._bucket_bytes = BUCKET_BYTES
    return generator


def played(generator: EngineGenerator) -> PlayedEngine:
    assert isinstance(generator._engine, PlayedEngine)
    return generator._engine


def drawn_twice(
    machine: Machine, folder: Path, name: str, logs: Path, model_of: Callable[[Mesh], CausalLM]
) -> PlayedEngine:
    """Draw samples with the weights and with the trained ones doubled; return the engine."""
    with machine.rank(), parallel_mesh() as mesh:
        lm = model_of(mesh)
        generator = generator_of(lm, folder, ENGINES[name](), logs)
        for _ in range(2):
            with generator.awake():
                completions = generator.generate(PROMPTS, 2, PARAMS, seed=0)
            with torch.no_grad():
                for parameter in lm.parameters():
                    parameter.mul_(2 if parameter.requires_grad else 1)
    assert completions.log_probs is not None
    for tensor in (completions.tokens, completions.lengths, completions.log_probs):
        assert not tensor.is_cuda
    assert completions.tokens.dtype == torch.long
    assert completions.lengths.dtype == torch.long
    assert completions.log_probs.dtype == torch.float32
    expected = [[11, 2, 0], [12, 13, 14], [2, 0, 0], [15, 16, 17]]
    assert completions.tokens.tolist() == expected
    assert completions.lengths.tolist() == [2, 3, 1, 3]
    expected = [
        [-0.5, -0.25, 0],
        [-1, -2, -3],
        [-4, 0, 0],
        [-0.125, -5, -6],
    ]
    assert completions.log_probs.tolist() == expected
    assert completions.finish_reasons == (FINISH_STOP, FINISH_LENGTH) * 2
    return played(generator)


def exported(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor.to(BF16) for name, tensor in load_file(folder / "model.safetensors").items()
    }


def check_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 2 * tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ENGINES)
def test_each_waking_gives_the_present_weights(machine, folders, tmp_path, events, name):
    engine = drawn_twice(
        machine, folders[2], name, tmp_path, lambda mesh: megatron_model(folders[2], mesh, BF16)
    )
    assert engine.devices == ["0"]
    assert engine.arguments.dtype == "bfloat16"
    assert engine.arguments.lora_rank == 0
    first, second = engine.weights
    check_equal(first, exported(folders[2]))
    check_equal(second, doubled(first))
    count = len(engine.places) // 2
    assert count > 4
    assert engine.places == [{"GPU-0"}] * (2 * count)
    sent = [*["synchronize", "update_weights"] * count, "update_weights"]
    expected = [
        *["empty_cache", "start", *sent, "generate", "release"],
        *["empty_cache", "resume_weights", *sent, "resume_cache", "generate", "release"],
    ]
    assert events == expected


def test_lora_updates_go_alone(machine, folders, tmp_path, events):
    engine = drawn_twice(
        machine,
        folders[2],
        "vllm",
        tmp_path,
        lambda mesh: lora_model(folders[2], mesh, EVERY, BF16),
    )
    assert engine.arguments.lora_rank == EVERY.rank
    (weights,) = engine.weights
    check_equal(weights, exported(folders[2]))
    expected = random_updates(folders[2], EVERY, BF16)
    pairs = zip(engine.adapters, (expected, doubled(expected)), strict=True)
    for (adapter, sums), tensors in pairs:
        check_equal(adapter, {PREFIX + name: tensor for name, tensor in tensors.items()})
        scales = {name: EVERY.scale if "lora_B" in name else 1 for name in tensors}
        assert sums == {
            name: buckets.checksum(tensor * scales[name]) for name, tensor in tensors.items()
        }
    sent = [*["synchronize", "update_weights"] * len(engine.places), "update_weights"]
    expected = [
        *["empty_cache", "start", *sent, "load_adapter", "generate", "release"],
        *["empty_cache", "resume_weights", "load_adapter", "resume_cache", "generate", "release"],
    ]
    assert events == expected


def test_lora_updates_are_merged_for_an_engine_that_takes_none(machine, folders, tmp_path, events):
    engine = drawn_twice(
        machine,
        folders[2],
        "tensorrt_llm",
        tmp_path,
        lambda mesh: lora_model(folders[2], mesh, EVERY, BF16),
    )
    assert engine.arguments.lora_rank == 0
    assert engine.adapters == []
    base = exported(folders[2])
    updates = random_updates(folders[2], EVERY, BF16)
    for weights, scale in zip(engine.weights, (1, 4), strict=True):  # A and B were doubled
        expected = dict(base)
        for name in (name for name in updates if "lora_A" in name):
            product = updates[name.replace("lora_A", "lora_B")].float() @ updates[name].float()
            target = name.replace("lora_A.", "")
            expected[target] = (base[target].float() + EVERY.scale * scale * product).to(BF16)
        assert weights.keys() == expected.keys()
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("name", ENGINES)
def test_two_gpus_that_share_a_model_are_given_each_bucket(
    machine, folders, tmp_path, events, monkeypatch, name
):
    """Shapes and devices only: what a rank gathers from another has no values."""
    engines: list[PlayedEngine] = []

    def turn(rank: int) -> None:
        monkeypatch.setattr(torch.cuda.get_device_properties(0), "uuid", str(rank))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(4 + rank))
        with parallel_mesh(2) as mesh:
            generator = generator_of(
                megatron_model(folders[2], mesh, BF16), folders[2], ENGINES[name](), tmp_path
            )
            with generator.awake():
                assert generator.generate(PROMPTS, 2, PARAMS, seed=0).tokens.shape == (4, 3)
            if rank == 0:
                engines.append(played(generator))
            else:
                assert generator._engine is None

    ledgers = take_turns(machine, 2, turn, rehearsals=2)
    engine = engines[-1]
    assert engine.devices == ["4", "5"]
    assert engine.arguments.tensor_parallel_size == 2
    (weights,) = engine.weights
    expected = {name: tensor.shape for name, tensor in exported(folders[2]).items()}
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    assert shapes == expected
    assert len(engine.places) > 4
    expected = [{"GPU-0", "GPU-1"}] * len(engine.places)
    assert engine.places == expected
    assert check_collectives(ledgers) > 0
    for ledger in ledgers.values():
        assert len(
            [call for call in ledger.collectives if call.kind == "broadcast" and call.on_gpu]
        ) == len(engine.places)


@pytest.mark.parametrize(
    ("generation", "there"), [("vllm", True), ("tensorrt_llm", True), ("native", False)]
)
def test_adams_moments_have_their_memory_before_an_engine_takes_a_share_of_what_is_free(
    machine, tmp_path, events, generation, there
):
    """TensorRT-LLM sizes its cache as it starts, before the first step of the optimizer."""
    cfg = compose(*tiny_overrides(tmp_path), f"generation={generation}", "trainer.precision=bf16")
    config = load_config(cfg)
    with machine.rank(), parallel_mesh() as mesh, tiny_trainer(config, mesh) as trainer:
        optimizer = trainer.optimizer.megatron
        moments = [
            name for _, states in states_by_weight(optimizer) for name in states if name in MOMENTS
        ]
    assert bool(moments) == there
    assert events == []
