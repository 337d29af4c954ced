"""Signals to steps are retried and bounded; Slurm's commands are fakes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.fake_slurm import write_commands
from helpers.toy_server import wait_for

from reinforce_rl.launch.slurm import attempt
from reinforce_rl.launch.slurm.attempt import drain, end_stale_steps
from reinforce_rl.utils.slurm_commands import SlurmCallError


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    commands = write_commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "home"))
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    for group, job in enumerate(("7", "8")):
        monkeypatch.setenv(f"SLURM_JOB_ID_HET_GROUP_{group}", job)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(attempt, "say", lines.append)
    return lines


@contextlib.contextmanager
def step(home: Path, when_asked: str, name: str = "actor") -> Iterator[subprocess.Popen[bytes]]:
    """Run a step with an action at SIGTERM; its file is its entry in the list of steps."""
    file = home / f"step-{name}"
    action = when_asked.replace("FILE", str(file))
    script = (
        f"trap '{action}' TERM; echo $$ >{file}.new; mv {file}.new {file}\n"
        f"while :; do sleep 0.1; done"
    )
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as process:
        try:
            # the step may have ended already
            assert wait_for(lambda: file.exists() or process.poll() is not None, 20)
            yield process
        finally:
            process.kill()
            file.unlink(missing_ok=True)


ENDS = "rm FILE; exit 0"


def test_a_stale_step_that_ends_when_it_is_asked(home, said):
    with step(home, ENDS) as process:
        end_stale_steps(20.0)
        assert process.wait(20) == 0
    assert said == ["actor of an earlier attempt still runs, as step 7.actor; it is asked to end"]


def test_a_stale_step_that_does_not_is_killed(home, monkeypatch):
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if "killed" in text:
            assert process.wait(20) == -signal.SIGKILL
            (home / "step-actor").unlink()

    monkeypatch.setattr(attempt, "say", say)
    with step(home, ":") as process:
        end_stale_steps(1.0)
    assert lines[1:] == ["actor of an earlier attempt still runs, as step 7.actor; it is killed"]


def test_a_stale_step_that_outlives_even_that_is_an_error(home, said, monkeypatch):
    monkeypatch.setattr(attempt, "KILL_SECONDS", 1.0)
    (home / "step-rm-0").write_text("")
    with pytest.raises(SlurmCallError, match=r"cannot end step 7\.rm-0 \(rm-0\)"):
        end_stale_steps(1.0)
    assert len(said) == 2


def test_other_steps_are_left_alone(home, said):
    (home / "step-batch").write_text("")
    for name in ("bash", "actor-of-mine", "rm-1x"):
        (home / f"step-{name}").write_text("")
    end_stale_steps(2.0)
    assert said == []


def test_all_steps_of_a_kind_are_drained_and_no_other(home, said):
    with (
        step(home, ENDS, "rm-0") as first,
        step(home, ENDS, "rm-1") as second,
        step(home, ENDS) as actor,
    ):
        assert drain("TERM", 20.0, "rm-", [])
        assert first.wait(20) == second.wait(20) == 0
        assert actor.poll() is None
    assert said == []


def test_a_step_that_does_not_end_in_time_is_killed(home, said, monkeypatch):
    monkeypatch.setattr(attempt, "KILL_SECONDS", 1.0)
    with step(home, ":") as process:
        # Slurm forgets a step when its processes have ended
        assert not drain("TERM", 1.0, "actor", [process.pid])
        assert process.wait(20) == -signal.SIGKILL
    assert said == ["actor has not ended in time; killing it"]


@pytest.mark.more
def test_a_step_that_has_no_number_yet_gets_the_signal_later(home, said, monkeypatch):
    monkeypatch.setattr(attempt, "RETRY_SECONDS", 0.5)
    with subprocess.Popen(["sleep", "3"]) as srun, ThreadPoolExecutor() as threads:
        drained = threads.submit(drain, "TERM", 60.0, "actor", [srun.pid])
        with step(home, ENDS) as process:
            assert process.wait(30) == 0
            assert srun.wait(30) == 0
            assert drained.result(30)
    assert said == []


def test_a_controller_that_does_not_answer_is_asked_again(home, said, monkeypatch):
    monkeypatch.setattr(attempt, "RETRY_SECONDS", 0.5)
    answers = iter([SlurmCallError(["squeue"], "busy"), SlurmCallError(["squeue"], "busy")])
    real = attempt.steps_of

    def steps_of(pattern: str) -> dict[str, str]:
        for error in answers:
            raise error
        return real(pattern)

    monkeypatch.setattr(attempt, "steps_of", steps_of)
    with step(home, ENDS) as process, ThreadPoolExecutor() as threads:
        drained = threads.submit(drain, "TERM", 60.0, "actor", [process.pid])
        assert process.wait(60) == 0
        assert drained.result(60)
    assert [line.partition(":")[0] for line in said] == ["cannot signal actor, trying again"] * 2


@pytest.mark.parametrize(
    ("number", "left", "expected"),
    [
        (signal.SIGTERM, 600, 50.0),
        # tasks other than the actor, which ended before
        (signal.SIGTERM, 60, 30.0),
        (signal.SIGTERM, 25, 10.0),
        # SIGUSR1 comes before the time limit: all remaining time, minus the time for a requeue
        (signal.SIGUSR1, 600, 570.0),
        (signal.SIGUSR1, 25, 10.0),
        (signal.SIGUSR1, "unlimited", 50.0),
    ],
)
def test_how_long_a_step_may_take(home, monkeypatch, number, left, expected):
    monkeypatch.setenv("FAKE_SECONDS_LEFT", str(left))
    assert attempt._allowed(number, 50.0) == pytest.approx(expected, abs=3)


def refuse(*_arguments: object) -> NoReturn:
    raise SlurmCallError(["squeue"], "busy")


def test_how_long_a_step_may_take_while_the_controller_is_silent(home, monkeypatch):
    monkeypatch.setattr(attempt, "job_times", refuse)
    assert attempt._allowed(signal.SIGUSR1, 50.0) == 50.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 600))
    assert attempt._allowed(signal.SIGUSR1, 50.0) == pytest.approx(570.0, abs=3)


def test_steps_whose_sruns_have_ended_are_not_waited_for_while_the_controller_is_silent(
    home, said, monkeypatch
):
    monkeypatch.setattr(attempt, "steps_of", refuse)
    ended = subprocess.Popen(["true"])
    ended.wait(20)
    start = time.monotonic()
    assert drain("TERM", 60.0, "actor", [ended.pid])
    assert time.monotonic() - start < 30
    assert said == []


@pytest.mark.more
def test_a_step_whose_srun_has_ended_is_looked_for_once_a_second(home, said, monkeypatch):
    looks: list[float] = []

    def steps_of(pattern: str) -> dict[str, str]:
        looks.append(time.monotonic())
        return {"7.1": "actor"} if looks[-1] - looks[0] < 3.5 else {}

    monkeypatch.setattr(attempt, "steps_of", steps_of)
    assert drain("TERM", 60.0, "actor", [])
    assert 2 <= len(looks) <= 5


def test_a_process_of_another_user_is_not_an_srun(home, monkeypatch):
    def kill(process: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", kill)
    assert not attempt._runs(1)


def test_the_times_of_a_job_as_a_shell_reads_them(home, capsys, monkeypatch):
    end = int(time.time()) + 600
    exported = attempt.times().split()
    assert exported[:2] == ["export", "SLURM_JOB_START_TIME=1000"]
    assert int(exported[2].removeprefix("SLURM_JOB_END_TIME=")) == pytest.approx(end, abs=3)
    monkeypatch.setenv("FAKE_SECONDS_LEFT", "unlimited")
    assert attempt.times() == "export SLURM_JOB_START_TIME=1000"
    monkeypatch.setattr(attempt, "job_times", refuse)
    assert attempt.times() == ""
    assert "busy" in capsys.readouterr().err


def test_an_actor_whose_tasks_met_and_left_no_record(home, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("REINFORCE_RUN_DIR", str(tmp_path))
    folder = attempt.CurrentJob()
    folder.attempt.mkdir(parents=True)
    facts = attempt._parser().parse_args(["end"])
    missed = attempt._judge(folder, facts)
    assert (missed.code, missed.log_of) == (1, "")
    assert "could not start" in missed.text
    (folder.attempt / "rendezvous-actor.json").touch()
    full = attempt._judge(folder, facts)
    assert (full.code, full.log_of) == (1, "actor")
    assert "left no record" in full.text
