"""SIGTERM and SIGUSR1 in each phase: the run saves, exits with its code, and resumes exactly."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import printed_keys
from helpers.ranks import kill_tree, reference
from helpers.tiny_run import metrics_of, tiny_overrides
from helpers.trainer_processes import (
    DRIVER,
    NUM_PROMPTS,
    RUN_SECONDS,
    SETTINGS,
    STEPS,
    TrainerProcesses,
    assert_equal_runs,
)

from reinforce_rl.errors import EXIT_ALERT, EXIT_ERROR, EXIT_STOPPED
from reinforce_rl.runtime.status import EXIT_INTERRUPTED, Status, read_status
from reinforce_rl.runtime.stop import LAUNCHER_SECONDS

pytestmark = pytest.mark.more

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def processes() -> Iterator[TrainerProcesses]:
    processes = TrainerProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def uninterrupted(processes: TrainerProcesses, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(processes, folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted_on_two(processes: TrainerProcesses, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("on_two")
    finish(processes, folder, ranks=2)
    return folder


def finish(processes: TrainerProcesses, folder: Path, ranks: int = 1) -> None:
    processes.start(folder, *SETTINGS, ranks=ranks)
    assert processes.wait() == 0, log(folder)
    assert status(folder).state == "finished"


def stop(
    processes: TrainerProcesses, folder: Path, *overrides: str, ranks: int = 1, **options: Any
) -> None:
    processes.start(folder, *SETTINGS, *overrides, ranks=ranks, patience=30, **options)
    assert processes.wait() == EXIT_STOPPED, log(folder)
    assert processes.statuses == [EXIT_STOPPED] * ranks
    assert "Traceback" not in log(folder)
    assert not (folder / "run" / "hf").exists()


def log(folder: Path) -> str:
    return (folder / "log").read_text()


def status(folder: Path) -> Status:
    run_status = read_status(folder / "run")
    assert run_status is not None
    return run_status


def saved_step(folder: Path) -> int:
    checkpoints = folder / "run" / "checkpoints"
    newest = checkpoints / (checkpoints / "latest").read_text().strip()
    return json.loads((newest / "trainer_state.json").read_text())["step"]


def act(phase: str, step: int, number: int, rank: int = 0) -> dict[str, object]:
    return {"phase": phase, "step": step, "signal": number, "rank": rank}


@pytest.mark.parametrize(
    ("phase", "step", "number", "saved"),
    [
        ("generate", 5, signal.SIGTERM, 4),
        ("train_time", 5, signal.SIGUSR1, 5),
        pytest.param("validation", 5, signal.SIGTERM, 5, marks=SLOW),
        ("reward_wait", 5, signal.SIGUSR1, 4),
        pytest.param("logprobs", 5, signal.SIGUSR1, 4, marks=SLOW),
        pytest.param("init_logprobs", 5, signal.SIGTERM, 4, marks=SLOW),
        pytest.param("validation: reward_wait", 10, signal.SIGUSR1, 10, marks=SLOW),
        pytest.param("checkpoint", 6, signal.SIGTERM, 6, marks=SLOW),
        pytest.param("checkpoint", STEPS, signal.SIGUSR1, STEPS, marks=SLOW),
    ],
)
def test_in_every_phase(processes, uninterrupted, tmp_path, phase, step, number, saved):
    stop(processes, tmp_path, act=act(phase, step, number))
    assert saved_step(tmp_path) == saved
    stopped = status(tmp_path)
    assert stopped.state == "stopped"
    assert stopped.step == saved
    assert stopped.max_steps == STEPS
    assert stopped.exit_code == EXIT_STOPPED
    if saved < STEPS:
        assert printed_keys(log(tmp_path)) == ["run.stop.by_signal"]
        assert signal.Signals(number).name in stopped.reason
        assert f"step {saved} of {STEPS}" in stopped.reason
        assert not (tmp_path / "run" / "hf").exists(), "nothing is exported"
    finish(processes, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("phase", "step"), [("checkpoint", 6), pytest.param("validation", 5, marks=SLOW)]
)
def test_ctrl_c(processes, uninterrupted, tmp_path, phase, step):
    """Nothing is saved, and earlier checkpoints are complete."""
    processes.start(tmp_path, *SETTINGS, act=act(phase, step, signal.SIGINT))
    assert processes.wait() == EXIT_INTERRUPTED, log(tmp_path)
    assert "Traceback" not in log(tmp_path)
    assert (
        "interrupted by Ctrl-C; the same command resumes after step 3, the last one saved"
        in log(tmp_path)
    )
    assert status(tmp_path).state == "interrupted"
    assert status(tmp_path).exit_code == EXIT_INTERRUPTED
    assert saved_step(tmp_path) == 3
    finish(processes, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)


def limit_files(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


@pytest.mark.parametrize(
    ("file_bytes", "key", "path"),
    [
        (60_000, "disk.file.not_written", "run/report.html"),
        (20_000, "checkpoint.disk.full", "run/checkpoints/step_00000006.part"),
    ],
)
def test_a_full_disk(processes, uninterrupted, tmp_path, file_bytes, key, path):
    stop(processes, tmp_path, act=act("train_time", 3, signal.SIGTERM))
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000003"
    files = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}

    processes.start(tmp_path, *SETTINGS, patches=[[reference(limit_files), file_bytes]])
    assert processes.wait() == EXIT_ERROR, log(tmp_path)
    said = log(tmp_path).partition("error: ")[2]
    assert "Traceback" not in log(tmp_path)
    named = rf"{re.escape(path)}.*File too large.*GB .* /.*{file_bytes} bytes .*ulimit -f"
    assert re.search(named, said), said
    step = saved_step(tmp_path)
    assert re.search(rf"(resumes after step {step}|resumes from it)", said), said
    failed = status(tmp_path)
    assert failed.state == "failed"
    assert failed.exit_code == EXIT_ERROR
    assert said.strip() == f"{failed.reason} [{key}]"
    assert files == {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    assert list((tmp_path / "run").glob(".*")) == []
    assert list((tmp_path / "run" / "checkpoints").glob("*.part")) == []

    finish(processes, tmp_path)
    assert_equal_runs(tmp_path, uninterrupted)


def test_while_loading(processes, tmp_path):
    """There is nothing to save and nothing to wait for."""
    stop(processes, tmp_path, act=act("loading the model", 0, signal.SIGTERM))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert printed_keys(log(tmp_path)) == ["run.stop.before_first_step"]
    assert "SIGTERM" in status(tmp_path).reason
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or metrics_of(tmp_path) == []


def test_one_of_two_ranks_is_signalled(processes, uninterrupted_on_two, tmp_path):
    stop(processes, tmp_path, ranks=2, act=act("generate", 5, signal.SIGTERM, rank=1))
    assert saved_step(tmp_path) == 4
    assert set(printed_keys(log(tmp_path))) == {"run.stop.by_signal"}
    stop(processes, tmp_path, ranks=2, act=act("train_time", 8, signal.SIGUSR1))
    assert saved_step(tmp_path) == 8
    finish(processes, tmp_path, ranks=2)
    assert_equal_runs(tmp_path, uninterrupted_on_two)


@pytest.mark.slow
def test_an_alert_stops_every_rank(processes, uninterrupted_on_two, tmp_path):
    """The first rank decides for all; the resumed run does not stop for the same reason."""
    processes.start(tmp_path, *SETTINGS, "alerts.rules.prompts_repeated=stop", ranks=2, patience=30)
    assert processes.wait() == EXIT_ALERT, log(tmp_path)
    assert processes.statuses == [EXIT_ALERT] * 2
    assert "Traceback" not in log(tmp_path)
    assert set(printed_keys(log(tmp_path))) == {"run.stop.by_alert"}
    assert saved_step(tmp_path) == 1
    assert "prompts_repeated" in status(tmp_path).reason
    assert not (tmp_path / "run" / "hf").exists(), "nothing is exported"
    finish(processes, tmp_path, ranks=2)
    assert_equal_runs(tmp_path, uninterrupted_on_two)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_two_ranks_of_a_plain_python(processes, uninterrupted_on_two, tmp_path, number):
    """The process that starts the ranks forwards the signal, waits, and exits with their code."""
    command = [*tiny_overrides(tmp_path, num_prompts=NUM_PROMPTS), *SETTINGS, "trainer.devices=2"]
    process = subprocess.Popen([sys.executable, str(DRIVER), *command], start_new_session=True)
    try:
        deadline = time.monotonic() + 4 * RUN_SECONDS
        while not ((tmp_path / "run" / "metrics.jsonl").exists() and len(metrics_of(tmp_path)) > 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(RUN_SECONDS) == EXIT_STOPPED
    finally:
        kill_tree(process.pid)
    assert 2 <= saved_step(tmp_path) == status(tmp_path).step < STEPS
    finish(processes, tmp_path, ranks=2)
    assert_equal_runs(tmp_path, uninterrupted_on_two)


def end_allocation(seconds: int) -> None:
    """Let the batch system's allocation end in `seconds`; it began hours ago."""
    now = round(time.time())
    os.environ["SLURM_JOB_START_TIME"] = str(now - 7200)
    os.environ["SLURM_JOB_END_TIME"] = str(now + seconds)
    print("the allocation ends at", now + seconds)


