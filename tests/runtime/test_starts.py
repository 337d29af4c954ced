"""A job that Slurm restarts at the same checkpoint several times gives up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.errors import raises_error

from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.starts import STARTS_FILE, count_start
from reinforce_rl.runtime.status import StatusFile, read_status
from reinforce_rl.runtime.stop import StopRequest


def start(folder: Path, restart: int, step: int = 4, job: str = "7") -> None:
    variables = {"SLURM_JOB_ID": job}
    if restart:  # Slurm sets it for a job that it has requeued
        variables["SLURM_RESTART_COUNT"] = str(restart)
    count_start(folder, step, variables)


def test_the_fourth_start_at_one_checkpoint_is_refused(tmp_path: Path) -> None:
    for restart in range(3):
        start(tmp_path, restart)
    with raises_error("slurm.job.no_progress", "3 attempts", "step 4"):
        start(tmp_path, 3)
    with raises_error("slurm.job.no_progress", "3 attempts"):
        start(tmp_path, 3)  # a refused one does not count
    start(tmp_path, 2)  # another program of the same start


def test_whatever_gets_further_begins_to_count_anew(tmp_path: Path) -> None:
    for restart in range(3):
        start(tmp_path, restart)
    start(tmp_path, 3, step=5)
    for restart in range(4, 6):
        start(tmp_path, restart, step=5)
    with raises_error("slurm.job.no_progress", "step 5"):
        start(tmp_path, 6, step=5)


def test_a_new_job_is_somebodys_decision(tmp_path: Path) -> None:
    for restart in range(3):
        start(tmp_path, restart)
    start(tmp_path, 0, job="8")


def test_a_person_starts_a_trainer_as_often_as_they_like(tmp_path: Path) -> None:
    for _ in range(5):
        count_start(tmp_path, 0, {})
    assert not list(tmp_path.iterdir())
    for _ in range(5):
        start(tmp_path, 0)  # in one allocation


@pytest.mark.parametrize("text", ["", "[]", "{", '{"job": "7", "step": 4, "restarts": "x"}'])
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / STARTS_FILE).write_text(text)
    start(tmp_path, 3)
    starts = json.loads((tmp_path / STARTS_FILE).read_text())
    assert starts == {"job": "7", "step": 4, "restarts": [3]}


def test_a_run_is_refused_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(restart: int, *, writes_status: bool = True) -> None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        status = StatusFile(tmp_path, enabled=writes_status)
        with RunControl(tmp_path, StopRequest(), status).running():
            status.progress(9, 12)

    for restart in range(3):
        run(restart)
    before = read_status(tmp_path)
    with raises_error("slurm.job.no_progress", "step 0"):
        run(3)
    assert read_status(tmp_path) == before
    run(3, writes_status=False)  # another rank
