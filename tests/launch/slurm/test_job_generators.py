"""A job of which two nodes only generate: one of them crashes and comes back, and results do not change."""

from __future__ import annotations

import pytest
from helpers.slurm_lab import assert_nothing_left
from helpers.slurm_run import SHORT, Layout, SlurmRun, assert_same_weights, results
from helpers.tiny_run import json_lines

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(2400)]
# a trainer on the first, a generator on each other
ONE_AND_TWO = Layout(actor_nodes=("act0", "act1", "rm1"))
STEPS = 40
APART = [
    *SHORT,
    f"trainer.reinforce.max_steps={STEPS}",
    "placement=disaggregated",
    "generation_ranks=2",
]


def test_a_node_that_generates_crashes_and_comes_back(lab, world, tmp_path):
    whole = SlurmRun(lab, world, tmp_path / "whole", ONE_AND_TWO, APART)
    job = whole.submit()
    assert {part.state for part in whole.wait(job)} == {"COMPLETED"}, whole.report(job)
    assert_nothing_left(lab, job, whole.run_dir)
    lines = json_lines(whole.run_dir / "metrics.jsonl")
    assert [line["train/staleness"] for line in lines] == [0.0] + [1.0] * (STEPS - 1)

    run = SlurmRun(lab, world, tmp_path / "run", ONE_AND_TWO, APART)
    job = run.submit()
    run.wait_for_step(job, 2)
    lab.crash("act1")
    lab.up("act1")
    components = run.wait(job)
    assert {(part.state, part.exit_code) for part in components} == {("COMPLETED", "0:0")}, (
        run.report(job)
    )
    assert components[0].restarts in (1, 2)
    assert_nothing_left(lab, job, run.run_dir)
    assert "Slurm itself requeues the job, since act1 failed" in job.output
    assert results(run.run_dir) == results(whole.run_dir)
    assert_same_weights(run.run_dir, whole.run_dir)
