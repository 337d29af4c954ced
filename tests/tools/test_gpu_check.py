"""`tools/gpu_check.py`: its checks with real numbers on a CPU, planted faults, its processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from helpers.toy_server import is_alive, wait_for
from torch.autograd import DeviceType

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from gpu_checks import (  # noqa: E402
    attention,
    correctness,
    counts,
    ipc,
    our_side,
    report,
    runner,
    speed,
    switches,
    trainer,
)
from gpu_checks.base import CPU, CUDA, FAIL, FAKE, PASS, SKIP, Context, Finding  # noqa: E402
from gpu_checks.random_weights import fill_ours  # noqa: E402
from gpu_checks.runner import Check  # noqa: E402
from gpu_checks.runs import Runs, largest_difference, not_finite  # noqa: E402
from gpu_checks.shapes import SHAPES  # noqa: E402

from reinforce_rl.config.engines import TensorRTLLMConfig, VLLMConfig  # noqa: E402
from reinforce_rl.generation.trtllm import adapter as engine_adapter  # noqa: E402
from reinforce_rl.generation.trtllm.adapter import TensorRTLLM  # noqa: E402
from reinforce_rl.generation.vllm.adapter import VLLM  # noqa: E402
from reinforce_rl.megatron.architecture import Architecture  # noqa: E402
from reinforce_rl.megatron.hf_weights import hf_tensors  # noqa: E402
from reinforce_rl.megatron.model.model import CausalLM  # noqa: E402


@pytest.fixture
def context(tmp_path) -> Context:
    return Context(CPU, tmp_path, time.time() + 600)


def program(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


class TestProgram:
    @pytest.mark.slow
    def test_runs_what_is_named_and_leaves_a_page(self, tmp_path):
        done = program(
            "--device", "cpu", "--only", "machine", "correctness", "ipc", "--out", str(tmp_path)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-2:] == ["not run: ipc", "gpu_check: PASS"]
        whole = json.loads((tmp_path / "report.json").read_text())
        expected = [
            ("machine", PASS),
            ("correctness", PASS),
            ("ipc", SKIP),
        ]
        assert [(check["name"], check["verdict"]) for check in whole["checks"]] == expected
        assert whole["checks"][2]["sentence"] == "needs a GPU"
        page = (tmp_path / "report.md").read_text()
        assert page.startswith("# gpu_check: PASS")
        assert "| tiny | bfloat16 |" in page

    @pytest.mark.more
    def test_a_machine_without_a_gpu_is_told_so(self):
        done = program()
        assert done.returncode == 2
        assert done.stderr.startswith("error: torch finds no GPU here")
        assert done.stderr.count("\n") == 1


CHILDREN = """
import os, subprocess, sys, time
from gpu_checks.base import Finding
def passes(context): return Finding("PASS", os.environ["HUE"], {"left": context.left()})
def crashes(context): raise RuntimeError("no such kernel")
def dies(context): os.abort()
def hangs(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.folder / "child").write_text(str(child.pid))
    time.sleep(600)