def test_it_ends_by_itself_before_the_allocation_does(processes, tmp_path):
    """Steps take two seconds; the allocation ends in 30 s, besides the launcher's share."""
    steps = ["trainer.reinforce.max_epochs=400", "exp_manager.max_time_per_run='02:30:00'"]
    ends = [reference(end_allocation), round(LAUNCHER_SECONDS) + 30]
    stop(processes, tmp_path, *steps, patches=[ends], step_seconds=2.0)
    lines = log(tmp_path).splitlines()
    end = int(next(line for line in lines if "allocation ends" in line).split()[-1])
    stopped = status(tmp_path)
    assert printed_keys(log(tmp_path)) == ["run.time.used_up"]
    assert "SLURM_JOB_END_TIME" in stopped.reason
    assert f"step {stopped.step} of 1200" in stopped.reason
    assert stopped.step == saved_step(tmp_path) == metrics_of(tmp_path)[-1]["step"] > 0
    assert stopped.time < end - LAUNCHER_SECONDS, "with room"
    assert stopped.save_seconds is not None
    assert stopped.save_seconds > 0


def test_one_of_two_ranks_is_signalled_while_they_load(processes, tmp_path):
    stop(processes, tmp_path, ranks=2, act=act("loading the model", 0, signal.SIGTERM, rank=1))
    assert status(tmp_path).state == "stopped"
