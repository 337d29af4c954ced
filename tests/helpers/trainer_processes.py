"""Whole runs of the tiny model in killable processes, and comparisons of runs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from helpers.ranks import kill_tree
from helpers.tiny_run import metrics_of, rollouts_of, tiny_overrides, without_times
from safetensors.torch import load_file

from reinforce_rl.monitoring.glossary import metric_of
from reinforce_rl.monitoring.records import read_tokens
from reinforce_rl.runtime.status import read_status

DRIVER = Path(__file__).with_name("train_tiny.py")
RUN_SECONDS = 480.0
NUM_PROMPTS = 10  # with steps of 4, the third step of an epoch has fewer
STEPS = 12
SETTINGS = [
    "trainer.reinforce.max_epochs=4",
    "trainer.reinforce.val_check_interval=5",
    "trainer.reinforce.save_interval=3",
    "model.optim.sched.name=CosineAnnealing",
    "model.optim.sched.warmup_steps=2",
    "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true",
]


class TrainerProcesses:
    """Run in killable processes, one run at a time; see `train_tiny.py`."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER), "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.statuses: list[int] = []

    def start(
        self, folder: Path, *overrides: str, die_before: str = "", ranks: int = 1, **options: object
    ) -> list[int]:
        """Start a run and return one process id per rank; see `train_tiny.py` for the options."""
        assert self._process.stdin is not None
        base = [*tiny_overrides(folder, num_prompts=NUM_PROMPTS), f"trainer.devices={ranks}"]
        command = [
            str(folder / "log"),
            {"die_before": die_before, **options},
            ranks,
            *base,
            *overrides,
        ]
        self._process.stdin.write(json.dumps(command) + "\n")
        return [int(process) for process in self._answer().split()]

    def wait(self) -> int:
        """Return the run's exit status, negative for a signal; set `statuses` of the ranks."""
        status, *self.statuses = [int(text) for text in self._answer().split()]
        return status

    def finish(self, folder: Path, *overrides: str, **options: Any) -> Path:
        """Run to a successful end and return the folder. Options are those of `start`."""
        folder.mkdir(exist_ok=True)
        self.start(folder, *overrides, **options)
        assert self.wait() == 0, (folder / "log").read_text()
        return folder

    def kill_at_random(
        self, folder: Path, draw: random.Random, seconds: float, *overrides: str, ranks: int
    ) -> None:
        """Start a run; kill one or all ranks up to `seconds` after its first metrics or its end."""
        metrics = folder / "run" / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        started = self.start(folder, *overrides, ranks=ranks)
        deadline = time.monotonic() + RUN_SECONDS
        # If the previous run ended before the kill, there is nothing left to write.
        while not (metrics.exists() and metrics.stat().st_size != before) and not has_finished(
            folder
        ):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, seconds))
        for process in draw.choice([started, started[:1], started[-1:]]):
            with contextlib.suppress(ProcessLookupError):  # a fast rank has ended
                os.kill(process, signal.SIGKILL)
        self.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], RUN_SECONDS)
        assert ready, "the run neither starts nor ends"
        return self._process.stdout.readline()

    def close(self) -> None:
        kill_tree_of(self._process)


def has_finished(folder: Path) -> bool:
    status = read_status(folder / "run")
    return status is not None and status.state == "finished"


def kill_tree_of(process: subprocess.Popen) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()


def assert_equal_runs(folder: Path, uninterrupted: Path) -> None:
    """Assert bitwise equal metrics, samples, weights and last checkpoint, except for times."""
    metrics = metrics_of(folder)
    expected = metrics_of(uninterrupted)
    assert [line["step"] for line in metrics] == list(range(len(expected))), "each step once"
    for line, other in zip(metrics, expected, strict=True):
        values = without_times(line)
        other_values = without_times(other)
        assert values == other_values, {
            key: (values.get(key), other_values.get(key))
            for key in values.keys() | other_values
            if values.get(key) != other_values.get(key)
        }
        of_clock = {"alerts/straggler"}
        assert line.keys() - of_clock == other.keys() - of_clock
    for step in range(1, len(expected)):
        assert rollouts_of(folder, step) == rollouts_of(uninterrupted, step)
    weights, others = (
        load_file(path / "run" / "hf" / "model.safetensors") for path in (folder, uninterrupted)
    )
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    kept, others = (
        sorted(p.name for p in (f / "run" / "checkpoints").glob("step_*"))
        for f in (folder, uninterrupted)
    )
    assert kept[-1] == others[-1], "the one after the last step"
    # A checkpoint of a stop between two intervals may be among the newest; none is older than
    # without the stop.
    assert len(kept) == len(others)
    assert all(name >= other for name, other in zip(kept, others, strict=True))


def assert_sound(folder: Path, staleness: int = 1, *, one_version: bool = False) -> None:
    """Assert invariants of rollout_order=finished.

    Each prompt is trained on once an epoch, and no token is too old.
    """
    samples = Counter[int]()
    groups = 0
    for step in range(1, STEPS + 1):
        rows = rollouts_of(folder, step)
        samples_of_prompts = Counter(row["prompt_id"] for row in rows)
        assert set(samples_of_prompts.values()) == {4}, step  # whole groups
        samples = samples + samples_of_prompts
        groups = groups + len(samples_of_prompts)
        for sample in read_tokens(folder / "run" / "rollouts" / f"step_{step:05d}.parquet"):
            versions = list(sample.weight_versions or [])
            assert versions == sorted(versions)
            assert len(set(versions)) <= 1 or not one_version
            assert all(step - 1 - staleness <= version < step for version in versions)
    lines = metrics_of(folder)
    assert len(lines) == STEPS + 1
    assert groups == 4 * NUM_PROMPTS
    assert samples == dict.fromkeys(range(NUM_PROMPTS), 16)
    assert all(line["train/dropped_groups"] >= 0 for line in lines[1:])
    assert lines[-1]["train/consumed_prompts"] == 4 * NUM_PROMPTS
    assert {
        name for name in lines[-1] if name not in ("step", "time") and not metric_of(name)
    } == set()
