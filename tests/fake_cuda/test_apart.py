"""A trainer and a generator on separate GPUs: a run from its first prompt to its end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.ranks import TESTS, launch_ranks
from helpers.tiny_run import metrics_of

from reinforce_rl.monitoring.records import read_tokens, rollout_files

SCRIPT = TESTS / "helpers/rank_scripts/apart_fake_cuda.py"
APART = (
    "trainer.devices=2",
    "placement=disaggregated",
    "generation_ranks=1",
    "trainer.precision=bf16",
)
IN_FLIGHT = ("rollout_order=finished", "inflight_updates=recompute")


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [((), (2, 3)), (("rollout_order=finished", "inflight_updates=keep"), (3,)), (IN_FLIGHT, (3,))],
    ids=["in order, and on", "cache kept", "recomputed"],
)
def test_a_run_goes_through(
    overrides: tuple[str, ...], limits: tuple[int, ...], tmp_path: Path
) -> None:
    for steps in limits:  # the second one uses the rollouts of a checkpoint
        limit = f"trainer.reinforce.max_steps={steps}"
        limits_of_run = (
            "trainer.reinforce.max_epochs=3",
            "trainer.reinforce.save_interval=1",
            limit,
        )
        done = launch_ranks(SCRIPT, 2, tmp_path, *APART, *limits_of_run, *overrides, timeout=200)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in metrics_of(tmp_path) if "train/rewards" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        for key in ("train/init_policy_kl", "train/actor_loss"):
            assert math.isfinite(line[key])
    for step, file in rollout_files(tmp_path / "run").items():
        versions = {
            version for sample in read_tokens(file) for version in sample.weight_versions or ()
        }
        assert versions
        assert versions <= set(range(max(step - 2, 0), step)), "none older than one step"
