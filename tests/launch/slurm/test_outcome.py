"""Ends of tasks and attempts, which task failed first, and the rules for requeueing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from helpers.errors import check_fault

from reinforce_rl.errors import Fault
from reinforce_rl.launch.slurm.outcome import (
    Attempt,
    Outcome,
    TaskEnd,
    failed_nodes,
    finished,
    first_failed,
    judge,
    last_lines,
    may_requeue,
    read_attempts,
    read_ends,
    read_lost,
    record,
    refusal,
    write_attempt,
)
from reinforce_rl.runtime.status import STATUS_FILE, Status


def end_of(task: int, code: int, time: float = 0.0, component: str = "actor") -> TaskEnd:
    return TaskEnd(component, task, f"node{task}", code, time)


def test_records_are_read_again(tmp_path: Path) -> None:
    ends = [replace(end_of(1, 1), reason="why"), end_of(0, 137, component="rm-0")]
    for end in ends:
        record(tmp_path, end)
    assert read_ends(tmp_path) == ends
    assert read_ends(tmp_path / "nothing") == []


def test_tasks_without_a_record_are_taken_from_srun(tmp_path: Path) -> None:
    record(tmp_path, end_of(1, 76))
    (tmp_path / "actor.srun").write_text(
        "srun: error: act0: tasks 0-1: Exited with exit code 1\n"
        "srun: error: act1: task 3: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=7.1\n"
    )
    (tmp_path / "rm-0.srun").write_text("slurmstepd: error: *** STEP 7.0 CANCELLED ***\n")
    (tmp_path / "gen-1.2.srun").write_text("srun: error: gen0: task 0: Terminated\n")
    lost = [(end.component, end.task, end.host, end.code) for end in read_lost(tmp_path)]
    assert lost == [("actor", 0, "act0", 1), ("actor", 3, "act1", 137), ("gen-1.2", 0, "gen0", 137)]
    assert all(end.reason for end in read_lost(tmp_path))


def test_of_lost_tasks_the_first_to_be_missed_comes_first(tmp_path: Path) -> None:
    for name, missed in (("actor", 20), ("rm-0", 20), ("rm-1", 10)):
        path = tmp_path / f"{name}.srun"
        path.write_text("srun: error: node0: task 0: Killed\n")
        os.utime(path, (missed, missed))
    assert [end.component for end in read_lost(tmp_path)] == ["rm-1", "rm-0", "actor"]


def test_nodes_that_srun_says_have_failed(tmp_path: Path) -> None:
    assert failed_nodes(tmp_path) == []
    for name in ("rm-0", "rm-1"):
        (tmp_path / f"{name}.srun").write_text("srun: error: Node failure on act1\n")
    assert failed_nodes(tmp_path) == ["act1"]


def test_texts() -> None:
    assert end_of(2, 1).name == "actor rank 2 on node2"
    assert "was ended by SIGKILL (exit code 137) at " in str(end_of(2, 137))
    assert str(replace(end_of(2, 1), reason="because")).endswith(": because")


def test_the_first_in_time_failed_first() -> None:
    ends = [end_of(0, 76, 12.0), end_of(1, 0, 1.0), end_of(2, 137, 10.0), end_of(3, 1, 11.0)]
    assert first_failed(ends, [], (0,)) == ends[2]
    assert first_failed([end_of(0, 0), end_of(1, 0)], [], (0,)) is None
    assert first_failed([end_of(0, 75, 1.0), end_of(1, 1, 2.0)], [], (0, 75)) == end_of(1, 1, 2.0)


def test_a_task_without_a_word_comes_before_those_that_missed_it() -> None:
    lost = [end_of(2, 137, 99.0)]
    assert first_failed([end_of(0, 76, 1.0), end_of(1, 143, 2.0)], lost, (0,)) == lost[0]
    assert first_failed([], lost, (0,)) == lost[0]
    failed = end_of(0, 1, 1.0)  # its own error: the later ones were killed with its wrapper
    assert first_failed([failed], lost, (0,)) == failed


def judged(actor: list[TaskEnd], servers: list[TaskEnd] | None = None, **values: object) -> Outcome:
    options: dict[str, object] = {"unasked": "", "signalled": None, **values}
    lost = options.pop("lost", [])
    return judge(actor, servers or [], lost, **options)  # type: ignore[arg-type]


def test_a_run_that_has_finished() -> None:
    ending = judged([end_of(0, 0), end_of(1, 0)], [end_of(0, 137, component="rm-0")])
    assert ending.code == 0  # the server may die when it is stopped


def test_a_run_that_was_stopped() -> None:
    for codes, signalled in (
        ((75, 75), None),
        ((75, 75), signal.SIGUSR1),
        ((75, 143), signal.SIGTERM),
    ):
        ending = judged(
            [end_of(task, code) for task, code in enumerate(codes)], signalled=signalled
        )
        assert (ending.code, ending.first) == (75, None)
    assert judged([end_of(0, 75), end_of(1, 143)]).code == 143  # nobody had signalled it


def test_an_actor_that_does_not_save_in_time() -> None:
    ending = judged([end_of(0, 137)], signalled=signal.SIGUSR1, killed=True)
    assert ending.code == 75
    assert "--signal" in ending.text


def test_a_task_that_failed() -> None:
    ends = [end_of(0, 76, 5.0), end_of(1, 137, 3.0)]
    ending = judged(ends)
    assert (ending.code, ending.first, ending.log_of) == (137, ends[1], "actor")
    assert ending.text.startswith("first to fail: actor rank 1 on node1 was ended by SIGKILL")
    assert judged(ends, signalled=signal.SIGUSR1).code == 137


def test_a_server_that_failed_names_the_job() -> None:
    servers = [end_of(0, 76, 4.0, "rm-0"), end_of(1, 137, 3.0, "rm-0")]
    ending = judged([end_of(0, 75, 9.0)], servers, unasked="rm-0")
    assert (ending.code, ending.log_of) == (137, "rm-0")
    assert "rm-0 rank 1 on node1" in ending.text


def test_a_server_that_ended_well_without_being_asked() -> None:
    ending = judged([end_of(0, 75)], [end_of(0, 0, component="rm-0")], unasked="rm-0")
    assert (ending.code, ending.text) == (1, "rm-0 ended without being asked to")


def test_a_server_that_was_lost_before_is_not_why_the_actor_failed() -> None:
    actor = end_of(0, 1, 9.0)
    server = end_of(0, 137, 3.0, "rm-1")
    assert judged([actor], [server]).first == actor
    assert judged([actor], [], lost=[server]).first == actor
    assert judged([end_of(0, 0)], [], lost=[server]).code == 0


def test_a_step_that_srun_could_not_start() -> None:
    ending = judged([])
    assert ending.code == 1
    assert "could not start actor" in ending.text


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
def test_a_job_is_requeued_while_it_makes_progress(
    restart: int, most: int, before: int, after: int, requeued: bool, why: str
) -> None:
    may, reason = may_requeue(
        restart=restart, max_restarts=most, step_before=before, step_after=after
    )
    assert may is requeued
    assert why in reason


def test_a_job_without_progress_is_not_restarted() -> None:
    def asked(attempts: list[Attempt], restart: int = 3, step: int = 4) -> Fault | None:
        return refusal(attempts, job="7", restart=restart, max_restarts=5, step=step)

    idle = [replace(FIRST, restart=restart) for restart in range(3)]
    fault = asked(idle)
    assert fault is not None
    check_fault([fault], "slurm.job.no_progress", "3 attempts", "step 4")
    assert asked(idle[:2]) is None
    assert asked(idle, step=5) is None
    assert asked([*idle[:2], replace(FIRST, job="6")]) is None  # a new job is a person's decision
    fault = asked([], restart=6)
    assert fault is not None
    check_fault([fault], "slurm.job.too_many_restarts", 6, 5, "REINFORCE_MAX_RESTARTS")
    assert asked([], restart=5) is None


def test_the_newest_line_of_an_attempt_counts(tmp_path: Path) -> None:
    assert read_attempts(tmp_path / "slurm") == []
    second = replace(FIRST, restart=1)
    ended = replace(
        FIRST,
        end=101.0,
        step_after=6,
        reason="why",
        exit_code=75,
        requeued=True,
    )
    for attempt in (FIRST, second, ended):
        write_attempt(tmp_path / "slurm", attempt)
    assert read_attempts(tmp_path / "slurm") == [ended, second]


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    write_attempt(tmp_path, FIRST)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"job": "8", "res')
    assert read_attempts(tmp_path) == [FIRST]
    second = replace(FIRST, restart=1)
    write_attempt(tmp_path, second)
    assert read_attempts(tmp_path) == [FIRST, second]


def test_the_last_lines_of_a_log_are_without_warnings(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    warning = "0: /lib/x.py:3: UserWarning: old\n0:   warnings.warn(\n"
    log.write_text(f"0: first\n{warning}1: Error: it fails in\n1:   warned(5)\n")
    expected = [
        f"the last lines of {log}:",
        "  | 0: first",
        "  | 1: Error: it fails in",
        "  | 1:   warned(5)",
    ]
    assert last_lines(log, 3).splitlines() == expected


def test_a_run_has_finished_until_its_arguments_change(tmp_path: Path) -> None:
    now = FIRST.arguments
    earlier = (("a=0",), ())
    attempts = [
        replace(FIRST, exit_code=0, arguments=earlier),
        replace(FIRST, job="8", exit_code=0),
    ]
    assert finished(tmp_path, attempts, now) is None, "there is no status"
    for state, arguments, expected in (
        ("running", now, None),
        ("finished", now, True),
        ("finished", earlier, None),
    ):
        (tmp_path / STATUS_FILE).write_text(json.dumps(asdict(Status(state=state, step=9))))
        message = finished(tmp_path, attempts, arguments)
        assert message == (expected and f"the run in {tmp_path} has finished, at step 9")
