"""The environment variables by which a launcher describes a rank."""

from __future__ import annotations

import socket

import pytest

from reinforce_rl.utils.job_rank import JobRank, host_of_meeting, is_first_rank, ranks_started

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_plain_python_is_the_only_rank() -> None:
    job = JobRank.of_process()
    assert job.rank == 0
    assert job.size == 1
    assert job.local_rank == 0
    assert job.host_of_first == "127.0.0.1"
    assert is_first_rank()
    assert ranks_started() is None


@pytest.mark.parametrize(
    ("local_size", "host"),
    [("4", "127.0.0.1"), ("2", "node7")],
    ids=["one machine", "two machines"],
)
def test_a_rank_of_a_launcher(
    environment: pytest.MonkeyPatch,
    local_size: str,
    host: str,
) -> None:
    values = ("3", "4", "1", local_size, "node7", "29500")
    for name, value in zip(NAMES, values, strict=True):
        environment.setenv(name, value)
    job = JobRank.of_process()
    assert job.rank == 3
    assert job.size == 4
    assert job.local_rank == 1
    assert job.meeting == "node7:29500"
    assert job.host_of_first == host
    assert job.variables() == dict(zip(NAMES, values, strict=True))
    assert not is_first_rank()
    assert ranks_started() == "4"
    assert host_of_meeting() == "node7"


def test_an_address_of_something_else_is_no_meeting(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_ADDR", "node7")
    assert host_of_meeting() is None


def test_ranks_without_an_address_are_asked_by_name(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("WORLD_SIZE", "2")
    assert JobRank.of_process().host_of_first == socket.gethostname()


def test_a_port_of_something_else_does_not_matter(environment: pytest.MonkeyPatch) -> None:
    """Kubernetes sets such a variable if a service is named master."""
    environment.setenv("MASTER_PORT", "tcp://10.0.0.1:80")
    assert JobRank.of_process().host_of_first == "127.0.0.1"


TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
}


def test_a_task_of_a_step_of_slurm() -> None:
    assert JobRank.of_step(TASK) == JobRank(rank=5, size=8, local_rank=1, local_size=4)


@pytest.mark.parametrize("name", TASK)
def test_what_slurm_starts_outside_of_a_step_is_no_rank(name: str) -> None:
    assert JobRank.of_step({key: TASK[key] for key in TASK if key != name}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_launcher_within_a_step_says_more(name: str) -> None:
    assert JobRank.of_step({**TASK, name: "1"}) is None
