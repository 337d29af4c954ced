"""The wrapper of a task as a process, with toy programs and the variables that srun would set."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.errors import printed_keys

from reinforce_rl.launch.slurm.outcome import TaskEnd, read_ends
from reinforce_rl.launch.slurm.rendezvous import Endpoint, read_endpoint
from reinforce_rl.launch.slurm.steps import START_TASK
from reinforce_rl.launch.slurm.task import Task, command_of, environment_of

REPOSITORY = Path(__file__).parents[3]
SECONDS = 180.0
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SAY_PLACE = (
    f"import json, os, sys; print(json.dumps([[os.environ[n] for n in {NAMES!r}], sys.argv[1:]]))"
)
SLEEP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(60)
"""


def start(
    folder: Path, program: str, *options: str, number: int = 0, serves: bool = False
) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(program)
    place = {
        "SLURM_PROCID": number,
        "SLURM_LOCALID": number % 2,
        "SLURM_NODEID": number // 2,
        "SLURM_STEP_NUM_NODES": 2,
    }
    task = {
        "component": "actor",
        "folder": str(folder),
        "repository": str(REPOSITORY),
        "launcher": "srun",
    }
    task |= {
        "devices": 2,
        "seconds": 30.0,
        "peers": [],
        "serves": serves,
        "script": [str(script), *options],
    }
    return subprocess.Popen(
        [sys.executable, "-c", START_TASK, str(REPOSITORY), json.dumps(task)],
        env={**os.environ, **{key: str(value) for key, value in place.items()}},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output


def wait_until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_meet_at_the_first_one(tmp_path: Path) -> None:
    # they wait for rank 0
    others = [start(tmp_path, SAY_PLACE, number=number) for number in (3, 1)]
    said = [json.loads(finish(task)[1]) for task in (start(tmp_path, SAY_PLACE), *others)]
    place = read_endpoint(tmp_path, "actor")
    assert place is not None
    meeting = [place.address, str(place.rank_port)]
    assert [found for found, _ in said] == [
        ["0", "4", "0", "2", *meeting],
        ["3", "4", "1", "2", *meeting],
        ["1", "4", "1", "2", *meeting],
    ]
    assert [(end.task, end.code) for end in read_ends(tmp_path)] == [(0, 0), (1, 0), (3, 0)]


def test_a_server_is_told_its_address(tmp_path: Path) -> None:
    _, output = finish(start(tmp_path, SAY_PLACE, "a=1", serves=True))
    place = read_endpoint(tmp_path, "actor")
    assert place is not None and place.http_port not in (0, place.rank_port)
    assert json.loads(output)[1] == [
        "a=1",
        f"inference.host={place.address}",
        f"inference.port={place.http_port}",
    ]


@pytest.mark.parametrize(("code", "returned"), [(0, 0), (1, 1), (76, 76), (75, 0)])
def test_codes(tmp_path: Path, code: int, returned: int) -> None:
    # Of a task that has saved srun is to think well: else it would kill those that still do.
    assert finish(start(tmp_path, f"raise SystemExit({code})"))[0] == returned
    assert [end.code for end in read_ends(tmp_path)] == [code]


@pytest.mark.parametrize(
    ("program", "recorded"),
    [
        (SLEEP, 75),
        # One that dies of the signal; others may still save.
        (SLEEP.replace("sys.exit(75)", "signal.raise_signal(9)").replace("TERM, l", "INT, l"), 143),
    ],
)
def test_signals_are_passed_on(tmp_path: Path, program: str, recorded: int) -> None:
    process = start(tmp_path, program)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert [end.code for end in read_ends(tmp_path)] == [recorded]


def test_a_program_that_is_killed(tmp_path: Path) -> None:
    code, _ = finish(start(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    assert code == 137
    (end,) = read_ends(tmp_path)
    assert (end.code, end.name, end.host) == (
        137,
        f"actor rank 0 on {os.uname().nodename}",
        os.uname().nodename,
    )


def test_the_signal_before_a_time_limit_does_not_end_a_server(tmp_path: Path) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('alive')"
    assert finish(start(tmp_path, program, serves=True)) == (0, "alive\n")


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
    # One that would run on, and one that has work left for a moment, as a reaper has.
    program = """
import os, subprocess, sys
reaper = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(1); open(WORK, 'w')"
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


def test_a_task_that_is_stopped_while_it_waits_for_the_first(tmp_path: Path) -> None:
    process = start(tmp_path, SAY_PLACE, number=1)
    wait_until(
        lambda: (
            Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0]
            != "0" * 16
        )
    )
    wait_until(
        lambda: (
            int(Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0], 16)
            >> 14
            & 1
        )
    )
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert read_ends(tmp_path)[0].code == 143
    assert read_ends(tmp_path)[0].reason == "stopped before the program began"


def test_a_first_task_that_never_comes(tmp_path: Path) -> None:
    task = {
        "component": "actor",
        "folder": str(tmp_path),
        "repository": "/",
        "launcher": "srun",
        "devices": 1,
    }
    place = {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", START_TASK, str(REPOSITORY), json.dumps(task)],
        env={**os.environ, **place},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 1
    assert printed_keys(done.stderr) == ["slurm.rendezvous.no_address"]
    assert "actor" in done.stderr and str(tmp_path) in done.stderr
    assert [end.code for end in read_ends(tmp_path)] == [1]


def test_torchrun_starts_the_ranks_of_a_node(tmp_path: Path) -> None:
    task = Task(
        "actor", tmp_path, str(REPOSITORY), "torchrun", 4, 1, 0, 1, 2, script=["train.py", "a=1"]
    )
    place = Endpoint("act0", "10.0.0.1", 20000)
    assert command_of(task, place)[1:] == [
        *(
            "-m",
            "reinforce_rl.utils.ranks",
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--nproc-per-node",
            "4",
        ),
        *("--master-addr", "10.0.0.1", "--master-port", "20000", "train.py", "a=1"),
    ]
    environment = environment_of(task, place, {"SLURM_CPUS_PER_TASK": "32"})
    assert "RANK" not in environment and environment["OMP_NUM_THREADS"] == "1"
    assert task.ranks == "4-7"
    assert task.end(1).name.startswith("actor ranks 4-7 on ")


def test_what_a_person_has_set_stays(tmp_path: Path) -> None:
    task = Task("actor", tmp_path, "/repo", "srun", 1, 0, 0, 0, 1)
    place = Endpoint("act0", "10.0.0.1", 20000)
    found = environment_of(task, place, {"OMP_NUM_THREADS": "3", "PYTHONPATH": "/mine"})
    assert found["OMP_NUM_THREADS"] == "3" and found["PYTHONPATH"] == "/repo:/mine"
    assert environment_of(task, place, {"SLURM_CPUS_PER_TASK": "8"})["OMP_NUM_THREADS"] == "8"


def test_a_record_of_an_end_is_complete() -> None:
    end = Task("rm-0", Path("/"), "/", "srun", 1, 2, 0, 2, 4, serves=True).end(1, "why")
    assert end == TaskEnd("rm-0", 2, "2", os.uname().nodename, 1, end.time, "why")
