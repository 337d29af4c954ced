"""Runs of `slurm/train_hetjob.sbatch` on a lab, with the real server and a tiny actor."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from helpers.real_run import World, environment
from helpers.slurm_lab import Component, Job, SlurmLab, processes_of
from helpers.tiny_run import json_lines, without_times
from safetensors.torch import load_file

from reinforce_rl.errors import DataError
from reinforce_rl.launch.slurm.script import filled_script
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.monitoring.loggers import read_metrics

ROOT = Path(__file__).parents[2]
BATCH_FILE = ROOT / "slurm" / "train_hetjob.sbatch"
ACTOR_COMMAND = "train"
SERVER_COMMAND = "serve"
START_SECONDS = 600.0  # to the first step: all ranks import on a busy machine
RUN_SECONDS = 900.0


@dataclass(frozen=True)
class Layout:
    """A job's nodes in the lab and tasks per node."""

    server_nodes: Sequence[str] = ("rm0",)
    server_tasks: int = 1
    actor_nodes: Sequence[str] = ("act0", "act1")
    actor_tasks: int = 1

    @property
    def options(self) -> list[str]:
        """Return `sbatch` options for both components."""
        both = ((self.server_nodes, self.server_tasks), (self.actor_nodes, self.actor_tasks))
        server, actor = (
            [f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks-per-node={tasks}"]
            for nodes, tasks in both
        )
        return [*server, ":", *actor]


SMALL = Layout()
# Overrides of a run with short steps, each saved: enough steps for a signal to come mid-run.
STEPS = 24
SHORT = [
    f"trainer.reinforce.max_steps={STEPS}",
    "trainer.reinforce.val_check_interval=0",
    "trainer.reinforce.save_interval=1",
    "trainer.reinforce.num_rollouts_per_prompt=2",
    "model.reinforce.num_rollout_samples=4",
    "model.reinforce.length_params.max_length=4",
    "model.reinforce.num_val_samples=4",
]


@dataclass(frozen=True)
class SlurmRun:
    """A run, identified by its folder; it may span several jobs."""

    lab: SlurmLab
    world: World
    run_dir: Path
    layout: Layout = SMALL
    overrides: Sequence[str] = ()  # of the actor

    def submit(
        self,
        *overrides: str,
        server: Sequence[str] = (),
        options: Sequence[str] = (),
        **variables: str,
    ) -> Job:
        """Submit a job with additional overrides and variables.

        `options` are `sbatch`'s options for component 0.
        """
        self.run_dir.parent.mkdir(parents=True, exist_ok=True)
        script = self.run_dir.with_name(f"{self.run_dir.name}.sbatch")
        settings = {"repository": ROOT, "python": sys.executable, "batch_python": sys.executable}
        script.write_text(filled_script(BATCH_FILE.read_text(), settings))
        actor = [*self.world.actor_overrides(self.run_dir, *self.overrides), *overrides]
        return self.lab.submit(
            *options,
            *self.layout.options,
            str(script),
            *actor,
            "--",
            *self.world.server_overrides("mean"),
            *server,
            log=self.run_dir.with_name(f"{self.run_dir.name}.out"),
            env={
                **environment(),
                "PYTHONPATH": str(ROOT),
                "REINFORCE_RUN_DIR": str(self.run_dir),
                "REINFORCE_GRACE_SECONDS": "300",
                **variables,
            },
            cwd=ROOT,
        )

    @property
    def step(self) -> int:
        """Return the step of the last complete metrics line; -1 if none."""
        with contextlib.suppress(DataError, FileNotFoundError):
            lines = read_metrics(self.run_dir / "metrics.jsonl")
            return lines[-1]["step"] if lines else -1
        return -1

    def wait_for_step(self, job: Job, step: int, seconds: float = START_SECONDS) -> None:
        """Wait until the metrics have the step."""
        deadline = time.monotonic() + seconds
        while self.step < step:
            if time.monotonic() > deadline:
                raise AssertionError(f"no step {step} within {seconds} s:\n{self.report(job)}")
            time.sleep(0.2)

    def wait(self, job: Job, seconds: float = RUN_SECONDS) -> list[Component]:
        """Wait for the job's end and return its components."""
        try:
            return self.lab.wait(job, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report(job)}") from None

    def ranks(self, job: Job, command: str) -> dict[int, psutil.Process]:
        """Return a command's running processes by rank, without wrappers."""
        processes = {}
        for process in processes_of(self.lab, job):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[2:4] == ["reinforce_rl", command]:
                    processes[int(process.environ()["SLURM_PROCID"])] = process
        return processes

    def rank(self, job: Job, command: str, number: int) -> psutil.Process:
        processes = self.ranks(job, command)
        assert number in processes, (
            f"no rank {number} of {command} among {processes}:\n{self.report(job)}"
        )
        return processes[number]

    def report(self, job: Job) -> str:
        """Return the job's output, shortened."""
        parts = [f"--- {job.log.name}", job.output]
        for path in sorted((self.run_dir / "slurm").glob("*/*.log")):
            parts += [
                f"--- {path.relative_to(self.run_dir)}",
                *path.read_text(errors="replace").splitlines()[-40:],
            ]
        return "\n".join(parts)

    @property
    def status(self) -> dict:
        return json.loads((self.run_dir / "status.json").read_text())

    @property
    def saved_step(self) -> int:
        """Return the step of the newest checkpoint; -1 if none."""
        checkpoint = latest_checkpoint(self.run_dir / "checkpoints")
        return -1 if checkpoint is None else checkpoint.trainer_state["step"]


def results(run_dir: Path) -> list[dict]:
    """Return a run's metrics without timings, one line per step; step 0 is a validation."""
    lines = json_lines(run_dir / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    assert steps == [steps[0] + i for i in range(len(steps))], "each step once"
    return [without_times(line) for line in lines]


def assert_same_weights(run_dir: Path, other: Path) -> None:
    """Assert that the exported models are bitwise equal."""
    weights = load_file(run_dir / "hf" / "model.safetensors")
    expected = load_file(other / "hf" / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
