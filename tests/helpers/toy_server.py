"""Start `serve_toy_scorer.py` and check for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from reinforce_rl.reward_model.server.front_process import MODULE
from reinforce_rl.reward_model.server.triton import SHARED_MEMORY_PREFIX
from reinforce_rl.utils import net
from reinforce_rl.utils.process import die_with_parent

if TYPE_CHECKING:
    from typing_extensions import Self

START_SECONDS = 240.0  # imports are slow on a busy machine
END_SECONDS = 60.0  # until killed processes have left nothing behind


class ToyServer:
    """A reward server process with a separate session, temporary folder and log."""

    script = Path(__file__).with_name("serve_toy_scorer.py")

    def __init__(self, folder: Path, *options: str, port: int | None = None):
        self.port = port or free_port()
        self.folder = folder
        self.options = options
        self.log = folder / "server.log"
        # pytest's temporary path is too long for Unix sockets
        self.temporary = Path(tempfile.mkdtemp(prefix="toy-"))
        self.ready_file = folder / "ready.json"
        # the process that serves may be a child of the process that was started
        self.server_pid = 0
        self.descendants: list[psutil.Process] = []

    def command(self) -> list[str]:
        places = [f"inference.port={self.port}", f"inference.ready_file={self.ready_file}"]
        return [sys.executable, str(self.script), *places, *self.options]

    def start(self) -> Self:
        self.temporary.mkdir(exist_ok=True)
        self.ready_file.unlink(missing_ok=True)
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                # A killed test run closes nothing; the server's reaper ends its descendants.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.05)
        self.server_pid = json.loads(self.ready_file.read_text())["pid"]
        self.descendants = psutil.Process(self.process.pid).children(recursive=True)
        assert self.server_pid in {self.process.pid, *(process.pid for process in self.descendants)}
        return self

    @property
    def tritonserver(self) -> psutil.Process:
        return next(process for process in self.descendants if process.name() == "tritonserver")

    @property
    def front(self) -> psutil.Process:
        return next(p for p in self.descendants if MODULE in p.cmdline())

    def ensure_running(self) -> Self:
        """Restart it if a test has ended it: pytest may repeat the test."""
        if self.process.poll() is not None:
            self.close()
            self.start()
        return self

    def kill_group(self) -> None:
        """Kill the process group without cleanup, like a failing node."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self) -> list[str]:
        """Return leftovers that should be gone after the server's end."""
        leftovers = [f"process {p.pid} {p.name()}" for p in self.descendants if is_alive(p)]
        leftovers += [
            str(path)
            for path in Path("/dev/shm").glob(f"{SHARED_MEMORY_PREFIX}{self.server_pid}-*")
        ]
        leftovers += [
            str(path) for path in [*self.temporary.glob("*"), self.ready_file] if path.exists()
        ]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                leftovers.append(f"port {self.port}")
        return leftovers

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.kill_group()
        wait_for(lambda: not self.left_behind())
        shutil.rmtree(self.temporary, ignore_errors=True)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; zombies do not, and in a container they may remain."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    return net.free_port("127.0.0.1")


def wait_for(condition, seconds: float = END_SECONDS) -> bool:
    """Wait for the condition; return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
