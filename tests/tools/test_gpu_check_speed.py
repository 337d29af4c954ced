"""The check `speed` on the CPU, and what it measures: counts, memory and log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.public_configs import LLAMA_3_1_8B, LLAMA_3_2_1B
from torch.utils.flop_counter import FlopCounterMode

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.size import ModelSize

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import gpu_check  # noqa: E402
from gpu_checks import deviations, our_side, peak_rate, runner, speed  # noqa: E402
from gpu_checks.base import CPU as CPU_MODE  # noqa: E402
from gpu_checks.base import CUDA  # noqa: E402
from gpu_checks.correctness import TOLERANCES  # noqa: E402
from gpu_checks.measure import Builder, Results, Sample, is_out_of_memory, measure  # noqa: E402
from gpu_checks.our_side import OurSide  # noqa: E402
from gpu_checks.peak_rate import PeakRate  # noqa: E402
from gpu_checks.plain_side import PlainSide  # noqa: E402
from gpu_checks.shapes import SHAPES  # noqa: E402
from gpu_checks.speed_options import SpeedOptions, options_of  # noqa: E402
from gpu_checks.training_flops import training_flops  # noqa: E402
from gpu_checks.workload import (  # noqa: E402
    GENERATION,
    LEARNING_RATE,
    OURS,
    PHASES,
    PHASES_OF,
    PLAIN,
    STEP,
    TRAINING,
    Workload,
)
from rloo_step.floors import TRAINING as TRAINING_FLOPS  # noqa: E402

CPU = torch.device("cpu")
FP32 = torch.float32
TOLERANCE = TOLERANCES["log-probs"][0]
TINY = Architecture.from_hf(SHAPES["tiny"])
WORKLOAD = Workload(prompts=2, group=2, prompt_tokens=7, response_tokens=5, micro_batch=3)
# A bare machine has none of them.
WITHOUT = (
    "hydra",
    "omegaconf",
    "tritonclient",
    "pytriton",
    "aiohttp",
    "prometheus_client",
    "gguf",
    "pytest",
)
RUN = f"""
import runpy, sys
for name in {WITHOUT!r}:
    sys.modules[name] = None
