"""The process that forks one for each sample: `python -m reinforce_rl.rewards.function_process.host`.

The trainer and the reward server have threads, torch and CUDA, and cannot fork. So this small process, which has none
of that, imports the functions and forks itself for each sample. Whatever a sample does to its process (it replaces the
function, raises, exits, never returns), the next sample finds the state that the import left. The end of the input
means that the owner is gone, however it went; then this process ends with all of its samples.

Two one-way `multiprocessing.connection`s, whose descriptors are the arguments, connect it with its owner.

To it:    first `FunctionPool`'s settings, then (ID, JSON of {"function", "prompt", "response", "record"}) for each
          sample; {} is a ping
From it:  JSON: first {"faults": [...], "sources": {NAME: sha256}}, then {"id", "status", "value", "fault", "message"}
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import signal
import stat
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from reinforce_rl.rewards import base
from reinforce_rl.rewards.function_process import worker as function_worker
from reinforce_rl.rewards.function_process.loading import LoadFault, load_function, source_sha256
from reinforce_rl.rewards.function_process.worker import Outcome

ANSWER_BYTES = 1 << 16  # at most
MEBIBYTE = 1 << 20
FILE_MEBIBYTES = 64  # of each file that a function writes
MOST_SECONDS = 3600.0  # of one wait; poll(2) takes no more than 24 days
OWNER = 0  # its end of the input says that this host is not wanted any more; a module may replace sys.stdin
STATUSES = (base.STATUS_OK, base.STATUS_NOT_FINITE, base.STATUS_INTERNAL)


@dataclass
class _Sample:
    """One that is being scored."""

    id: int
    pid: int
    answer_fd: int
    deadline: float  # of time.monotonic
    answer: bytearray = field(default_factory=bytearray)


class _Host:
    """Forks for the samples that come on one connection and answers on another. It has one thread, since it forks."""

    def __init__(
        self, functions: function_worker.Functions, settings: dict[str, Any], requests: Connection, answers: Connection
    ):
        self._functions = functions
        self._num_workers = int(settings["num_workers"])
        self._timeout = float(settings["sample_timeout_seconds"])
        self._requests = requests
        self._answers = answers
        self._running: dict[int, _Sample] = {}  # by answer_fd

    def run(self) -> None:
        """Until the input ends."""
        while True:
            first = min((sample.deadline for sample in self._running.values()), default=None)
            seconds = None if first is None else min(MOST_SECONDS, max(0.0, first - time.monotonic()))
            # A sample is read when there is room for it, so a large batch waits in the owner's memory.
            inputs = [self._requests] if len(self._running) < self._num_workers else []
            anything: list[Any] = [OWNER, *inputs, *self._running]
            ready = wait(anything, seconds)
            if OWNER in ready:
                break
            if self._requests in ready:
                self._start(*self._requests.recv())
            for sample in [self._running[fd] for fd in ready if isinstance(fd, int)]:
                self._read_answer(sample)
            now = time.monotonic()
            for sample in [one for one in self._running.values() if one.deadline <= now]:
                self._finish(sample, Outcome(base.STATUS_TIMED_OUT, fault="exceeded the time limit"))
        for sample in self._running.values():
            _end(sample.pid)

    def _start(self, number: int, request: bytes) -> None:
        parent = os.getpid()
        try:
            read_end, write_end = os.pipe()
            pid = os.fork()
        except OSError as error:  # too many processes or files
            outcome = Outcome(base.STATUS_INTERNAL, fault=f"no process could be started: {error}")
            self.send({"id": number, **asdict(outcome)})
            return
        if pid == 0:
            try:
                for fd in (self._requests.fileno(), self._answers.fileno(), read_end, *self._running):
                    os.close(fd)
                function_worker.work(self._functions, request, write_end, parent)
            finally:
                os._exit(1)
        os.close(write_end)
        self._running[read_end] = _Sample(number, pid, read_end, time.monotonic() + self._timeout)

    def _read_answer(self, sample: _Sample) -> None:
        chunk = os.read(sample.answer_fd, ANSWER_BYTES)
        sample.answer += chunk
        if not chunk or b"\n" in chunk or len(sample.answer) > ANSWER_BYTES:
            self._finish(sample)

    def _reap_orphans(self) -> None:
        """In a sandbox this is process 1, which inherits what samples have started."""
        own = {sample.pid for sample in self._running.values()}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
                os.waitpid(ended.si_pid, 0)

    def _finish(self, sample: _Sample, outcome: Outcome | None = None) -> None:
        """End a sample's process and answer for it: what it said itself, where it was not too late."""
        code = _end(sample.pid)
        del self._running[sample.answer_fd]
        os.close(sample.answer_fd)
        self._reap_orphans()
        if outcome is None:
            try:
                said = json.loads(sample.answer.partition(b"\n")[0])
                outcome = Outcome(int(said["status"]), float(said["value"]), str(said["fault"]), str(said["message"]))
                if outcome.status not in STATUSES:
                    raise ValueError("the function has written it, not its process")
            except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                outcome = Outcome(base.STATUS_INTERNAL, fault=f"its process ended with {how}")
        self.send({"id": sample.id, **asdict(outcome)})

    def send(self, message: dict[str, Any]) -> None:
        """To the owner."""
        self._answers.send_bytes(json.dumps(message).encode())


def _end(pid: int) -> int:
    """Kill a process that may have ended by itself, and what it started; its exit code."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(requests: Connection, answers: Connection) -> None:
    """Serve until the input ends."""
    settings = requests.recv()
    functions, faults = {}, []
    for name, spec in settings["functions"].items():
        before = _open_files()
        try:
            functions[name] = load_function(spec)
        except LoadFault as fault:
            faults.append(str(fault))
        for path in sorted(_open_files() - before):
            faults.append(
                f"{spec.key}.name is {spec.name!r}, whose module keeps {path} open. All samples would share the place "
                "where it is read next: read it whole at the module's level, or open it in the function"
            )
    sys.stdout.flush()  # else each sample would print it once more
    gc.freeze()  # a collection in a sample's process would copy every page
    _limit(settings["sample_memory_mb"] * MEBIBYTE)
    host = _Host(functions, settings, requests, answers)
    host.send({"faults": faults, "sources": {name: source_sha256(function) for name, function in functions.items()}})
    if not faults:
        host.run()
    os._exit(0)


def _open_files() -> set[str]:
    """The regular files that this process may read on."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            is_read = fcntl.fcntl(int(fd), fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if is_read and stat.S_ISREG(os.fstat(int(fd)).st_mode):
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _limit(memory: int) -> None:
    """Bound what each sample's process may use; this process, whose limits they inherit, needs little."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: used + memory,
        resource.RLIMIT_FSIZE: FILE_MEBIBYTES * MEBIBYTE,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
