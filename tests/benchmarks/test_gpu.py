"""The benchmark for one GPU, on the CPU: it runs, its counts are right, wrong log-probs and small memory are told."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.public_configs import LLAMA_3_1_8B, LLAMA_3_2_1B
from torch.utils.flop_counter import FlopCounterMode

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.memory import ModelSize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import gpu  # noqa: E402
from one_gpu import correctness, ours, peak  # noqa: E402
from one_gpu.flops import training_flops  # noqa: E402
from one_gpu.measure import Builder, Results, Sample, is_out_of_memory, measure  # noqa: E402
from one_gpu.ours import OurSide  # noqa: E402
from one_gpu.plain import PlainSide  # noqa: E402
from one_gpu.shapes import SHAPES  # noqa: E402
from one_gpu.workload import (  # noqa: E402
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

CPU, FP32 = torch.device("cpu"), torch.float32
TINY = Architecture.from_hf(SHAPES["tiny"])
WORKLOAD = Workload(prompts=2, group=2, prompt_tokens=7, response_tokens=5, micro_batch=3)
# A bare machine has none of these.
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
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = "--shapes tiny --device cpu --prompts 2 --group 2 --prompt-tokens 6 --response-tokens 4 --micro-batch 4"


def test_runs_on_a_bare_machine_and_writes_what_it_says(tmp_path):
    options = [*SMALL.split(), "--out", str(tmp_path / "gpu.json"), "--repeats", "1", "--peak-tflops", "0.001"]
    command = [sys.executable, "-c", RUN, str(BENCHMARKS / "gpu.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["peak"] == {"flops": 1e9, "source": "--peak-tflops"}
    assert [one["dtype"] for one in written["correctness"]["tiny"]] == ["float32", "bfloat16"]
    assert written["correctness"]["tiny"][0]["largest"] < 1e-5
    report = written["shapes"]["tiny"]
    found = {(row["side"], row["phase"]): row for row in report["rows"]}
    assert set(found) == {(side, phase) for side, phases in PHASES_OF.items() for phase in phases}
    for (_, phase), row in found.items():
        tokens = 2 * 2 * (4 if phase == GENERATION else 10)
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
        assert row["gigabytes"] > 0
        assert row["skipped"] is None
        if phase == TRAINING:
            assert row["mfu"] == pytest.approx(report["training_flops"] / row["seconds"] / 1e9)
    step = found[OURS, STEP]["samples"][0]
    assert list(step["parts"]) == ["generation", "reference log-probs", "loss and gradient", "optimizer"]
    assert sum(step["parts"].values()) <= step["seconds"]
    lines = done.stdout.splitlines()[-3:]
    pairs = [dict(word.split("=") for word in line.split()) for line in lines]
    assert [(line["shape"], line["phase"]) for line in pairs] == [("tiny", phase) for phase in PHASES]
    for line in pairs:
        ratio = report["speedups"][line["phase"]]
        assert line["speedup"] == ("-" if ratio is None else f"{ratio:.3f}")
        assert line["ours_seconds"] == f"{found[OURS, line['phase']]['seconds']:.4f}"


def test_log_probs_beyond_the_tolerance_end_the_run(tmp_path, mesh, monkeypatch, capsys):
    options = [*SMALL.split(), "--out", str(tmp_path / "gpu.json"), "--tolerance", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    assert gpu.run(gpu.arguments(), mesh) == 1
    printed = capsys.readouterr()
    assert "error: tiny: log-probs on cpu in float32 differ from the CPU's by" in printed.err
    assert "phase=" not in printed.out
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["faults"] and written["shapes"] == {}


def test_a_wrong_weight_exceeds_the_tolerance(mesh, monkeypatch):
    assert correctness.deviations(TINY, mesh, [FP32])[0].largest < gpu.TOLERANCE / 100
    fill = ours.fill_ours

    @torch.no_grad()
    def fill_wrongly(lm: Any) -> None:
        fill(lm)
        lm.decoder.layers[1].mlp.linear_fc2.weight[3] *= 1.1

    monkeypatch.setattr(ours, "fill_ours", fill_wrongly)
    assert correctness.deviations(TINY, mesh, [FP32])[0].largest > gpu.TOLERANCE


def test_deviation_is_over_response_tokens_and_nan_is_infinite():
    expected = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    found = expected + torch.tensor([[0.5, 0.0, 9.0], [0.0, 0.0, 0.25]])  # 9 is padding
    one = correctness.deviation(found, expected, torch.tensor([2, 3]), FP32)
    assert (one.dtype, one.largest, one.mean) == ("float32", 0.5, pytest.approx(0.15))
    found[1, 1] = float("nan")
    assert correctness.deviation(found, expected, torch.tensor([2, 3]), FP32).largest == float("inf")


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
        own, plain = (new[name].double() - value.double() for new in after)
        assert plain.abs().max() > LEARNING_RATE / 2
        # Adam's first step is the gradient's sign, so a gradient near 0 may go either way.
        assert (own - plain).abs().mean() < 0.02 * LEARNING_RATE, name


def test_training_flops_are_those_of_a_count(mesh):
    side = PlainSide(TINY, CPU, FP32, WORKLOAD, attention="eager")  # its products are counted one by one
    with FlopCounterMode(display=False) as counter:
        side.run(TRAINING)
    length, count = 11, WORKLOAD.sequences
    # Plain attention also multiplies with the keys that come later. A norm's weights are parameters, but no matrix.
    later = length**2 - length * (length + 1) / 2
    wasted = count * TRAINING_FLOPS * 2 * later * TINY.num_layers * TINY.num_heads * TINY.head_size
    norms = sum(value.numel() for value in side.model.parameters() if value.ndim == 1)
    expected = training_flops(TINY, WORKLOAD) + wasted - count * length * TRAINING_FLOPS * norms
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)


class FakeSide:
    """Writes down what is run, and may run out of memory."""

    def __init__(self, name: str, log: list[str], fails: str | None, error: Exception):
        self._name, self._log, self._fails, self._error = name, log, fails, error
        log.append(f"{name} built")

    def run(self, phase: str) -> dict[str, float]:
        if phase == self._fails:
            raise self._error
        self._log.append(f"{self._name} {phase}")
        return {}


def fakes(log: list[str], error: Exception, fails: str | None = None, least: int = 0) -> list[Builder]:
    def build(name: str) -> Builder:
        return Builder(
            name, PHASES_OF[name], lambda _: least, lambda: FakeSide(name, log, fails if name == OURS else None, error)
        )

    return [build(OURS), build(PLAIN)]


def test_sides_take_turns():
    log: list[str] = []
    results = measure(fakes(log, MemoryError()), 2, CPU)
    assert [line for line in log if "built" in line] == [f"{name} built" for name in (OURS, PLAIN, PLAIN, OURS)]
    assert log[:4] == [f"{OURS} built", f"{OURS} generation", f"{OURS} generation", f"{OURS} training"]
    assert {key: len(samples) for key, samples in results.samples.items()} == {
        (name, phase): 2 for name, phases in PHASES_OF.items() for phase in phases
    }


def test_what_does_not_fit_is_skipped_and_the_rest_goes_on():
    log: list[str] = []
    results = measure(fakes(log, torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\nmore"), TRAINING), 2, CPU)
    assert results.skipped == {(OURS, TRAINING): "CUDA out of memory. Tried 2 GiB"}
    assert {key: len(samples) for key, samples in results.samples.items()} == {
        (OURS, GENERATION): 2,
        (OURS, STEP): 2,
        (PLAIN, GENERATION): 2,
        (PLAIN, TRAINING): 2,
    }
    assert log.count(f"{OURS} built") == 3  # anew after the failure, and not tried again in the second round
    assert results.speedup(TRAINING) is None


def test_other_errors_are_not_taken_for_small_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        measure(fakes([], RuntimeError("shapes do not fit"), TRAINING), 1, CPU)
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))


def test_a_model_larger_than_the_memory_is_not_built():
    log: list[str] = []
    results = measure(fakes(log, MemoryError(), least=10**15), 1, CPU)
    assert log == []
    assert results.skipped[PLAIN, GENERATION].startswith("takes 1000000.0 GB at least")


def test_least_memory_of_both_sides():
    assert (
        ours.least_bytes(TINY, torch.bfloat16, torch.device("cuda"), WORKLOAD, GENERATION)
        == 2 * ModelSize.from_architecture(TINY, None).parameters
    )
    # Weights and gradients, main weights and two moments: 2 + 4 + 12.
    assert (
        ours.least_bytes(TINY, torch.bfloat16, torch.device("cuda"), WORKLOAD, TRAINING)
        == 18 * ModelSize.from_architecture(TINY, None).parameters
    )


def test_speedup_is_the_median_of_rounds():
    seconds = {OURS: (1.0, 10.0, 2.0), PLAIN: (2.0, 30.0, 20.0)}
    samples = {(name, GENERATION): [Sample(value, 1.0) for value in values] for name, values in seconds.items()}
    results = Results(samples)
    assert results.speedup(GENERATION) == pytest.approx(3.0)  # the medians' own ratio would be 10
    assert results.median(OURS, GENERATION) == 2.0


def test_shapes_are_those_of_the_models():
    for name, public in (("1b", LLAMA_3_2_1B), ("8b", LLAMA_3_1_8B)):
        found, expected = Architecture.from_hf(SHAPES[name]), Architecture.from_hf(public)
        assert replace(found, raw={}) == replace(expected, raw={})
        assert all(SHAPES[name][key] == public[key] for key in ("rope_theta", "rope_scaling"))
    assert ModelSize.from_architecture(Architecture.from_hf(SHAPES["135m"]), None).parameters == 134_515_008


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
    assert peak.known_teraflops(name) == rate
