"""The files and processes that one scored request enters, as docs/architecture.md lists them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.real_run import RealServer
from helpers.reward_model_files import ModelFiles
from helpers.toy_server import wait_for

from reinforce_rl.megatron.mesh import parallel_mesh

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs/architecture.md"
MOST_FILES = 9
MOST_PROCESSES = 3
IDLE = 1
REQUEST = 2
IDLE_SECONDS = 1.5  # the server looks at its processes twice a second
ANSWER_SECONDS = 60.0
# The model's forward pass, which the trainer shares: everything that `MegatronRewardModel` calls.
FORWARD_PASS = ("policy/", "config/", "megatron/")
SEQUENCES = [[5, 6, 7], [8, 9, 10, 11]]
# It sends the request once, so that the connection's first queries are answered, and again for each
# line on its input.
CLIENT = f"""
import sys
from helpers.rewards import request_of
from reinforce_rl.rewards.client import RemoteGPTRMClient
client = RemoteGPTRMClient(port=int(sys.argv[1]), deadline_seconds=60.0)
client.infer_rm(request_of({SEQUENCES})).result()
print("ready", flush=True)
for _ in sys.stdin:
    print(*client.infer_rm(request_of({SEQUENCES})).result().values.tolist(), flush=True)
client.close()
"""


@dataclass(frozen=True)
class CallTrace:
    """Records the calls of processes that start with `variables`."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        folders = [TESTS / "helpers/call_tracer", TESTS, TESTS.parent]
        return {
            "CALL_TRACE": str(self.folder),
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        }

    def set_window(self, number: int) -> None:
        """Record calls under this number from now on; 0 stops."""
        with (self.folder / "window").open("r+b") as file:  # the processes have mapped the file
            file.write(bytes([number]))

    def files(self, pid: int) -> list[str]:
        """Return the files whose functions a process calls for the request, and not while idle."""
        path = self.folder / f"{pid}.calls"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [line.split(" ", 1) for line in lines]
        idle = {call for number, call in calls if int(number) == IDLE}
        files: dict[str, None] = {}
        for number, call in calls:
            file = call.partition(" ")[0]
            if int(number) == REQUEST and call not in idle and not file.startswith(FORWARD_PASS):
                files[file] = None
        return list(files)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> CallTrace:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "window").write_bytes(b"\0")
    return CallTrace(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelFiles:
    return ModelFiles.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(trace, model, tmp_path_factory) -> Iterator[RealServer]:
    # Ten health checks reach the model in this time; none of them belongs to the request.
    quiet = "inference.model_timeout_seconds=36000"
    warm_up = "inference.warm_up_lengths=[]"
    server = RealServer(tmp_path_factory.mktemp("server"), *model.overrides, quiet, warm_up)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in trace.variables.items():
            patch.setenv(name, value)
        server.start()
    yield server
    server.close()


def rows_of_the_page() -> list[tuple[str, str]]:
    """(process, file) of each row of the table."""
    section = PAGE.read_text(encoding="utf-8").partition("## One scored request")[2]
    return re.findall(r"^\| (trainer|front door|server) \| `(\S+\.py)` \|", section, re.MULTILINE)


def test_files_and_processes_of_one_request(trace, model, server) -> None:
    command = [sys.executable, "-c", CLIENT, str(server.port)]
    with subprocess.Popen(
        command,
        env={**os.environ, **trace.variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            assert client.stdin is not None
            assert wait_for_line(client, ANSWER_SECONDS) == "ready"
            trace.set_window(IDLE)
            time.sleep(IDLE_SECONDS)
            trace.set_window(REQUEST)
            client.stdin.write("\n")
            client.stdin.flush()
            scores = wait_for_line(client, ANSWER_SECONDS)
            closed = trace.folder / f"{server.front.pid}.calls"
            assert wait_for(lambda: "connection_lost" in closed.read_text())
            trace.set_window(0)
        finally:
            client.kill()
            client.wait(ANSWER_SECONDS)
    with parallel_mesh(1, 1) as mesh:
        (expected,) = model.scores(mesh, [SEQUENCES])
    printed = [float(score) for score in scores.split()]
    assert printed == pytest.approx(expected, abs=1e-4)

    processes = {"trainer": client.pid, "front door": server.front.pid, "server": server.server_pid}
    entered = {pid: files for pid in pids_of(trace) if (files := trace.files(pid))}
    assert entered.keys() == set(processes.values()), "another process runs the package"
    assert len(entered) <= MOST_PROCESSES
    assert len({file for files in entered.values() for file in files}) <= MOST_FILES
    path_of_request = [(name, file) for name, pid in processes.items() for file in entered[pid]]
    assert path_of_request == rows_of_the_page(), "docs/architecture.md, One scored request"


def pids_of(trace: CallTrace) -> list[int]:
    return [int(path.stem) for path in trace.folder.glob("*.calls")]


def wait_for_line(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the next line of the output, "" at its end; kill the process if none comes in time."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        return process.stdout.readline().strip()
    finally:
        timer.cancel()
