"""`preflight=deep` measures two depths and two numbers of micro-batches, and concludes what more would cost."""

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
from reinforce_rl.preflight.plan import layout_of, plan_batches, plan_memory, read_inputs
from reinforce_rl.preflight.rank import Case, Phases, RankRun, Traffic, total
from reinforce_rl.preflight.step import MACHINES

ONE = ("trainer.devices=1",)
BLOCKS = ("trainer.devices=8", "model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2")


def case_of(folder: Path, *overrides: str, **changes: object) -> Case:
    """Of a tiny model, of which only the width counts."""
    prompts = write_prompts(folder / "prompts.jsonl", ["eta"])
    config = load_config(
        compose(
            f"pretrained_checkpoint.restore_from_path={folder}",
            f"model.data.data_prefix.train={prompts}",
            "trainer.precision=bf16",
            "model.encoder_seq_length=256",
            "model.reinforce.num_rollout_samples=8",
            "model.optim.distributed=true",
            "model.reinforce.offload_adam_states=true",
            *overrides,
        )
    )
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
        rates=MACHINES["h100"].rates,
    )
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


@functools.cache
def blocks(machine: Machine, folder: Path) -> Phases:
    """The first rank of a run in blocks, which several tests look at."""
    return measured(machine, case_of(folder, *BLOCKS))


def measured(machine: Machine, case: Case) -> Phases:
    found = RankRun(case).measure(machine)
    gc.collect()  # as between the cases of `main`
    return found


def test_costs_grow_along_a_line_with_layers(machine: Machine, folders: dict[int, Path]) -> None:
    four, six = (measured(machine, case_of(folders[2], *BLOCKS, layers=n)) for n in (4, 6))
    two = blocks(machine, folders[2])
    assert {"start", "prefill", "decode", "resident", "away", "training once", "training each", "optimizer"} <= set(
        six
    )
    for phase, (cost, peak) in six.items():
        line = total([(-1, two[phase][0]), (2, four[phase][0])])
        for name, value in cost.counts.items():
            # A matrix product of tiny size takes the floor, a longer norm of all weights leaves it.
            assert line[name] == pytest.approx(value, rel=0.02, abs=3e-6), (phase, name)
        assert {of: pytest.approx(n) for of, n in line.calls.items()} == dict(cost.calls), phase
        assert line.sent == {of: pytest.approx(n, rel=0.01) for of, n in cost.sent.items()}, phase
        assert 2 * four[phase][1] - two[phase][1] == pytest.approx(peak, rel=0.01), phase


def test_costs_grow_along_a_line_with_micro_batches(machine: Machine, folders: dict[int, Path]) -> None:
    few, many = (measured(machine, case_of(folders[2], *ONE, in_flight=n)) for n in (1, 4))
    for found in (few, many):
        cost = total([(1, found["training once"][0]), (7, found["training each"][0])])
        assert cost["kernels"] == pytest.approx(
            total([(1, few["training once"][0]), (7, few["training each"][0])])["kernels"]
        )
        assert cost["flops"] > 7 * found["training each"][0]["flops"] * 0.99
    assert few["training each"][0]["kernels"] > 100


def test_memory_is_as_the_plan_has_it(machine: Machine, folders: dict[int, Path], tmp_path: Path) -> None:
    """Llama 3.1 8B's width and two layers, on eight ranks that share the optimizer's states."""
    folder = shutil.copytree(folders[2], tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    config = {**LLAMA_3_1_8B, "num_hidden_layers": 2, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    case = case_of(folder, "trainer.devices=8")
    cfg = case.config
    layout, inputs = layout_of(cfg), read_inputs(cfg)
    assert layout is not None
    (plan,) = plan_memory(cfg, inputs, plan_batches(cfg, layout, inputs.datasets), gpu=True)
    gc.collect()
    # Models of other tests in this process, which torch's caches may keep.
    others = machine.gpu.memory.bytes
    phases = measured(machine, case)
    found = {name: peak - others for name, (_, peak) in phases.items()}
    found["away"] += others  # a difference already
    assert found["away"] == pytest.approx(plan.optimizer, rel=0.001)
    assert found["resident"] == pytest.approx(plan.weights, rel=0.001)
    of_phase = {"log-probs": "log-probs once", "reference log-probs": "reference log-probs once"}
    of_phase |= {"training": "training once", "optimizer step": "optimizer"}
    for phase in plan.phases:
        if name := of_phase.get(phase.name):
            assert found[name] == pytest.approx(plan.held + phase.total, rel=0.025), name


def test_collectives_are_told_by_group_and_nodes(machine: Machine, folders: dict[int, Path]) -> None:
    found = blocks(machine, folders[2])
    each, once = found["training each"][0], found["training once"][0]
    groups = {of.group for of, calls in each.calls.items() if calls > 0}
    assert groups == {"tensor", "pipeline"}
    assert {of for of in once.calls if of.kind == "reduce_scatter"} == {Traffic("data", "reduce_scatter", 2, 1)}
    across = measured(machine, case_of(folders[2], *BLOCKS, "trainer.devices=2", "trainer.num_nodes=4"))
    nodes = {of.group: of.nodes for of in (*across["training each"][0].calls, *across["training once"][0].calls)}
    assert nodes == {**nodes, "tensor": 1, "data": 2, "pipeline": 2}


def test_a_fault_names_phase_and_lines(machine: Machine, folders: dict[int, Path], monkeypatch) -> None:
    """The weights of the norms on the CPU, as they once were: the start ends where they are used."""
    make = RMSNorm.__init__

    def on_cpu(norm: RMSNorm, *args: Any, **options: Any) -> None:
        make(norm, *args, **options)
        norm.weight = torch.nn.Parameter(torch.ones(norm.weight.shape, dtype=norm.weight.dtype))

    monkeypatch.setattr(RMSNorm, "__init__", on_cpu)
    monkeypatch.setattr(rank, "install", lambda: machine)
    answer = rank.answer(case_of(folders[2], *BLOCKS))
    assert isinstance(answer, str) and answer.startswith("start: ")
    assert "megatron/optimizer.py" in answer.split("; at ")[1]
