"""The history of a run's jobs, and the rules by which a job is requeued."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from reinforce_rl.launch.slurm.history import Attempt, History, finished, may_requeue, newest_checkpoint, refusal
from reinforce_rl.runtime.status import STATUS_FILE, Status

FIRST = Attempt("7", 0, 100.0, 4, (("a=1",), ("b=2",)))


@pytest.mark.parametrize(
    ("restart", "most", "before", "after", "requeued", "why"),
    [
        (0, 10, 0, 1, True, "from step 0 to step 1, restart 1 of 10"),
        (9, 10, 8, 9, True, "restart 10 of 10"),
        (10, 10, 8, 9, False, "requeued 10 times, of 10"),
        (0, 0, 0, 5, False, "requeued 0 times, of 0"),
        (0, 10, 4, 4, False, "saved nothing beyond step 4"),
        (0, 10, 4, 2, False, "saved nothing beyond step 4"),  # a checkpoint was deleted
    ],
)
def test_a_job_is_requeued_while_it_gets_further(
    restart: int, most: int, before: int, after: int, requeued: bool, why: str
) -> None:
    found = may_requeue(restart=restart, max_restarts=most, step_before=before, step_after=after)
    assert found[0] is requeued
    assert why in found[1]


def test_a_job_that_gets_no_further_is_not_begun_again() -> None:
    def asked(attempts: list[Attempt], restart: int = 3, step: int = 4) -> str | None:
        return refusal(attempts, job="7", restart=restart, max_restarts=5, step=step)

    idle = [replace(FIRST, restart=restart) for restart in range(3)]
    assert asked(idle) == "3 attempts of this job began at step 4 and got no further"
    assert asked(idle[:2]) is None
    assert asked(idle, step=5) is None
    assert asked([*idle[:2], replace(FIRST, job="6")]) is None  # a new job is somebody's decision
    assert asked([], restart=6) == "the job was requeued 6 times, of 5 (REINFORCE_MAX_RESTARTS)"
    assert asked([], restart=5) is None


def test_the_newest_line_of_an_attempt_counts(tmp_path: Path) -> None:
    history = History(tmp_path / "slurm" / "history.jsonl")
    assert history.attempts() == []
    history.write(FIRST)
    second = replace(FIRST, restart=1)
    history.write(second)
    ended = replace(FIRST, end=101.0, step_after=6, reason="why", exit_code=75, requeued=True)
    history.write(ended)
    assert history.attempts() == [ended, second]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    history.write(FIRST)
    with history.path.open("a") as file:
        file.write('{"job": "8", "res')
    assert history.attempts() == [FIRST]
    second = replace(FIRST, restart=1)
    history.write(second)
    assert history.attempts() == [FIRST, second]


def test_newest_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == 0
    for name in ("step_00000004", "step_00000012", "step_00000016.part", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 12


def test_a_run_has_finished_until_its_arguments_change(tmp_path: Path) -> None:
    now, earlier = FIRST.arguments, (("a=0",), ())
    attempts = [replace(FIRST, exit_code=0, arguments=earlier), replace(FIRST, job="8", exit_code=0)]
    assert finished(tmp_path, attempts, now) is None, "there is no status"
    for state, arguments, expected in (("running", now, None), ("finished", now, True), ("finished", earlier, None)):
        (tmp_path / STATUS_FILE).write_text(json.dumps(asdict(Status(state=state, step=9))))
        found = finished(tmp_path, attempts, arguments)
        assert found == (expected and f"the run in {tmp_path} has finished, at step 9")