runpy.run_module("gpu_checks.worker", run_name="__main__", alter_sys=True)
"""
SMALL = {"prompts": 2, "group": 2, "prompt_tokens": 6, "response_tokens": 4, "repeats": 2}


@pytest.mark.more
def test_runs_on_a_bare_machine_and_writes_what_it_says(tmp_path):
    words = ["gpu_checks.speed:check", CPU_MODE, str(tmp_path), str(time.time() + 600)]
    command = [sys.executable, "-c", RUN, *words, json.dumps(SMALL)]
    environment = {
        **os.environ,
        "PYTHONPATH": runner.python_path(),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    finding = json.loads((tmp_path / "finding.json").read_text())
    assert finding["verdict"] == "PASS"
    assert "tiny generation" in finding["sentence"]
    numbers = finding["numbers"]
    rows = {(row["side"], row["phase"]): row for row in numbers["rows"]}
    expected = {(side, phase) for side, phases in PHASES_OF.items() for phase in phases}
    assert set(rows) == expected
    for (side, phase), row in rows.items():
        tokens = 2 * 2 * (4 if phase == GENERATION else 10)
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
        assert row["gigabytes"] > 0
        assert row["skipped"] is None
        assert len(row["rounds"]) == 2
        assert (row["mfu"] is None) == (phase != TRAINING)
        assert ("times the weights' reading" in row) == ((side, phase) == (OURS, GENERATION))
    step = rows[OURS, STEP]
    names = ["generation", "reference log-probs", "loss and gradient", "optimizer"]
    assert list(step["parts"]) == names
    assert sum(step["parts"].values()) <= step["rounds"][0]
    assert "measured, a product of" in numbers["MFU is of"]
    for phase in PHASES:
        assert (numbers[f"tiny: speedup of {phase}"] is None) == (phase == STEP)


def test_mfu_is_of_the_operations_that_training_takes():
    samples = {(OURS, TRAINING): [Sample(2.0, 1.0)]}
    peak = PeakRate(1e9, "a test")
    rows = speed.rows_of("tiny", Results(samples), WORKLOAD, TINY, peak)
    (row,) = (row for row in rows if (row["side"], row["phase"]) == (OURS, TRAINING))
    expected = training_flops(TINY, WORKLOAD) / 2.0 / 1e9
    assert row["mfu"] == pytest.approx(expected)


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[runner.Check]:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    return gpu_check.chosen_checks(gpu_check.arguments())


def test_options_of_the_command_line_reach_the_check(monkeypatch):
    words = ("--shapes", "8b", "--prompts", "16", "--repeats", "5", "--minutes", "30")
    (check,) = arguments(monkeypatch, "--only", "speed", *words)
    assert check.options == {"shapes": ["8b"], "prompts": 16, "repeats": 5}
    assert check.seconds == 30 * 60
    options = options_of(CUDA, check.options)
    assert options == replace(SpeedOptions(), shapes=("8b",), prompts=16, repeats=5)
    (check,) = arguments(monkeypatch, "--only", "speed")
    assert check.options == {}
    assert check.seconds == 240
    names = [check.name for check in arguments(monkeypatch, *words)]
    assert names == [check.name for check in gpu_check.CHECKS]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--repeats 0", "--repeats is 0, expected at least 1"),
        ("--group 1", "--group is 1; RLOO compares"),
        ("--shapes tiny --prompt-tokens 500", "628 tokens exceed the 512 positions of tiny"),
        ("--only machine --prompts 4", "prompts are options of speed"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words, sentence, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        arguments(monkeypatch, *words.split())
    assert sentence in capsys.readouterr().err


@pytest.mark.more
def test_a_wrong_weight_exceeds_the_tolerance(mesh, monkeypatch):
    assert deviations.deviations(TINY, mesh, [FP32])[0].largest < TOLERANCE / 100
    fill = our_side.fill_ours

    @torch.no_grad()
    def fill_wrongly(lm: Any) -> None:
        fill(lm)
        lm.decoder.layers[1].mlp.linear_fc2.weight[3] *= 1.1

    monkeypatch.setattr(our_side, "fill_ours", fill_wrongly)
    assert deviations.deviations(TINY, mesh, [FP32])[0].largest > TOLERANCE


def test_deviation_is_over_response_tokens_and_nan_is_infinite():
    expected = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    log_probs = expected + torch.tensor([[0.5, 0.0, 9.0], [0.0, 0.0, 0.25]])  # 9 is padding
    lengths = torch.tensor([2, 3])
    deviation = deviations.deviation(log_probs, expected, lengths, FP32)
    assert deviation.dtype == "float32"
    assert deviation.largest == 0.5
    assert deviation.mean == pytest.approx(0.15)
    log_probs[1, 1] = float("nan")
    assert deviations.deviation(log_probs, expected, lengths, FP32).largest == float("inf")


def test_both_sides_make_the_same_update(mesh):
    sides = OurSide(TINY, mesh, FP32, WORKLOAD), PlainSide(TINY, CPU, FP32, WORKLOAD)

    def weights() -> list[dict[str, torch.Tensor]]:
        plain = {name: value.detach().clone() for name, value in sides[1].model.named_parameters()}
        return [sides[0].weights(), plain]

    before = weights()
    for name, value in before[1].items():
        assert torch.equal(before[0][name], value)
    for side in sides:
        side.run(TRAINING)
    after = weights()
    for name, value in before[1].items():
        ours, plain = (new[name].double() - value.double() for new in after)
        assert plain.abs().max() > LEARNING_RATE / 2
        # Adam's first step is the gradient's sign, so a gradient near 0 may go either way.
        assert (ours - plain).abs().mean() < 0.02 * LEARNING_RATE, name


def test_training_flops_are_those_of_a_count(mesh):
    # The products of eager attention are counted one by one.
    side = PlainSide(TINY, CPU, FP32, WORKLOAD, attention="eager")
    with FlopCounterMode(display=False) as counter:
        side.run(TRAINING)
    length = 11
    count = WORKLOAD.sequences
    # Plain attention also multiplies with the keys that come later. A norm's weights are
    # parameters, but no matrix.
    later = length**2 - length * (length + 1) / 2
    wasted = count * TRAINING_FLOPS * 2 * later * TINY.num_layers * TINY.num_heads * TINY.head_size
    norms = sum(value.numel() for value in side.model.parameters() if value.ndim == 1)
    expected = training_flops(TINY, WORKLOAD) + wasted - count * length * TRAINING_FLOPS * norms
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


class FakeSide:
    """Records what is run, and may run out of memory."""

    def __init__(self, name: str, log: list[str], fails: str | None, error: Exception):
        self._name = name
        self._log = log
        self._fails = fails
        self._error = error
        log.append(f"{name} built")

    def run(self, phase: str) -> dict[str, float]:
        if phase == self._fails:
            raise self._error
        self._log.append(f"{self._name} {phase}")
        return {}


def fakes(
    log: list[str],
    error: Exception,
    fails: str | None = None,
    least: int = 0,
) -> list[Builder]:
    def build(name: str) -> Builder:
        return Builder(
            name,
            PHASES_OF[name],
            lambda _: least,
            lambda: FakeSide(name, log, fails if name == OURS else None, error),
        )

    return [build(OURS), build(PLAIN)]


@pytest.mark.more
def test_sides_take_turns():
    log: list[str] = []
    results = measure(fakes(log, MemoryError()), 2, CPU)
    built = [f"{name} built" for name in (OURS, PLAIN, PLAIN, OURS)]
    assert [line for line in log if "built" in line] == built
    expected = [
        f"{OURS} built",
        f"{OURS} generation",
        f"{OURS} generation",
        f"{OURS} training",
    ]
    assert log[:4] == expected
    expected = {(name, phase): 2 for name, phases in PHASES_OF.items() for phase in phases}
    lengths = {key: len(samples) for key, samples in results.samples.items()}
    assert lengths == expected


@pytest.mark.more
def test_what_does_not_fit_is_skipped_and_the_rest_goes_on():
    log: list[str] = []
    builders = fakes(log, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), TRAINING)
    results = measure(
        builders,
        2,
        CPU,
    )
    assert results.skipped == {(OURS, TRAINING): "CUDA out of memory. Tried 2 GiB"}
    expected = {
        (OURS, GENERATION): 2,
        (OURS, STEP): 2,
        (PLAIN, GENERATION): 2,
        (PLAIN, TRAINING): 2,
    }
    lengths = {key: len(samples) for key, samples in results.samples.items()}
    assert lengths == expected
    # Restarted after the failure, and not tried again in the second round.
    assert log.count(f"{OURS} built") == 3
    assert results.speedup(TRAINING) is None


def test_other_errors_are_not_taken_for_small_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        measure(fakes([], RuntimeError("shapes do not fit"), TRAINING), 1, CPU)
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    )


def test_a_model_larger_than_the_memory_is_not_built():
    log: list[str] = []
    builders = fakes(log, MemoryError(), least=10**15)
    results = measure(builders, 1, CPU)
    assert log == []
    assert results.skipped[PLAIN, GENERATION].startswith("takes 1000000.0 GB at least")


def test_least_memory_of_both_sides():
    assert (
        our_side.least_bytes(TINY, torch.bfloat16, torch.device("cuda"), WORKLOAD, GENERATION)
        == 2 * ModelSize.from_architecture(TINY, None).parameters
    )
    # Weights and gradients, main weights and two moments: 2 + 4 + 12.
    assert (
        our_side.least_bytes(TINY, torch.bfloat16, torch.device("cuda"), WORKLOAD, TRAINING)
        == 18 * ModelSize.from_architecture(TINY, None).parameters
    )


def test_speedup_is_the_median_of_rounds():
    seconds = {OURS: (1.0, 10.0, 2.0), PLAIN: (2.0, 30.0, 20.0)}
    results = Results()
    for name, values in seconds.items():
        results.samples[name, GENERATION] = [Sample(value, 1.0) for value in values]
    assert results.speedup(GENERATION) == pytest.approx(3.0)  # the medians' own ratio would be 10
    assert results.median(OURS, GENERATION) == 2.0


def test_shapes_are_those_of_the_models():
    for name, public in (("1b", LLAMA_3_2_1B), ("8b", LLAMA_3_1_8B)):
        shape = Architecture.from_hf(SHAPES[name])
        expected = Architecture.from_hf(public)
        assert replace(shape, raw={}) == replace(expected, raw={})
        for key in ("rope_theta", "rope_scaling"):
            assert SHAPES[name][key] == public[key]
    smallest = Architecture.from_hf(SHAPES["135m"])
    assert ModelSize.from_architecture(smallest, None).parameters == 134_515_008


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("Tesla T4", None),
    ],
)
def test_peak_rates_by_name(name, rate):
    assert peak_rate.known_teraflops(name) == rate
