"""Jobs of slurm/train_hetjob.sbatch: the main case and a failure; other files have the rest."""

from __future__ import annotations

import os
import signal

import pytest
from helpers.real_run import Actor, RealServer
from helpers.slurm_lab import assert_nothing_left
from helpers.slurm_run import ACTOR_COMMAND, RUN_SECONDS, SHORT, STEPS, Layout, SlurmRun, results
from helpers.tiny_run import however_cut

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]
TWO_AND_TWO = Layout(server_nodes=("rm0", "rm1"), actor_tasks=2)
TWO_STEPS = [*SHORT, "trainer.reinforce.max_steps=2", "trainer.reinforce.val_check_interval=2"]


@pytest.mark.more
def test_two_and_two_nodes_equal_the_run_without_slurm(lab, world, tmp_path):
    """The server has DP=2, the actor DP=2 and TP=2; without Slurm each has one rank."""
    run = SlurmRun(
        lab,
        world,
        tmp_path / "run",
        TWO_AND_TWO,
        [*TWO_STEPS, "model.tensor_model_parallel_size=2"],
    )
    job = run.submit()
    components = run.wait(job)
    assert {(part.state, part.exit_code) for part in components} == {("COMPLETED", "0:0")}, (
        run.report(job)
    )
    assert_nothing_left(lab, job, run.run_dir)
    assert run.status["state"] == "finished"
    assert "at step 2" in job.last_lines

    (tmp_path / "server").mkdir()
    server = RealServer(tmp_path / "server", *world.server_overrides("mean")).start()
    try:
        actor = Actor(world, tmp_path / "plain", server.port, *TWO_STEPS)
        try:
            assert actor.finish(RUN_SECONDS) == 0, actor.output
        finally:
            actor.close()
    finally:
        server.close()
    slurm_lines, plain_lines = (
        list(map(however_cut, results(folder))) for folder in (run.run_dir, tmp_path / "plain")
    )
    assert len(plain_lines) == 3
    for line, plain_line in zip(slurm_lines, plain_lines, strict=True):
        assert line == pytest.approx(plain_line, rel=1e-6, abs=1e-5)


@pytest.mark.slow
def test_a_killed_task_of_the_actor_ends_the_job_and_is_named(lab, world, tmp_path):
    run = SlurmRun(lab, world, tmp_path / "run", overrides=SHORT)
    job = run.submit()
    run.wait_for_step(job, 2)
    os.kill(run.rank(job, ACTOR_COMMAND, 1).pid, signal.SIGKILL)
    components = run.wait(job)
    assert (components[0].state, components[0].exit_code) == ("FAILED", "137:0"), run.report(job)
    assert_nothing_left(lab, job, run.run_dir)
    assert "actor rank 1 on act1" in job.last_lines
    assert "SIGKILL" in job.last_lines
    assert 1 <= run.saved_step < STEPS
    assert f"the run is at step {run.saved_step}" in job.last_lines
