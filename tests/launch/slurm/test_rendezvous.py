"""Tasks of a Slurm step that meet as ranks through a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.errors import printed_keys, raises_error

from reinforce_rl.launch.slurm import rendezvous
from reinforce_rl.launch.slurm.rendezvous import (
    RENDEZVOUS_VARIABLE,
    meet_ranks_of_step,
)
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.net import claim_ports

ROOT = Path(__file__).parents[3]


def variables_of_task(file: Path | str, number: int, **others: str) -> dict[str, str]:
    """Return Slurm's variables of a task in a step of two nodes with two tasks each."""
    return {
        RENDEZVOUS_VARIABLE: str(file),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number % 2),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        **others,
    }


def test_the_tasks_of_a_step_meet_at_the_first(tmp_path: Path) -> None:
    file = tmp_path / "attempt" / "actor.json"
    with ThreadPoolExecutor() as threads:
        others = [
            threads.submit(meet_ranks_of_step, variables_of_task(file, number))
            for number in (3, 1, 2)
        ]
        time.sleep(0.5)
        first = meet_ranks_of_step(variables_of_task(file, 0, SLURM_CPUS_PER_TASK="8"))
        third, second, _ = [other.result(30) for other in others]
    expected = JobRank(
        0,
        4,
        0,
        2,
        first["MASTER_ADDR"],
        first["MASTER_PORT"],
    )
    assert first == expected.variables() | {"OMP_NUM_THREADS": "8"}
    assert third == {**first, "RANK": "3", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1"}
    assert second["RANK"] == "1"
    assert second["LOCAL_RANK"] == "1"
    with claim_ports(1, str(file)) as ports:  # the command tries the same port first
        assert ports != [int(first["MASTER_PORT"])]


@pytest.mark.more
def test_a_file_of_an_earlier_step_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "STEP_SECONDS", 1.0)
    file = tmp_path / "actor.json"
    meet_ranks_of_step(variables_of_task(file, 0))
    for changed in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"):
        later = variables_of_task(file, 1, **{changed: "8"})
        with raises_error("slurm.rendezvous.no_address", file, "1 s"):
            meet_ranks_of_step(later)
    assert meet_ranks_of_step(variables_of_task(file, 1))["RANK"] == "1"


def test_a_process_that_is_not_asked_to_meet_is_not_a_rank(tmp_path: Path) -> None:
    task = variables_of_task(tmp_path / "actor.json", 0)
    assert meet_ranks_of_step({**task, RENDEZVOUS_VARIABLE: ""}) == {}
    assert meet_ranks_of_step({**task, "RANK": "0"}) == {}
    assert meet_ranks_of_step({RENDEZVOUS_VARIABLE: task[RENDEZVOUS_VARIABLE]}) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "generate", "serve", "train-rm"])
def test_a_command_becomes_a_rank_of_its_step(tmp_path: Path, command: str) -> None:
    """If the folder cannot be created, rank 0 fails instead of running as the only rank."""
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "reinforce_rl", command, "--help"],
        env={
            **{name: value for name, value in os.environ.items() if name not in ("RANK",)},
            **variables_of_task(tmp_path / "file" / "actor.json", 0),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    assert printed_keys(done.stderr) == ["slurm.rendezvous.not_written"]
