"""submit.py against a real Slurm: its checks of nodes, and a chain of two training jobs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import check_fault, printed_keys
from helpers.real_run import environment
from helpers.slurm_lab import Job
from helpers.slurm_run import RUN_SECONDS, SHORT
from helpers.tiny_run import json_lines

from reinforce_rl.launch.slurm.options import ComponentOptions, parse_options
from reinforce_rl.launch.slurm.plan import Component, JobPlan
from reinforce_rl.launch.slurm.settings import Settings
from reinforce_rl.launch.slurm.submit import ask_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.more, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
STEPS = 2


@pytest.fixture(scope="module")
def slurm_conf(lab) -> Path:
    """Return the slurm.conf of a lab with partitions; act0 and act1 have the feature gpu.

    The partitions start nothing.
    """
    lab.command("scontrol", "update", "NodeName=act[0-1]", "Features=gpu")
    lab.command("scontrol", "create", "PartitionName=off", "Nodes=ALL", "State=DOWN")
    lab.command("scontrol", "create", "PartitionName=short", "Nodes=ALL", "MaxTime=00:05:00")
    return lab.folder / "slurm.conf"


def component(nodes: int, tasks: int = 1, gpus: str | None = None, **options) -> Component:
    return Component(
        "actor",
        "actor",
        nodes,
        tasks,
        None,
        gpus,
        ComponentOptions(**options),
    )


UNAVAILABLE = "allocation failure: Requested node configuration is not available; use fewer nodes"
REFUSES = "slurm.sbatch.refuses"
UNUSABLE = "slurm.partition.unusable"
DO_NOT_FIT = "slurm.components.do_not_fit"


@pytest.mark.parametrize(
    ("servers", "server_options", "actor", "key", "value"),
    [
        (2, {}, component(2, 4), "", ""),
        (1, {}, component(1, constraint="gpu"), "", ""),
        (1, {}, component(5), REFUSES, f"(--nodes=5 --ntasks-per-node=1): {UNAVAILABLE}"),
        (1, {}, component(1, 9), REFUSES, f"actor (--nodes=1 --ntasks-per-node=9): {UNAVAILABLE}"),
        (1, {}, component(1, mem="99G"), REFUSES, UNAVAILABLE),
        (1, {}, component(1, gpus="h100:1"), REFUSES, "Invalid generic resource (gres)"),
        (1, {}, component(1, constraint="nothing"), REFUSES, "Invalid feature specification"),
        (1, {}, component(1, nodelist="nobody"), REFUSES, "Invalid node name specified"),
        (
            1,
            {"nodelist": "rm[0-1]"},
            component(1),
            REFUSES,
            "reward server (--nodelist=rm[0-1] --nodes=1",
        ),
        (1, {}, component(1, sbatch_args=("--nonsense",)), REFUSES, "option '--nonsense'"),
        (1, {}, component(1, partition="nowhere"), "slurm.partition.unknown", "batch, off, short"),
        (1, {"partition": "off"}, component(1), UNUSABLE, "partition off is not up"),
        (
            1,
            {},
            component(1, partition="short"),
            UNUSABLE,
            "short allows 300 s, the job asks for 600",
        ),
        (2, {}, component(3), DO_NOT_FIT, "the reward server would get act[0-1] and the"),
        (1, {"exclude": "rm[0-1],act0"}, component(1, exclude="rm[0-1],act0"), DO_NOT_FIT, "1 + 1"),
        (1, {"nodelist": "rm0"}, component(1, nodelist="rm0"), DO_NOT_FIT, "rm0 and the actor rm0"),
        (1, {}, component(2, constraint="gpu"), "slurm.components.take_nodes", "the actor"),
        (1, {"exclude": "act[0-1]"}, component(2, constraint="gpu"), "", ""),
    ],
)
def test_checks_of_the_cluster(
    slurm_conf, monkeypatch, tmp_path, servers, server_options, actor, key, value
):
    monkeypatch.setenv("SLURM_CONF", str(slurm_conf))
    server = Component(
        "reward server", "rm", servers, 1, options=ComponentOptions(**server_options)
    )
    plan = JobPlan(
        server, actor, parse_options(["--time=10"], {}), Settings(tmp_path, ROOT), 300, {}
    )
    answer = ask_cluster(tmp_path, plan, 0 if key else 4001, os.environ)
    assert bool(answer.faults) == bool(key)
    if key:
        check_fault(answer.faults, key, value)
    assert ("nodes with 4000 MB" in "".join(answer.warnings)) == (not key)
    assert answer.unchecked == []


@pytest.mark.slow
def test_a_chain_of_two_jobs(lab, world, tmp_path):
    """The first job trains, the second reports that the run has finished."""
    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    run_dir = tmp_path / "run"
    options = [
        "--chain=2",
        "--sbatch-arg=--hold",
        "--time=20",
        "--server-nodelist=rm0",
        "--actor-nodelist=act0",
    ]
    actor = world.actor_overrides(run_dir, *SHORT, f"trainer.reinforce.max_steps={STEPS}")
    words = [*options, "trainer.devices=2", *actor, "--", *world.server_overrides("mean")]
    command = [sys.executable, str(ROOT / "slurm" / "submit.py"), *words]

    def submit() -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            env={**environment(), "SLURM_CONF": str(conf)},
        )
        assert done.returncode == expected_code, done.stdout + done.stderr
        return done.stdout + done.stderr

    conf = lab.folder / "slurm.conf"
    expected_code = 0
    match = re.search(r"Submitted: (\d+) then (\d+)", submit())
    assert match
    first, second = (
        Job(int(number), run_dir / "slurm" / f"{number}.out") for number in match.groups()
    )
    expected_code = 1
    text = submit()
    assert printed_keys(text) == ["slurm.queue.same_run"]
    assert f" {first.id} (" in text
    for job in (first, second):
        for component in lab.components(job):
            lab.command("scontrol", "release", str(component.id))
        components = lab.wait(job, RUN_SECONDS)
        assert {(part.state, part.exit_code) for part in components} == {("COMPLETED", "0:0")}, (
            job.output
        )
    assert f"the run is at step {STEPS}" in first.last_lines
    assert f"has finished, at step {STEPS}; nothing was started" in second.last_lines
    assert [line["step"] for line in json_lines(run_dir / "metrics.jsonl")] == [1, 2]
    expected_code = 0
    assert f"has finished, at step {STEPS}. Nothing was submitted." in submit()
