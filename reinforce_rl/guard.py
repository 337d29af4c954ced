"""A small process that outlives its owner and ends whatever the owner left behind.

A process that is killed with SIGKILL cannot clean up after itself. So a server or a launcher starts a guard first. The
guard reads a pipe that only the owner holds open; the end of the pipe means that the owner is gone, however it went.
Then the guard ends the processes it was told about, and removes their files. An owner that stops in good order closes
the pipe too and waits for the guard, so that there is one way of cleaning up and it is always taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REFRESH_SECONDS = 1.0  # how often the guard looks for new descendants and shared memory of what it watches
KILL_WAIT_SECONDS = 5.0
SHM_FOLDER = Path("/dev/shm")


class Guard:
    """The owner's end of a guard process.

    Args:
        grace_seconds: what a watched process gets between SIGTERM and SIGKILL once the owner is gone; 0 kills at once.
    """

    def __init__(self, *, grace_seconds: float = 0.0):
        package_parent = str(Path(__file__).resolve().parents[1])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH", "")]))
        # A session of its own: a signal to the owner's process group must not end the guard as well.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "reinforce_rl.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._grace_seconds = grace_seconds
        self._tell({"grace_seconds": grace_seconds})

    def watch_process(self, pid: int, *, whole_session: bool = False) -> None:
        """End this process and its descendants when the owner is gone; the owner itself may be named for the latter.

        Args:
            pid: the process.
            whole_session: end every process of the session that it leads, too.
        """
        self._tell({"pid": pid, "whole_session": whole_session})

    def remove_folder(self, folder: Path) -> None:
        """Remove this folder when the owner is gone."""
        self._tell({"folder": str(folder)})

    def remove_shared_memory(self, prefix: str) -> None:
        """Remove the segments of /dev/shm whose names begin so."""
        self._tell({"shm_prefix": prefix})

    def remove_file(self, path: Path) -> None:
        """Remove this file when the owner is gone."""
        self._tell({"file": str(path)})

    def close(self) -> None:
        """Have everything cleaned up now, and wait for it. Safe to call twice."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(self._grace_seconds + 2 * KILL_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, message: dict[str, object]) -> None:
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            pipe.write((json.dumps(message) + "\n").encode())
            pipe.flush()


@dataclass
class _Watch:
    """What the guard process knows of its owner's leavings."""

    owner: int
    grace_seconds: float = 0.0
    roots: list[psutil.Process] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    processes: set[psutil.Process] = field(default_factory=set)
    folders: set[Path] = field(default_factory=set)
    files: set[Path] = field(default_factory=set)
    shm_prefixes: set[str] = field(default_factory=set)
    triton_starts: set[float] = field(default_factory=set)

    def hear(self, line: bytes) -> None:
        """Take in one message of the owner."""
        message = json.loads(line)
        if "grace_seconds" in message:
            self.grace_seconds = float(message["grace_seconds"])
        if "folder" in message:
            self.folders.add(Path(message["folder"]))
        if "file" in message:
            self.files.add(Path(message["file"]))
        if "shm_prefix" in message:
            self.shm_prefixes.add(message["shm_prefix"])
        if "pid" in message:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                root = psutil.Process(int(message["pid"]))
                self.roots.append(root)
                if message["whole_session"] and os.getsid(root.pid) == root.pid:
                    self.sessions.add(root.pid)
            self.refresh()

    def refresh(self) -> None:
        """Note the descendants and their shared memory while they can be seen."""
        self.processes = {process for process in self.processes if process.is_running()}
        for root in self.roots:
            with contextlib.suppress(psutil.Error):
                self.processes.update([root, *root.children(recursive=True)])
        if self.sessions:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                    if os.getsid(process.pid) in self.sessions:
                        self.processes.add(process)
        # Another guard ends by itself once its owner is gone, and has work left until then.
        self.processes = {process for process in self.processes if not _is_guard(process)}
        if self.shm_prefixes:
            for process in self.processes:
                with contextlib.suppress(psutil.Error, OSError):
                    self._note_files_of(process)

    def _note_files_of(self, process: psutil.Process) -> None:
        # Python's own segments have random names, so only the maps of a living process say whose they are.
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        self.files.update(Path(path) for path in re.findall(r"(/dev/shm/psm_\w+)", maps))
        if process.name() == "tritonserver":
            self.triton_starts.add(process.create_time())

    def clean_up(self) -> None:
        """End the processes, then remove the files."""
        self.refresh()
        mine = os.getpid()
        left = [process for process in self.processes if process.pid not in (mine, self.owner)]
        if self.grace_seconds > 0:
            roots = [process for process in self.roots if process.pid != self.owner]
            for process in roots:  # their children are theirs to end, in their order
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            _wait_until_gone(roots, self.grace_seconds)
            self.refresh()  # what was started meanwhile
            left = [process for process in self.processes if process.pid not in (mine, self.owner)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_until_gone(left, KILL_WAIT_SECONDS)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        for prefix in self.shm_prefixes:
            self.files.update(path for path in SHM_FOLDER.glob(prefix + "*"))
        for path in self.files:
            with contextlib.suppress(OSError):
                path.unlink()
        self._remove_empty_environments()

    def _remove_empty_environments(self) -> None:
        # Triton's Python backend makes an empty folder as it starts. Nothing names it but the time; rmdir spares what
        # is in use.
        for folder in Path("/tmp").glob("python_env_??????"):
            with contextlib.suppress(OSError):
                made = folder.stat().st_mtime
                if any(0.0 <= made - start <= 3.0 for start in self.triton_starts):
                    folder.rmdir()


def _wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait for their end. A zombie has ended: its parent, or a container's first process, may never collect it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_is_alive(process) for process in processes):
        time.sleep(0.05)


def _is_guard(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "reinforce_rl.guard" in process.cmdline()
    return False


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def main() -> None:
    """Run the guard: messages from stdin, one JSON object a line, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a batch system signals every process; this one has work left then
    watch = _Watch(owner=os.getppid())
    pipe = sys.stdin.fileno()
    pending = b""
    next_refresh = time.monotonic()
    while True:
        readable, _, _ = select.select([pipe], [], [], max(0.0, next_refresh - time.monotonic()))
        if readable:
            chunk = os.read(pipe, 65536)
            if not chunk:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                watch.hear(line)
        if time.monotonic() >= next_refresh:
            watch.refresh()
            next_refresh = time.monotonic() + REFRESH_SECONDS
    watch.clean_up()


if __name__ == "__main__":
    main()
