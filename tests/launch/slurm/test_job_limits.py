"""A time limit that is reached, and bounds on the number of requeues."""

from __future__ import annotations

import pytest
from helpers.slurm_lab import assert_nothing_left
from helpers.slurm_run import ACTOR_COMMAND, SHORT, SlurmRun
from helpers.toy_server import wait_for

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3600)]
ENDLESS = [*SHORT, "trainer.reinforce.max_epochs=10000", "trainer.reinforce.max_steps=100000"]


@pytest.fixture
def run(lab, world, tmp_path) -> SlurmRun:
    return SlurmRun(lab, world, tmp_path / "run", overrides=ENDLESS)


def test_a_time_limit_saves_in_time_requeues_and_resumes(lab, run):
    """The signal comes 60 to 90 s before the end of five minutes."""
    job = run.submit(options=["--time=5", "--signal=B:USR1@60"])
    run.wait_for_step(job, 1, seconds=230)
    lab.wait_for_attempt(job, 1, 400)
    step = run.saved_step
    assert f"requeued: from step 0 to step {step}" in job.output
    assert run.status["state"] == "stopped"
    run.wait_for_step(job, step + 1)
    lab.cancel(job)
    components = run.wait(job)
    assert {(part.state, part.restarts) for part in components} == {("CANCELLED", 1)}, run.report(
        job
    )
    assert_nothing_left(lab, job, run.run_dir)
    assert run.saved_step > step
    assert run.status["step"] == run.saved_step


def test_a_job_ends_for_good_after_its_last_restart(lab, run):
    job = run.submit(REINFORCE_MAX_RESTARTS="0")
    run.wait_for_step(job, 1)
    lab.signal(job, "USR1")
    components = run.wait(job)
    assert {(part.state, part.restarts) for part in components} == {("FAILED", 0)}, run.report(job)
    assert components[0].exit_code == "75:0"
    assert_nothing_left(lab, job, run.run_dir)
    assert "not requeued: it was requeued 0 times, of 0 (REINFORCE_MAX_RESTARTS)" in job.last_lines
    assert run.saved_step >= 1


def test_a_job_that_makes_no_progress_is_not_requeued(lab, run):
    job = run.submit()
    assert wait_for(lambda: 1 in run.ranks(job, ACTOR_COMMAND), 300), run.report(job)
    lab.signal(job, "USR1")
    components = run.wait(job)
    assert (components[0].state, components[0].exit_code, components[0].restarts) == (
        "FAILED",
        "75:0",
        0,
    )
    assert_nothing_left(lab, job, run.run_dir)
    assert "this attempt saved nothing beyond step 0" in job.last_lines
    assert run.step < 1
