"""When a run stops: signals during shutdown, and steps that still fit into the remaining time."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from helpers.slurm_client import SlurmClient

from reinforce_rl.errors import EXIT_STOPPED
from reinforce_rl.runtime import stop as run_timer
from reinforce_rl.runtime.stop import (
    LAUNCHER_SECONDS,
    MARGIN_SECONDS,
    STOP_SIGNALS,
    RunTimer,
    StopNow,
    StopRequest,
    first_save_seconds,
    with_margin,
)
from reinforce_rl.trainer.run import times_of_job
from reinforce_rl.utils.job_time import JobTimes

# An object that lives until the modules are cleared, when Python no longer runs handlers of
# signals.
PROGRAM = f"""
import os, sys
from reinforce_rl.runtime.stop import StopRequest

class Last:
    def __del__(self, kill=os.kill, write=os.write, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)
        write(1, b"after the signal")

request = StopRequest.on_signals()
request.wait_for_checks()
os.kill(os.getpid(), int(sys.argv[1]))
assert request.reason
last = Last()
sys.exit({EXIT_STOPPED})
"""


def test_a_second_signal_changes_nothing(monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    request = StopRequest.on_signals()
    with pytest.raises(StopNow):
        request._on_signal(signal.SIGUSR1, None)
    request._on_signal(signal.SIGTERM, None)
    assert request.reason == "SIGUSR1"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_signal_while_python_shuts_down_does_not_change_the_exit_code(number):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number))], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (EXIT_STOPPED, b"after the signal"), done.stderr


def test_the_time_counts_from_the_start_of_the_process():
    age = time.time() - psutil.Process().create_time()
    endless = RunTimer(None, JobTimes())
    assert endless.seconds_left() == float("inf")
    assert endless.time_budget().shortage is None
    assert RunTimer(age + 3600, JobTimes()).seconds_left() == pytest.approx(3600, abs=5)
    assert RunTimer(age + 3600, JobTimes()).time_budget().shortage is None
    assert "counted from the process's start" in str(
        RunTimer(age / 2, JobTimes()).time_budget().shortage
    )


class TestTheAllocation:
    def test_the_earlier_bound_counts_and_is_named(self, clock):
        clock.now = 1000.0
        for max_seconds, end, left, named in [
            (900.0, None, 400.0, "max_time_per_run, counted from the allocation's start"),
            (900.0, 1401.0 + LAUNCHER_SECONDS, 400.0, "max_time_per_run"),
            (900.0, 1399.0 + LAUNCHER_SECONDS, 399.0, "SLURM_JOB_END_TIME, less 60 s"),
            (None, 1005.0 + LAUNCHER_SECONDS, 5.0, "SLURM_JOB_END_TIME"),
        ]:
            timer = RunTimer(max_seconds, JobTimes(500.0, end), save_seconds=1e6)
            assert timer.seconds_left() == left
            assert named in str(timer.time_budget().shortage)


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(run_timer, "time", SimpleNamespace(time=lambda: clock.now))
    return clock


def test_what_is_reported_of_a_shortage(clock):
    timer = RunTimer(100.0, JobTimes(0.0))
    timer.saved(8.0)
    timer.begin_step()
    clock.now = 68.0
    with timer.validating():
        clock.now = 70.0
    budget = timer.time_budget(validation_after=True)
    assert budget.validates
    assert budget.shortage == (
        "the time limit of this run is reached (30.0 s are left by exp_manager.max_time_per_run, "
        "counted from the allocation's start; a step 70.0 s, a validation 2.0 s, a save 8.0 s, "
        f"and with a margin the remaining work takes {1.1 * 80 + MARGIN_SECONDS:.1f} s)"
    )
    clock.now = 80.0
    assert not timer.time_budget().validates


def test_before_anything_is_measured_a_step_is_begun_where_a_save_fits(clock):
    timer = RunTimer(100.0, JobTimes(0.0), save_seconds=20.0)
    clock.now = 100.0 - with_margin(20.0)
    assert timer.time_budget(validation=True).shortage is None
    clock.now += 0.1
    budget = timer.time_budget(validation=True)
    assert budget.shortage is not None
    assert not budget.validates, "nobody knows how long a validation takes"


def test_a_failed_validation_and_an_old_step_do_not_count(clock):
    timer = RunTimer(1000.0, JobTimes(0.0))
    for seconds in (500.0, *[1.0] * run_timer.RECENT_STEPS):
        timer.begin_step()
        clock.now += seconds
        timer.time_budget()
    with pytest.raises(RuntimeError), timer.validating():
        clock.now += 300.0
        raise RuntimeError
    assert timer.time_budget(validation=True, validation_after=True).shortage is None


def test_a_first_save_is_guessed_from_its_bytes():
    assert first_save_seconds(98e9) == pytest.approx(985.0)


@pytest.mark.parametrize("seed", range(300))
def test_a_run_ends_in_time_and_never_without_need(clock, seed):
    """A simulated run follows the budget as the trainer does; durations vary within the margin."""
    draw = random.Random(seed)
    step, validation, save = (draw.choice([0.1, 1.0, 20.0, 300.0]) for _ in range(3))
    val_interval = draw.choice([0, 1, 3])
    save_interval = draw.choice([0, 1, 4])
    background = draw.random() < 0.5
    limit = draw.choice([60.0, 600.0, 5000.0])
    timer = RunTimer(limit, JobTimes(0.0), save_seconds=save)

    def takes(seconds: float) -> None:
        clock.now += seconds * draw.uniform(1.0, 1.0 + run_timer.MARGIN_SHARE)

    # steps, and until when a save runs in the background
    number = 0
    running = 0.0
    if val_interval:
        with timer.validating():
            takes(validation)
    if timer.time_budget().shortage is not None:
        return
    while True:
        timer.begin_step()
        takes(step)
        number += 1
        due = dict(
            validation=val_interval > 0 and number % val_interval == 0,
            validation_after=val_interval > 0 and (number + 1) % val_interval == 0,
            save=save_interval > 0 and number % save_interval == 0,
            running_save=running > 0,
        )
        left_before = timer.seconds_left()
        budget = timer.time_budget(**due)
        if budget.validates and (
            due["validation"] or (budget.shortage is not None and val_interval > 0)
        ):
            with timer.validating():
                takes(validation)
        if due["save"] and budget.shortage is None:
            clock.now = max(clock.now, running)
            if background:
                running = clock.now + save
            else:
                takes(save)
        if budget.shortage is not None:
            break
    saves_to_come = 1 + due["save"] + due["running_save"]
    most = 1.1 * (1.1 * (step + 2 * validation + saves_to_come * save)) + MARGIN_SECONDS
    assert left_before < most, "it ended although there was time"
    clock.now = max(clock.now, running)
    takes(save)
    # Only the first step, whose duration was unknown, may have been too long.
    assert clock.now <= limit or number == 1, (
        step,
        validation,
        save,
        val_interval,
        save_interval,
        background,
    )


def test_the_time_budget_against_brute_force(clock):
    """Every combination of durations and of due parts: the plan's parts are added one by one."""
    for step, validation, save, left in itertools.product(
        [1.0, 30.0], [2.0, 50.0], [0.5, 40.0], [30.0, 90.0, 200.0]
    ):
        for now, after, saves, runs in itertools.product([False, True], repeat=4):
            clock.now = 0.0
            timer = RunTimer(10_000.0, JobTimes(0.0))
            timer.saved(save)
            with timer.validating():
                clock.now += validation
            timer.begin_step()
            clock.now += step
            plan = (
                [save] * runs
                + [validation] * now
                + [save] * saves
                + [step]
                + [validation] * after
                + [save]
            )
            end = [save] * runs + [validation, save]
            due = {
                "validation": now,
                "validation_after": after,
                "save": saves,
                "running_save": runs,
            }
            timer.time_budget(**due)
            clock.now = 10_000.0 - left
            budget = timer.time_budget(**due)
            assert (budget.shortage is None) == (1.1 * sum(plan) + 10.0 <= left)
            assert budget.validates == (budget.shortage is None or 1.1 * sum(end) + 10.0 <= left)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_asks_slurm_for_the_end_of_its_job(tmp_path, monkeypatch, is_first):
    slurm = SlurmClient(tmp_path / "slurm")
    monkeypatch.setenv("PATH", slurm.path)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    notes: list[str] = []
    mesh = SimpleNamespace(is_main=is_first)
    monitor = SimpleNamespace(note=notes.append)
    slurm.answer("squeue", "12|1000|5000\n")
    expected = JobTimes(1000, 5000) if is_first else JobTimes()
    assert times_of_job(mesh, monitor) == expected
    assert not notes
    slurm.answer("squeue", error="Unable to contact slurm controller", code=1)
    assert times_of_job(mesh, monitor) == JobTimes()
    assert len(notes) == is_first
    for note in notes:
        assert "Unable to contact" in note
