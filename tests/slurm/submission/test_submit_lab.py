"""submit.py against a real Slurm: what it says of the nodes, and a chain of two jobs that train a tiny model."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.real_run import World, environment
from helpers.slurm_lab import Job
from helpers.slurm_run import RUN_SECONDS, SHORT
from helpers.tiny_run import json_lines
from rich.console import Console

from reinforce_rl.launch.slurm.submission.submit import main

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
STEPS = 2


@pytest.fixture
def in_lab(lab, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(lab.folder / "slurm.conf"))


def words_of(world: World, run_dir: Path, *words: str) -> list[str]:
    actor = world.actor_overrides(run_dir, *SHORT, f"trainer.reinforce.max_steps={STEPS}")
    return [*words, *actor, "--", *world.server_overrides("mean")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--servers=2", "trainer.num_nodes=2", "trainer.devices=4"], "No fault was found"),
        (["--servers=2", "trainer.num_nodes=3"], "fit singly, but not together"),
        (["trainer.devices=9"], "act0, act1, rm0, rm1: 8 CPUs"),
        (["--partition=nowhere"], "partition nowhere has no nodes; expected --partition to be of batch"),
        (["--server-nodelist=rm[0-1]"], "nodelist of the reward server has 2 nodes, and it gets 1"),
        (
            ["--exclude=rm[0-1],act0"],
            "the actor 1 of act1, and Slurm gives no node to both; expected 2 nodes, found 1",
        ),
        (["--gpus-per-node=h100:1"], "GPUs none"),
        (["--actor-sbatch-arg=--nonsense"], "sbatch --test-only refuses the component of the actor: sbatch: unrec"),
    ],
)
def test_what_is_told_of_the_cluster(in_lab, world, tmp_path, words, expected):
    out = io.StringIO()
    overrides = ["model.reinforce.num_rollout_samples=36", "model.reinforce.rollout_micro_batch_size=36"]
    argv = words_of(world, tmp_path / "run", "--dry-run", *words)
    split = argv.index("--")
    main([*argv[:split], *overrides, *argv[split:]], Console(file=out, width=110, soft_wrap=True))
    assert expected in out.getvalue()


@pytest.mark.slow
def test_a_chain_of_two_jobs(lab, in_lab, world, tmp_path):
    """The first one trains, the second one finds the run finished."""
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    run_dir = tmp_path / "run"
    options = [
        "--chain=2",
        "--sbatch-arg=--hold",
        "--time=20",
        "--server-nodelist=rm0",
        "--actor-nodelist=act0",
        "trainer.devices=2",
    ]
    command = [sys.executable, str(ROOT / "slurm" / "submit.py"), *words_of(world, run_dir, *options)]

    def submit() -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**environment(), "SLURM_CONF": str(conf)}
        )
        assert done.returncode == expected_code, done.stdout + done.stderr
        return done.stdout + done.stderr

    conf, expected_code = lab.folder / "slurm.conf", 0
    found = re.search(r"Submitted: (\d+) then (\d+)", submit())
    assert found
    first, second = (Job(int(number), run_dir / "slurm" / f"{number}.out") for number in found.groups())
    expected_code = 1
    assert f"is in the queue already: {first.id} (" in submit()
    for job in (first, second):
        for component in lab.components(job):
            lab.command("scontrol", "release", str(component.id))
        components = lab.wait(job, RUN_SECONDS)
        assert {(part.state, part.exit_code) for part in components} == {("COMPLETED", "0:0")}, job.output
    assert f"the run stands at step {STEPS}" in first.last_lines
    assert f"has finished, at step {STEPS}; nothing was started" in second.last_lines
    assert [line["step"] for line in json_lines(run_dir / "metrics.jsonl")] == [1, 2]
    expected_code = 0
    assert f"has finished, at step {STEPS}. Nothing was submitted." in submit()
