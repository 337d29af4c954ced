"""A helper process that outlives its owner, kills its processes and deletes its files."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from reinforce_rl.utils.process import (
    Message,
    ModuleChild,
    Silence,
    connect_to_parent,
    receive,
    send,
)

logger = logging.getLogger(__name__)

MODULE = "reinforce_rl.utils.process_reaper"
REFRESH_SECONDS = 1.0  # interval of scans for new descendants and shared memory
KILL_SECONDS = 5.0
SHM_FOLDER = Path("/dev/shm")


class ProcessReaper:
    """The owner's end of a reaper process, which cleans up even if SIGKILL ends the owner.

    Start it before the processes that it watches. When the connection closes, the reaper kills the
    watched processes and deletes the watched files. An owner that stops normally closes the reaper
    and waits for it, so that cleanup always takes the same path.

    `grace_seconds` are between SIGTERM and SIGKILL of a watched process once the owner is gone; 0
    kills at once.
    """

    def __init__(self, *, grace_seconds: float = 0.0):
        self._grace_seconds = grace_seconds
        self._sent: list[Message] = []
        self._child = ModuleChild(MODULE, _ignore)
        self._send({"grace_seconds": grace_seconds})

    def watch_process(self, pid: int, *, whole_session: bool = False) -> None:
        """Kill this process and its descendants when the owner is gone.

        Pass the owner's pid to watch the owner's descendants. `whole_session` also kills every
        process of the session that the process leads.
        """
        self._send({"pid": pid, "whole_session": whole_session})

    def remove(self, path: Path) -> None:
        self._send({"path": str(path)})

    def remove_shared_memory(self, prefix: str) -> None:
        """Delete segments in /dev/shm whose names begin with `prefix` when the owner is gone."""
        self._send({"shm_prefix": prefix})

    def expect(self, seconds: float, setting: str) -> None:
        """Kill the owner unless this is called again within `seconds`.

        `setting` names the key of that time in the configuration.
        """
        self._child.send({"expect": seconds, "setting": setting})

    def check(self, seconds: float = 60.0) -> None:
        """Replace a reaper that died or was silent for `seconds`.

        Call it at least every MAX_INTERVAL seconds.
        """
        fault = self._child.fault(seconds)
        if fault is not None:
            logger.error(
                "event=reaper_replaced process=%d reason=the reaper %s", self._child.pid, fault
            )
            self._child.kill()
            self._child = ModuleChild(MODULE, _ignore)
            for message in self._sent:
                self._child.send(message)

    def close(self) -> None:
        """Clean up now and wait until it is done. Safe to call twice."""
        self.check()
        self._child.stop(self._grace_seconds + 2 * KILL_SECONDS)

    def _send(self, message: Message) -> None:
        self._sent.append(message)
        self._child.send(message)


def _ignore(message: Message | None) -> None:
    """Receive a sign of life, which `ModuleChild` has already noted."""


@dataclass
class _Watch:
    owner: int
    grace_seconds: float = 0.0
    roots: list[psutil.Process] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    processes: set[psutil.Process] = field(default_factory=set)
    paths: set[Path] = field(default_factory=set)
    shm_prefixes: set[str] = field(default_factory=set)
    triton_starts: set[float] = field(default_factory=set)
    expected_seconds: float = math.inf
    setting: str = ""
    silence: Silence = field(default_factory=Silence)

    def on_message(self, message: Message) -> None:
        self.silence.reset()
        if "expect" in message:
            self.expected_seconds = message["expect"]
            self.setting = message["setting"]
        self.grace_seconds = message.get("grace_seconds", self.grace_seconds)
        if "path" in message:
            self.paths.add(Path(message["path"]))
        if "shm_prefix" in message:
            self.shm_prefixes.add(message["shm_prefix"])
        if "pid" in message:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                root = psutil.Process(message["pid"])
                self.roots.append(root)
                if message["whole_session"] and os.getsid(root.pid) == root.pid:
                    self.sessions.add(root.pid)
            self.refresh()

    def refresh(self) -> None:
        """Record descendants and their shared memory while they are alive."""
        for root in self.roots:
            with contextlib.suppress(psutil.Error):
                self.processes.update([root, *root.children(recursive=True)])
        if self.sessions:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                    if os.getsid(process.pid) in self.sessions:
                        self.processes.add(process)
        # Spare other reapers: they still have to clean up, and end by themselves.
        self.processes = {p for p in self.processes if p.is_running() and not _is_reaper(p)}
        if self.shm_prefixes:
            for process in self.processes:
                with contextlib.suppress(psutil.Error, OSError):
                    self._note_files_of(process)

    def _note_files_of(self, process: psutil.Process) -> None:
        # Python's segments have random names; only the maps of a live process show their owner.
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        self.paths.update(Path(path) for path in re.findall(r"(/dev/shm/psm_\w+)", maps))
        if process.name() == "tritonserver":
            self.triton_starts.add(process.create_time())

    def owner_hangs(self) -> bool:
        """Kill the owner if it missed its deadline; return True if so."""
        silent = self.silence.seconds()
        if silent <= self.expected_seconds:
            return False
        reason = (
            f"the main process (process {self.owner}) hangs: no heartbeat for {silent:.0f} s "
            f"({self.setting})"
        )
        print(f"error: {reason}. Its reaper ends it; start it again", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.owner, signal.SIGKILL)
        return True

    def clean_up(self) -> None:
        self.refresh()
        if self.grace_seconds > 0:
            roots = [process for process in self.roots if process.pid != self.owner]
            for process in roots:  # SIGTERM for roots only: they end their children in order
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            _wait_until_gone(roots, self.grace_seconds)
            self.refresh()  # include processes started meanwhile
        left = [
            process for process in self.processes if process.pid not in (os.getpid(), self.owner)
        ]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait_until_gone(left, KILL_SECONDS)
        for prefix in self.shm_prefixes:
            self.paths.update(SHM_FOLDER.glob(prefix + "*"))
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)  # if it is a folder; unlink is for a file
            with contextlib.suppress(OSError):
                path.unlink()
        # Triton's Python backend creates an empty folder at startup, which only its time
        # identifies. rmdir spares folders that are not empty.
        for folder in Path("/tmp").glob("python_env_??????"):
            with contextlib.suppress(OSError):
                made = folder.stat().st_mtime
                if any(0.0 <= made - start <= 3.0 for start in self.triton_starts):
                    folder.rmdir()


def name_stopped() -> str:
    """Describe descendants of this process that a signal or debugger has stopped.

    The text is empty if there are none.
    """
    descriptions = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                descriptions.append(
                    f"; process {process.pid} ({' '.join(process.cmdline()[:3])}) is stopped"
                )
    return "".join(descriptions)


def _wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """Wait until the processes have ended.

    Zombies count as ended, since their parent may never reap them.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_is_alive(process) for process in processes):
        time.sleep(0.05)


def _is_reaper(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return MODULE in process.cmdline()
    return False


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Slurm signals every process, but the reaper still has to clean up.
        signal.signal(number, signal.SIG_IGN)
    connection = connect_to_parent(death_signal=None)
    watch = _Watch(owner=int(sys.argv[2]))
    next_refresh = time.monotonic()
    while True:
        if connection.poll(max(0.0, next_refresh - time.monotonic())):
            message = receive(connection)
            if message is None:
                break
            watch.on_message(message)
        if time.monotonic() >= next_refresh:
            send(connection, {})
            if watch.owner_hangs():
                break
            watch.refresh()
            next_refresh = time.monotonic() + REFRESH_SECONDS
    watch.clean_up()


if __name__ == "__main__":
    main()