"""


class TestRunner:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        (tmp_path / "children.py").write_text(CHILDREN)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

        def run(
            function: str, left: float = 100.0, seconds: float = 60.0, **options: Any
        ) -> Finding:
            check = Check(
                function,
                "",
                f"children:{function}",
                seconds,
                1.0,
                (CPU,),
                (),
                {"HUE": "blue"},
                **options,
            )
            return runner.run(check, CPU, tmp_path / "out" / function, left)

        return run

    def test_a_finding_comes_back(self, run):
        finding = run("passes")
        assert finding.verdict == PASS
        assert finding.sentence == "blue"
        assert finding.name == "passes"
        assert 50 < finding.numbers["left"] < 60

    def test_a_crash_is_a_fault_of_its_check_alone(self, run):
        finding = run("crashes")
        assert finding.verdict == FAIL
        assert finding.sentence == "ended with exit code 1: RuntimeError: no such kernel"
        assert run("dies").sentence.startswith("ended with exit code -6")

    @pytest.mark.more
    def test_a_hang_ends_at_its_deadline_and_its_children_with_it(self, run, tmp_path):
        finding = run("hangs", seconds=4.0)
        assert finding.verdict == FAIL
        assert finding.sentence.startswith("no end within 4 s")
        with contextlib.suppress(psutil.NoSuchProcess):
            child = psutil.Process(int((tmp_path / "out/hangs/child").read_text()))
            # SIGKILL takes a moment to arrive
            assert wait_for(lambda: not is_alive(child), seconds=10)

    @pytest.mark.more
    def test_time_that_is_over_is_no_fault(self, run):
        assert run("hangs", left=4.0).verdict == SKIP
        assert run("passes", left=0.5).verdict == SKIP


def test_what_cannot_be_run_is_skipped_and_says_why(tmp_path):
    check = Check("a", "", "a:b", 9, needs=("no_such_module.part",))
    finding = runner.run(check, CUDA, tmp_path / "a", 99)
    assert finding.verdict == SKIP
    assert finding.sentence == "not installed: no_such_module.part"


def test_verdict():
    def of(*verdicts: str) -> str:
        return report.verdict(
            [Finding(verdict, "", name=str(n)) for n, verdict in enumerate(verdicts)]
        )

    assert of(PASS, SKIP) == PASS
    assert of(PASS, FAIL, FAIL) == "FAIL (1, 2)"
    assert of(SKIP) == "FAIL (no check ran)"


def planted(fault: str) -> Any:
    """`fill_ours` with a fault in one weight."""

    @torch.no_grad()
    def fill(lm: CausalLM) -> None:
        fill_ours(lm)
        weight = lm.decoder.layers[1].mlp.linear_fc2.weight
        weight[3] *= 1.2 if fault == "a wrong weight" else math.nan

    return fill


class TestCorrectness:
    @pytest.mark.more
    @pytest.mark.parametrize("fault", ["a wrong weight", "NaN"])
    def test_a_fault_in_a_weight_is_found(self, context, monkeypatch, fault):
        monkeypatch.setattr(our_side, "fill_ours", planted(fault))
        if fault == "NaN":  # training refuses to step on it
            monkeypatch.setattr(our_side.OurSide, "run", lambda *_: None)
        finding = correctness.check(context)
        assert finding.verdict == FAIL
        for name in ("log-probs", "gradient", "worst tensor"):
            assert f"tiny float32: {name} off by" in finding.sentence

    @pytest.mark.more
    def test_a_wrong_update_is_found(self, context, monkeypatch):
        monkeypatch.setattr(our_side, "LEARNING_RATE", 1.1 * our_side.LEARNING_RATE)
        assert correctness.check(context).sentence.startswith("tiny float32: update off by 0.1")


class TestAttention:
    def test_a_missing_position_is_found(self, context, monkeypatch):
        def too_few(query: Any, key: Any, value: Any, mask: Any, scale: Any) -> torch.Tensor:
            return whole(
                query, key, value, mask & ~torch.eye(mask.shape[-1], dtype=torch.bool)[-1], scale
            )

        whole = attention.masked_attention
        for dtype, limit in attention.TOLERANCES.items():
            monkeypatch.setattr(attention, "masked_attention", whole)
            assert attention.worst_error("masked", 129, dtype, "cpu")[0] < limit
            monkeypatch.setattr(attention, "masked_attention", too_few)
            assert attention.worst_error("masked", 129, dtype, "cpu")[0] > limit

    def test_nan_is_found(self, context, monkeypatch):
        whole = attention.masked_attention
        monkeypatch.setattr(attention, "LENGTHS", (64,))
        monkeypatch.setattr(attention, "masked_attention", lambda *args: whole(*args) * math.nan)
        finding = attention.check(context)
        assert finding.verdict == FAIL
        assert "masked at 64 in float32: output is off by inf" in finding.sentence


LINES = [
    {"step": n, "time": n, "train/actor_loss": 1.0, "train/grad_norm": 2.0, "train/rewards": 0.0}
    for n in (1, 2, 3)
]


class TestRuns:
    @pytest.mark.slow
    def test_a_run_that_is_killed_and_goes_on(self, context):
        runs = Runs(context, "tiny", 12, 4)
        straight = runs.run("straight", 9, saves=True)
        killed_at = trainer.kill(
            runs.words("killed", 9, saves=True), context.folder / "killed", context
        )
        assert killed_at is not None
        assert trainer.KILLED_AFTER <= killed_at < 9
        faults: list[str] = []
        resumed = runs.run("killed", 9, saves=True)
        assert (
            trainer.compared("resumed", straight, resumed, killed_at, faults)
            == "equal to the last digit"
        )
        resumed[killed_at]["train/grad_norm"] *= 2
        trainer.compared("resumed", straight, resumed, killed_at, faults)
        assert len(faults) == 1
        assert "train/grad_norm differs by" in faults[0]

    def test_a_run_that_ends_by_itself_was_not_killed(self, context):
        assert trainer.kill(["no.such.key=1"], context.folder, context) is None

    def test_differences(self):
        assert largest_difference(LINES[0], {**LINES[0], "time": 7.0}) == (0.0, "")
        assert largest_difference(LINES[0], {**LINES[0], "train/grad_norm": 2.5}) == (
            0.25,
            "train/grad_norm",
        )
        assert largest_difference(LINES[0], {**LINES[0], "train/new": 1.0})[0] == math.inf
        assert not_finite(LINES) == []
        assert not_finite([{**LINES[0], "train/rewards": None}]) == ["train/rewards at step 1"]

    def test_noise_of_the_machine_is_no_fault_and_missing_steps_are(self):
        faults: list[str] = []
        noisy = [{**line, "train/grad_norm": 2.01} for line in LINES]
        trainer.compared("resumed", LINES, noisy, 1, faults)
        assert faults == []
        trainer.compared("resumed", LINES, LINES[:2], 1, faults)
        assert len(faults) == 1


class TestSwitches:
    def judged(self, on: dict[str, float], **options: Any) -> dict[str, Any]:
        lines = [
            {**line, "timers/step_time": 2.0, "memory/train_time": 5.0, switches.GAP: 0.01}
            for line in LINES
        ]
        return switches.judge(
            switches.Switch("a", ["b=c"], **options), lines, [{**x, **on} for x in lines], CUDA
        )

    def test_advice(self):
        assert self.judged({"timers/step_time": 1.0})["advice"] == "turn it on"
        assert self.judged({"timers/step_time": 2.0})["advice"] == "no gain"
        assert (
            self.judged({"timers/step_time": 2.0, "memory/train_time": 4.0})["advice"]
            == "turn it on"
        )
        assert (
            self.judged({"timers/step_time": 1.0, "train/grad_norm": 2.5})["advice"]
            == "leave it off"
        )
        assert (
            self.judged({"train/actor_loss": math.nan}, tolerance=math.inf)["advice"]
            == "leave it off"
        )
        assert (
            self.judged({switches.GAP: 0.014, "train/rewards": 3.0}, affects="generation")["advice"]
            == "no gain"
        )
        assert self.judged({switches.GAP: 0.5}, affects="generation")["advice"] == "leave it off"

    def test_on_fake_tensors_only_the_switches_themselves_run(self, tmp_path, monkeypatch):
        runs: list[tuple[str, int]] = []

        class RecordedRuns:
            def __init__(self, *args: Any):
                pass

            def run(
                self, name: str, steps: int, overrides: Sequence[str] = ()
            ) -> list[dict[str, Any]]:
                runs.append((name, steps))
                return LINES

        monkeypatch.setattr(switches, "Runs", RecordedRuns)
        monkeypatch.setattr(switches, "is_installed", lambda name: False)
        finding = switches.check(Context(FAKE, tmp_path, time.time() + 600))
        advice = {row["key"]: row["advice"] for row in finding.numbers["switches"]}
        assert finding.verdict == PASS
        assert advice["model.shared_prefix=true"] == "runs"
        assert [name for name, _ in runs if not name.startswith("on_")] == []
        expected = list(advice.values()).count("runs")
        assert len(runs) == expected

    def test_fake_runs_have_few_sequences(self, tmp_path):
        def words_of(mode: str) -> list[str]:
            runs = Runs.__new__(Runs)
            runs._context = Context(mode, tmp_path, 0.0)
            runs._prompt_tokens = 24
            runs._response_tokens = 8
            return runs.words("straight", 1)

        assert "model.reinforce.num_rollout_samples=4" in words_of(FAKE)
        assert not [word for word in words_of(CPU) if "num_rollout_samples" in word]

    @pytest.mark.slow
    def test_a_switch_that_crashes_does_not_take_the_others_with_it(self, context, monkeypatch):
        table = (
            switches.Switch("wrong", ["no.such.key=1"]),
            switches.Switch("right", ["model.optim.distributed=true"]),
        )
        monkeypatch.setattr(switches, "SWITCHES", table)
        rows = switches.check(context).numbers["switches"]
        advices = [row["advice"] for row in rows]
        assert advices == ["not tried", "right"]


def test_counts_of_a_profile():
    def event(name: str, device: DeviceType, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation)

    names = (
        "aten::mm",
        "cudaLaunchKernel",
        "cudaGraphLaunch",
        "cudaStreamSynchronize",
        "cudaMemcpyAsync",
    )
    events = [event("gemm", DeviceType.CUDA), event("step", DeviceType.CUDA, True)]
    assert counts.of_events(
        [*events, *(event(name, DeviceType.CPU) for name in names)]
    ) == counts.Counts(1, 2, 1)
    assert counts.Counts(12, 10, 3).each_of(4, counts.Counts(4, 2, 3)) == counts.Counts(2, 2, 0)


def test_budgets():
    per = {"decode step": counts.Counts(11, 11, 1)}
    budgets = {"decode step": {"kernels": 10, "syncs": 1}}
    assert counts.compared(per, budgets, 1.25)[1] == []
    assert counts.compared(per, budgets, 1.0)[1] == ["decode step: 11.0 kernels, allowed 10"]
    assert len(counts.compared({"decode step": counts.Counts(10, 1, 2)}, budgets, 9.0)[1]) == 1


class TestIpc:
    @pytest.mark.parametrize("adapter", [TensorRTLLM(TensorRTLLMConfig()), VLLM(VLLMConfig())])
    def test_another_process_reads_all_weights(self, mesh, monkeypatch, adapter):
        monkeypatch.setattr(engine_adapter, "device_uuid", lambda device: "GPU-0")
        lm = CausalLM(Architecture.from_hf(SHAPES["tiny"]), mesh, torch.bfloat16)
        fill_ours(lm)
        expected = {name: ipc.summary(value) for name, value in hf_tensors(lm) if value is not None}
        received, buckets = ipc.exchange(lm, adapter)
        assert buckets > 1
        assert ipc.differences(received, expected) == []
        name = next(iter(received))
        received[name][2] += 0.5
        del received[list(received)[1]]
        assert len(ipc.differences(received, expected)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_reads_what_lies_on_the_gpu(tmp_path):
    finding = ipc.check(Context(CUDA, tmp_path, time.time() + 60))
    assert finding.verdict == PASS, finding.sentence


def test_speed_faults():
    assert speed.too_slow("1b", {"training": 1.5, "generation": 0.5, "step": None}) == [
        "1b: generation has 0.50 of transformers' speed, expected at least 0.8"
    ]
