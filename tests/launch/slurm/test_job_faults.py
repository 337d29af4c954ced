"""Jobs whose server dies or never starts, whose disk is full, or that are cancelled."""

from __future__ import annotations

import os
import re
import signal

import pytest
from helpers.errors import printed_keys
from helpers.slurm_lab import assert_nothing_left
from helpers.slurm_run import SERVER_COMMAND, SHORT, STEPS, SlurmRun, results
from helpers.toy_server import wait_for

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def run(lab, world, tmp_path) -> SlurmRun:
    return SlurmRun(lab, world, tmp_path / "run", overrides=SHORT)


def test_a_killed_server_ends_the_job_after_the_actor_has_saved(lab, run):
    job = run.submit()
    run.wait_for_step(job, 2)
    os.kill(run.rank(job, SERVER_COMMAND, 0).pid, signal.SIGKILL)
    components = run.wait(job)
    assert (components[0].state, components[0].exit_code) == ("FAILED", "137:0"), run.report(job)
    assert_nothing_left(lab, job, run.run_dir)
    assert "rm-0 rank 0 on rm0" in job.last_lines
    assert "SIGKILL" in job.last_lines
    assert run.status["state"] == "stopped"
    assert 2 <= run.saved_step == run.status["step"] < STEPS
    assert f"the run is at step {run.saved_step}" in job.last_lines


def test_a_server_that_cannot_start_ends_the_job_before_the_actor_begins(lab, run):
    job = run.submit(server=["reward_model.head_path=nowhere.safetensors"])
    components = run.wait(job)
    assert (components[0].state, components[0].exit_code) == ("FAILED", "1:0"), run.report(job)
    assert_nothing_left(lab, job, run.run_dir)
    assert "rm-0 ended before it was healthy" in job.last_lines
    assert "nowhere.safetensors" in job.output
    assert not list(run.run_dir.glob("slurm/*/actor*"))


def test_a_server_that_hangs_is_given_up(lab, run):
    job = run.submit(REINFORCE_READY_SECONDS="20", REINFORCE_GRACE_SECONDS="3")
    assert wait_for(lambda: 0 in run.ranks(job, SERVER_COMMAND), 120), run.report(job)
    os.kill(run.rank(job, SERVER_COMMAND, 0).pid, signal.SIGSTOP)
    components = run.wait(job)
    assert (components[0].state, components[0].exit_code) == ("FAILED", "1:0"), run.report(job)
    assert_nothing_left(lab, job, run.run_dir)
    assert "no healthy reward server within 20 s" in job.last_lines
    assert not list(run.run_dir.glob("slurm/*/actor*"))


def test_scancel_saves_and_does_not_requeue(lab, run):
    job = run.submit()
    run.wait_for_step(job, 2)
    lab.cancel(job)
    components = run.wait(job)
    assert {(part.state, part.restarts) for part in components} == {("CANCELLED", 0)}, run.report(
        job
    )
    assert_nothing_left(lab, job, run.run_dir)
    assert run.status["state"] == "stopped", run.report(job)
    assert 2 <= run.saved_step == run.status["step"] < STEPS
    assert "not requeued after SIGTERM" in job.last_lines
    assert f"the run is at step {run.saved_step}" in job.last_lines


def test_a_full_disk_ends_the_job_and_keeps_the_last_checkpoint(lab, run):
    (run.run_dir / "checkpoints").mkdir(parents=True)
    folder = lab.small / "checkpoints"
    lab.inside("mkdir", str(folder))
    # Not a symbolic link: a run is refused if one of its folders leads outside.
    lab.inside("mount", "--bind", str(folder), str(run.run_dir / "checkpoints"))
    job = run.submit()
    run.wait_for_step(job, 2)
    filler = str(lab.small / "filler")
    lab.inside("sh", "-c", f"dd if=/dev/zero of={filler} bs=64k 2>/dev/null; true")
    components = run.wait(job)
    assert (components[0].state, components[0].exit_code) == ("FAILED", "1:0"), run.report(job)
    assert_nothing_left(lab, job, run.run_dir)
    assert "checkpoint.disk.full" in printed_keys(job.output), run.report(job)
    assert re.search(r"previous checkpoint, step_\d+", job.output), run.report(job)
    assert "actor rank" in job.last_lines
    assert run.status["state"] == "failed"
    step = int(lab.inside("cat", str(folder / "latest")).strip().removeprefix("step_"))
    assert 1 <= step < STEPS

    lab.inside("rm", filler)
    again = run.submit()
    assert {part.state for part in run.wait(again)} == {"COMPLETED"}, run.report(again)
    assert_nothing_left(lab, again, run.run_dir)
    assert f"{run.run_dir} at step {step}, logs in" in again.output
    assert len(results(run.run_dir)) == STEPS
