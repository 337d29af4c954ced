"""The wrapper of a task as a process, with small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.errors import printed_keys

from reinforce_rl.launch.slurm.outcome import read_ends
from reinforce_rl.launch.slurm.task import gpus_at

REPOSITORY = Path(__file__).parents[3]
SECONDS = 180.0
SLEEP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""


def start(
    folder: Path, program: str, *options: str, step: str = "actor", **variables: str
) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "reinforce_rl.launch.slurm.task", *options]
    return subprocess.Popen(
        [*command, step, str(folder), sys.executable, str(script)],
        env={**os.environ, "SLURM_PROCID": "2", "PYTHONPATH": str(REPOSITORY), **variables},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (1, 1), (76, 76), (75, 0)])
def test_codes(tmp_path: Path, code: int, returned: int) -> None:
    # srun must see success of a task that has saved, or it would kill those that are still saving.
    assert finish(start(tmp_path, f"raise SystemExit({code})"))[0] == returned
    assert [end.code for end in read_ends(tmp_path)] == [code]


@pytest.mark.parametrize(
    ("program", "recorded"),
    [
        (SLEEP, 75),
        # A task dies of the signal; others may still save.
        (SLEEP.replace("sys.exit(75)", "signal.raise_signal(9)").replace("TERM, l", "INT, l"), 143),
    ],
)
def test_signals_are_passed_on(tmp_path: Path, program: str, recorded: int) -> None:
    process = start(tmp_path, program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert [end.code for end in read_ends(tmp_path)] == [recorded]


def test_a_program_that_is_killed(tmp_path: Path) -> None:
    code, _ = finish(start(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert code == 137
    (end,) = read_ends(tmp_path)
    assert (end.code, end.name, end.host) == (
        137,
        f"actor rank 2 on {os.uname().nodename}",
        os.uname().nodename,
    )


def test_the_signal_before_a_time_limit_does_not_end_a_server(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"
    assert finish(start(tmp_path, program, step="rm-0")) == (0, "alive\n")


def test_a_program_does_not_outlive_its_wrapper(tmp_path: Path) -> None:
    process = start(tmp_path, "import os; print(os.getpid(), flush=True)\n" + SLEEP)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    finish(process)
    wait_until(
        lambda: (
            not Path(f"/proc/{pid}").exists()
            or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
        )
    )


def test_what_a_program_leaves_is_ended(tmp_path: Path) -> None:
    # One child would continue to run; the other has work left for a moment, like a reaper.
    program = """
import os, subprocess, sys
reaper = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
reaper += "time.sleep(1); open(WORK, 'w')"
rank = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
children = [
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    for code in (reaper, rank)
]
print(*(int(child.stdout.readline()) for child in children), flush=True)
os.kill(os.getpid(), 9)
""".replace("WORK", repr(str(tmp_path / "work")))
    code, output = finish(start(tmp_path, program))
    assert code == 137
    assert not Path(f"/proc/{output.split()[1]}").exists()
    assert (tmp_path / "work").exists()


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "reinforce_rl.launch.slurm.task",
            "gen-0",
            str(tmp_path),
            "nothing",
        ],
        env={**os.environ, "SLURM_PROCID": "0", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert process.returncode == 1
    (end,) = read_ends(tmp_path)
    assert (end.component, end.code) == ("gen-0", 1)
    assert "nothing" in end.reason


def test_an_end_that_cannot_be_recorded_is_reported(tmp_path: Path) -> None:
    (tmp_path / "exit").touch()
    code, output = finish(start(tmp_path, "raise SystemExit(3)"))
    assert code == 3
    assert printed_keys(output) == ["slurm.task.end_not_written"]
    assert "actor rank 2" in output
    assert "exit code 3" in output


PRINT_GPUS = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("4,5,6,7", "5,6"),
        ("MIG-a,MIG-b,MIG-c", "MIG-b,MIG-c"),
        ("", ""),
        ("NoDevFiles", "NoDevFiles"),
    ],
)
def test_a_program_gets_some_of_the_gpus_that_slurm_gives(
    tmp_path: Path, given: str, expected: str
) -> None:
    process = start(tmp_path, PRINT_GPUS, "--gpus=1,2", step="gen-0", CUDA_VISIBLE_DEVICES=given)
    assert finish(process) == (0, f"{expected}\n")


def test_gpus_that_slurm_does_not_know_of_are_numbered() -> None:
    assert gpus_at(["1", "2"], None) == "1,2"


def test_fewer_gpus_than_tasks(tmp_path: Path) -> None:
    process = start(tmp_path, PRINT_GPUS, "--gpus=1,2", step="gen-0", CUDA_VISIBLE_DEVICES="6,7")
    code, output = finish(process)
    assert code == 1
    assert printed_keys(output) == ["slurm.task.too_few_gpus"]
    assert "6,7" in output
    assert [end.code for end in read_ends(tmp_path)] == [1]
