"""Interrupted jobs equal the uninterrupted run, bit for bit; concurrent jobs do not collide."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from helpers.slurm_lab import Job, assert_nothing_left
from helpers.slurm_lab.leftovers import published_ports
from helpers.slurm_run import (
    ACTOR_COMMAND,
    RUN_SECONDS,
    SHORT,
    SlurmRun,
    assert_same_weights,
    results,
)

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 40
LONGER = [*SHORT, f"trainer.reinforce.max_steps={STEPS}"]


@pytest.fixture(scope="module")
def uninterrupted(lab, world, tmp_path_factory) -> tuple[SlurmRun, Job]:
    run = SlurmRun(lab, world, tmp_path_factory.mktemp("uninterrupted") / "run", overrides=LONGER)
    job = run.submit()
    assert {part.state for part in run.wait(job)} == {"COMPLETED"}, run.report(job)
    assert_nothing_left(lab, job, run.run_dir)
    return run, job


@pytest.fixture
def run(lab, world, tmp_path) -> SlurmRun:
    return SlurmRun(lab, world, tmp_path / "run", overrides=LONGER)


def assert_equal(run: SlurmRun, uninterrupted: tuple[SlurmRun, Job]) -> None:
    expected = results(uninterrupted[0].run_dir)
    assert len(expected) == STEPS
    assert results(run.run_dir) == expected
    assert_same_weights(run.run_dir, uninterrupted[0].run_dir)


def finish(run: SlurmRun, job: Job, *restarts: int) -> None:
    components = run.wait(job)
    assert {(part.state, part.exit_code) for part in components} == {("COMPLETED", "0:0")}, (
        run.report(job)
    )
    assert components[0].restarts in restarts
    assert_nothing_left(run.lab, job, run.run_dir)


def test_once_signalled_and_once_crashed(lab, run, uninterrupted):
    job = run.submit(REINFORCE_RESTART_AFTER_CRASH="true")
    run.wait_for_step(job, 2)
    lab.signal(job, "USR1")
    lab.wait_for_attempt(job, 1, 300)
    run.wait_for_step(job, run.saved_step + 2)
    os.kill(run.rank(job, ACTOR_COMMAND, 0).pid, signal.SIGKILL)
    finish(run, job, 2)
    assert_equal(run, uninterrupted)


@pytest.mark.parametrize("node", ["rm0", "act1"])
def test_a_node_that_crashes(node, lab, run, uninterrupted):
    """rm0 runs the batch script: after its crash Slurm itself requeues, component 0 alone.

    A node that returns may still have to end the attempt in which it was lost. Slurm identifies a
    step by its job id only, so the tasks of the next attempt get SIGTERM: they save, and the job is
    requeued again.
    """
    job = run.submit()
    run.wait_for_step(job, 2)
    lab.crash(node)
    lab.up(node)
    finish(run, job, 1, 2)
    assert_equal(run, uninterrupted)
    assert f"job {job.id}, restart 1" in job.output
    if node == "act1":  # the batch script is lost with rm0
        assert "Slurm itself requeues the job, since act1 failed" in job.output


def test_scontrol_requeue(lab, run, uninterrupted):
    job = run.submit()
    run.wait_for_step(job, 2)
    lab.requeue(job)
    finish(run, job, 1)
    assert_equal(run, uninterrupted)


def test_two_jobs_on_the_same_nodes(lab, run, world, tmp_path, uninterrupted):
    other = SlurmRun(lab, world, tmp_path / "other", overrides=LONGER)
    jobs = {run.submit(): run, other.submit(): other}
    for job in jobs:
        lab.wait_for_attempt(job, 0, 300)
    ports = []
    for job, its_run in jobs.items():
        its_run.wait_for_step(job, 1, RUN_SECONDS)
        ports += [port for _, port in published_ports(its_run.run_dir)]
    assert len(set(ports)) == len(ports) == 6  # two per server, one per actor
    for job, its_run in jobs.items():
        finish(its_run, job, 0)
        assert_equal(its_run, uninterrupted)


def test_the_next_link_after_a_finished_run_starts_nothing(lab, uninterrupted):
    run, first = uninterrupted
    before = snapshot(run.run_dir)
    link = run.submit()
    started = time.monotonic()
    components = run.wait(link)
    assert {(part.state, part.exit_code) for part in components} == {("COMPLETED", "0:0")}, (
        run.report(link)
    )
    assert time.monotonic() - started < 60  # a model takes longer to load
    assert "has finished" in link.last_lines
    assert link.id != first.id
    assert_nothing_left(lab, link)
    assert snapshot(run.run_dir) == before


def snapshot(run_dir: Path) -> dict[str, int]:
    """Return every file of the run outside slurm/ with its modification time."""
    files = [
        path
        for path in run_dir.rglob("*")
        if path.is_file() and path.relative_to(run_dir).parts[0] != "slurm"
    ]
    return {str(path): path.stat().st_mtime_ns for path in files}
