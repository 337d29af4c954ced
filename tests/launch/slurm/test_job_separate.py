"""Generators as a third component of a job on a real Slurm, with fake programs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from helpers.fake_slurm import write_python
from helpers.slurm_lab import Job, SlurmLab, assert_nothing_left, processes_of
from helpers.toy_server import wait_for

from reinforce_rl.launch.slurm.script import BATCH_FILE, filled_script

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
SECONDS = 180.0


def submit(lab: SlurmLab, folder: Path, **variables: str) -> Job:
    """Submit a job with a server, two actor ranks, and two generators on one node."""
    script = folder / "job.sbatch"
    settings = {
        "repository": ROOT,
        "python": write_python(folder / "programs"),
        "batch_python": sys.executable,
    }
    script.write_text(filled_script((ROOT / "slurm" / BATCH_FILE).read_text(), settings))
    nodes = [("rm0", 1), ("act0", 2), ("act1", 2)]
    components = [
        [f"--nodelist={node}", "--nodes=1", f"--ntasks-per-node={tasks}"] for node, tasks in nodes
    ]
    return lab.submit(
        *(*components[0], ":", *components[1], ":", *components[2]),
        *(str(script), "a=1", "--", "b=2"),
        log=folder / "job.out",
        env={
            **os.environ,
            "REINFORCE_RUN_DIR": str(folder / "run"),
            "REINFORCE_GRACE_SECONDS": "60",
            "FAKE_ACTOR": "trains",
            **variables,
        },
        cwd=ROOT,
    )


def generators_of(lab: SlurmLab, job: Job) -> list[psutil.Process]:
    generators = []
    for process in processes_of(lab, job):
        with contextlib.suppress(psutil.Error):
            if any(Path(word).name == "generate.py" for word in process.cmdline()[1:3]):
                generators.append(process)
    return generators


def test_a_generator_dies_alone_is_started_again_and_all_are_drained(
    lab: SlurmLab, tmp_path: Path
) -> None:
    job = submit(lab, tmp_path)
    run_dir = tmp_path / "run"
    assert wait_for(lambda: len(list(run_dir.glob("generates.*"))) == 2, SECONDS), job.output
    assert {"gen-0", "gen-1"} <= set(lab.steps(job)), "both at once on one node"
    victim = next(
        generator
        for generator in generators_of(lab, job)
        if generator.environ()["CUDA_VISIBLE_DEVICES"] == "1"
    )
    victim.send_signal(signal.SIGKILL)
    assert wait_for(lambda: "gen-1.1" in lab.steps(job), SECONDS), job.output
    assert wait_for(lambda: len(list(run_dir.glob("generates.*"))) == 3, SECONDS), job.output
    assert {"actor", "gen-0", "rm-0"} <= set(lab.steps(job))
    lab.signal(job, "USR1")
    assert wait_for(lambda: "requeued: from step 0 to step 7" in job.output, SECONDS), job.output
    lab.cancel(job)
    lab.wait(job, SECONDS)
    said = job.output
    assert "gen-1 rank 0 on act1 was ended by SIGKILL (exit code 137)" in said
    assert "restart 1 of 5" in said
    assert "the actor ended cleanly after SIGUSR1" in said
    assert len(list(run_dir.glob("drained.*"))) == 2
    assert_nothing_left(lab, job, run_dir)
