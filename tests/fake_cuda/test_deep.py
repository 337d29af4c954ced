"""`preflight=deep` measures two depths and two numbers of micro-batches.

From these it extrapolates the cost.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_cuda.machine import Machine
from helpers.public_configs import LLAMA_3_1_8B
from helpers.tiny_run import compose, write_prompts

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.model.layers import RMSNorm
from reinforce_rl.preflight import rank
from reinforce_rl.preflight.deep import Worker, job_of
from reinforce_rl.preflight.hardware import MACHINES
from reinforce_rl.preflight.lower_bound import lower_bound
from reinforce_rl.preflight.plan import plan_batches, plan_memory
from reinforce_rl.preflight.rank import Case, Phases, RankRun, Traffic, total
from reinforce_rl.trainer.inputs import layout_of, read_inputs

ONE = ("trainer.devices=1",)
BLOCKS = (
    "trainer.devices=8",
    "model.tensor_model_parallel_size=2",
    "model.pipeline_model_parallel_size=2",
)


def case_of(folder: Path, *overrides: str, **changes: object) -> Case:
    """Of a tiny model, of which only the width counts."""
    prompts = write_prompts(folder / "prompts.jsonl", ["eta"])
    cfg = compose(
        f"pretrained_checkpoint.restore_from_path={folder}",
        f"model.data.data_prefix.train={prompts}",
        "trainer.precision=bf16",
        "model.encoder_seq_length=256",
        "model.reinforce.num_rollout_samples=8",
        "model.optim.distributed=true",
        "model.reinforce.offload_adam_states=true",
        *overrides,
    )
    config = load_config(cfg)
    case = Case(
        config=config,
        rank=0,
        layers=2,
        in_flight=2,
        train_rows=4,
        forward_rows=4,
        prompts=2,
        samples=2,
        prompt_tokens=96,
        response_tokens=96,
    )
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


@functools.cache
def blocks(machine: Machine, folder: Path) -> Phases:
    """The first rank of a run in blocks, which several tests look at."""
    return measured(machine, case_of(folder, *BLOCKS))


def measured(machine: Machine, case: Case) -> Phases:
    # As between the cases of `main`: what other tests left behind would count as freed here.
    gc.collect()
    phases = RankRun(case).measure(machine)
    gc.collect()
    return phases


def test_costs_grow_along_a_line_with_layers(machine: Machine, folders: dict[int, Path]) -> None:
    case = case_of(folders[2], *BLOCKS, layers=4)
    four = measured(machine, case)
    six = measured(machine, case_of(folders[2], *BLOCKS, layers=6))
    two = blocks(machine, folders[2])
    assert {
        "start",
        "prefill",
        "decode",
        "resident",
        "away",
        "training once",
        "training each",
        "optimizer",
    } <= set(six)
    for phase, (cost, peak) in six.items():
        parts = [(-1, two[phase][0]), (2, four[phase][0])]
        line = total(parts)
        for name, value in cost.counts.items():
            assert line[name] == pytest.approx(value, rel=0.02), (phase, name)
        assert {of: pytest.approx(n) for of, n in line.calls.items()} == dict(cost.calls), phase
        expected = {of: pytest.approx(n, rel=0.01) for of, n in cost.sent.items()}
        assert line.sent == expected, phase
        assert 2 * four[phase][1] - two[phase][1] == pytest.approx(peak, rel=0.01), phase


def test_costs_grow_along_a_line_with_micro_batches(
    machine: Machine, folders: dict[int, Path]
) -> None:
    case = case_of(folders[2], *ONE, in_flight=1)
    few = measured(machine, case)
    many = measured(machine, case_of(folders[2], *ONE, in_flight=4))
    for phases in (few, many):
        parts = [(1, phases["training once"][0]), (7, phases["training each"][0])]
        cost = total(parts)
        expected = total([(1, few["training once"][0]), (7, few["training each"][0])])["kernels"]
        assert cost["kernels"] == pytest.approx(expected)
        assert cost["flops"] > 7 * phases["training each"][0]["flops"] * 0.99
    assert few["training each"][0]["kernels"] > 100


def test_memory_is_as_the_plan_has_it(
    machine: Machine, folders: dict[int, Path], tmp_path: Path
) -> None:
    """Llama 3.1 8B's width and two layers, on eight ranks that share the optimizer's states."""
    folder = shutil.copytree(
        folders[2], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    config = {**LLAMA_3_1_8B, "num_hidden_layers": 2, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    case = case_of(folder, "trainer.devices=8")
    cfg = case.config
    layout = layout_of(cfg)
    inputs = read_inputs(cfg)
    assert layout is not None
    (plan,) = plan_memory(cfg, inputs, plan_batches(cfg, layout, inputs.datasets), gpu=True)
    gc.collect()
    # Models of other tests in this process, which torch's caches may keep.
    others = machine.gpu.memory.bytes
    phases = measured(machine, case)
    peaks = {name: peak - others for name, (_, peak) in phases.items()}
    peaks["away"] += others  # a difference already
    assert peaks["away"] == pytest.approx(plan.optimizer, rel=0.001)
    assert peaks["resident"] == pytest.approx(plan.weights, rel=0.001)
    of_phase = {"log-probs": "log-probs once", "reference log-probs": "reference log-probs once"}
    of_phase |= {"training": "training once", "optimizer step": "optimizer"}
    for phase in plan.phases:
        if name := of_phase.get(phase.name):
            assert peaks[name] == pytest.approx(plan.held + phase.total, rel=0.025), name


def test_collectives_are_told_by_group_and_nodes(
    machine: Machine, folders: dict[int, Path]
) -> None:
    phases = blocks(machine, folders[2])
    each = phases["training each"][0]
    once = phases["training once"][0]
    groups = {of.group for of, calls in each.calls.items() if calls > 0}
    assert groups == {"tensor", "pipeline"}
    expected = {Traffic("data", "reduce_scatter", 2, 1)}
    assert {of for of in once.calls if of.kind == "reduce_scatter"} == expected
    case = case_of(folders[2], *BLOCKS, "trainer.devices=2", "trainer.num_nodes=4")
    across = measured(machine, case)
    nodes = {
        of.group: of.nodes
        for of in (*across["training each"][0].calls, *across["training once"][0].calls)
    }
    assert nodes == {**nodes, "tensor": 1, "data": 2, "pipeline": 2}


LAYERS = 2
PROMPT = 60
RESPONSE = 128
SEQUENCES = 32


class WorkerHere(Worker):
    """Measures in this process, which has fake GPUs already."""

    def __init__(self, machine: Machine):
        super().__init__(lambda text: None)
        self._machine = machine

    def ask(self, case: Case) -> Phases:
        return measured(self._machine, case)


def by_hand() -> dict[str, float]:
    """Least seconds of a step's phases at Llama 3.1 8B's width on an H100, by its data sheet.

    32 sequences of 60 + 128 tokens, of 8 prompts, in bf16. The last token goes through no layer.
    """
    peak = 989.4e12
    bandwidth = 3.35e12
    cache = 50e6
    pcie = 64e9
    h = 4096
    kv = 1024
    f = 14336
    v = 128256
    matrices = h * (h + 2 * kv) + h * h + 3 * h * f
    parameters = 2 * v * h + LAYERS * (matrices + 2 * h) + h
    read = 2 * (parameters - v * h)  # bytes: all but the embedding

    positions = PROMPT + RESPONSE - 1
    layers = 2 * LAYERS * matrices * positions
    head = 2 * v * h * RESPONSE
    # Half of queries times keys, and of weights times values: no position sees a later one.
    attention = 4 * LAYERS * h * positions * (positions + 1) / 2
    forward = SEQUENCES * (layers + head + attention)
    # Backward makes two products for one of forward. The logits are computed again, and so are the
    # attention kernel's scores, which makes five products for two.
    training = SEQUENCES * (3 * layers + 4 * head + 3.5 * attention)

    steps = RESPONSE - 1
    samples = SEQUENCES // 8
    cached = 2 * 2 * LAYERS * kv * (8 * PROMPT * steps + SEQUENCES * steps * (steps + 1) / 2)
    generation = (steps * (read - cache) + cached) / bandwidth
    products = 2 * LAYERS * matrices * (8 * PROMPT + SEQUENCES * steps) + samples * 8 * head
    return {
        "generation": max(generation, products / peak),
        "offload and back": 2 * 12 * parameters / pcie,
        "log-probs": forward / peak,
        "reference log-probs": max(forward / peak, 2 * parameters / pcie),
        "training": training / peak,
        # Gradients are read, main weights and moments read and written.
        "optimizer": ((4 + 2 * 12) * parameters - 2 * cache) / bandwidth,
    }


def test_the_lower_bound_is_the_least_work_counted_by_hand(
    machine: Machine, folders: dict[int, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(
        folders[2], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    config = {**LLAMA_3_1_8B, "num_hidden_layers": LAYERS, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["eta" * (PROMPT // 3)])
    cfg = case_of(
        folder,
        *ONE,
        f"model.data.data_prefix.train={prompts}",
        "trainer.reinforce.num_rollouts_per_prompt=4",
        f"model.reinforce.length_params.max_length={RESPONSE}",
        "model.reinforce.rollout_micro_batch_size=8",
    ).config
    job = job_of(cfg, read_inputs(cfg), MACHINES["h100"])
    assert job.mean.prompt == PROMPT
    assert job.mean.response == RESPONSE
    step = lower_bound(job, WorkerHere(machine).measure(job))
    expected = by_hand()
    names = [phase.name for phase in step.phases]
    assert names == list(expected)
    for phase in step.phases:
        assert phase.seconds <= expected[phase.name], phase.name
        assert phase.seconds == pytest.approx(expected[phase.name], rel=0.02), phase.name
    assert step.seconds <= sum(expected.values())


def test_a_fault_names_phase_and_lines(
    machine: Machine, folders: dict[int, Path], monkeypatch
) -> None:
    """The norms' weights are on the CPU, as they once were, and the start ends at their use."""
    make = RMSNorm.__init__

    def on_cpu(norm: RMSNorm, *args: Any, **options: Any) -> None:
        make(norm, *args, **options)
        norm.weight = torch.nn.Parameter(torch.ones(norm.weight.shape, dtype=norm.weight.dtype))

    monkeypatch.setattr(RMSNorm, "__init__", on_cpu)
    monkeypatch.setattr(rank, "install", lambda: machine)
    answer = rank.answer(case_of(folders[2], *BLOCKS))
    assert isinstance(answer, str)
    assert answer.startswith("start: ")
    assert "megatron/optimizer.py" in answer.split("; at ")[1]
