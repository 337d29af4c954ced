"""What hosts of a user's code share: they fork a process for each sample or episode.

A host has neither threads nor torch, since it forks. `user_code.py` is the owner's side.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Set
from pathlib import Path
from select import POLLIN, POLLOUT, POLLRDHUP, poll
from typing import Any

MEBIBYTE = 1 << 20
MESSAGE_LETTERS = 500  # an answer must fit into a pipe that nobody reads yet
_FILE_MEBIBYTES = 64  # limit of each file that the code writes
_MAX_WAIT_SECONDS = 3600.0  # poll(2) takes no more than 24 days


def wait_for_events(
    owner: int,
    forks: Iterable[int],
    deadline: float,
    *,
    written: Iterable[int] = (),
    reads_owner: bool = True,
) -> dict[int, int]:
    """Wait for the owner or a fork; return the events of poll(2) by descriptor.

    Args:
        forks: descriptors that forks write to.
        written: descriptors that forks read from, which are waited for until they have room.
        deadline: in time.monotonic.
        reads_owner: also return when the owner has sent something; its end is always returned.
    """
    poller = poll()
    poller.register(owner, POLLRDHUP | (POLLIN if reads_owner else 0))
    for descriptor in forks:
        poller.register(descriptor, POLLIN)
    for descriptor in written:
        poller.register(descriptor, POLLOUT)
    seconds = min(_MAX_WAIT_SECONDS, max(0.0, deadline - time.monotonic()))
    return dict(poller.poll(math.ceil(1000 * seconds)))


def reap_others(pids: Set[int]) -> None:
    """Reap what ended processes left behind; in a sandbox this is process 1, which inherits it.

    `pids` are the processes that still run.
    """
    with contextlib.suppress(ChildProcessError):
        while (
            ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and ended.si_pid not in pids:
            os.waitpid(ended.si_pid, 0)


def end_process(pid: int) -> int:
    """Kill a process, which may have ended already, and its group; return its exit code."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def use_of(pid: int) -> str:
    """Return what a process has used, which tells slow code from code that waits."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        fields = line.rpartition(")")[2].split()  # man 5 proc, from the third
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        # rounded: alike ones are counted
        return f"it used {seconds:.0f} s of CPU and was in state {fields[0]}"
    return ""


def share_no_flags() -> None:
    """Reopen the output, so that other processes do not share flags such as O_NONBLOCK."""
    with contextlib.suppress(OSError):
        output = os.open("/proc/self/fd/1", os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)


def place_of(error: BaseException, called_by: Collection[str] = ()) -> str:
    """Return the last line of the code's own file in the error's traceback, if any.

    `called_by` are files of this package between the caller and that code.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if frame.filename not in called_by]
    frames_there = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" at {frames_there[-1].filename}:{frames_there[-1].lineno}" if frames_there else ""


def definition_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f" (defined at {code.co_filename}:{code.co_firstlineno})" if code else ""


def source_sha256(function: Callable[..., Any]) -> str | None:
    """Return the SHA-256 of the file that defines a function; None if there is none."""
    with contextlib.suppress(TypeError):
        file = inspect.getsourcefile(function)
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    return None


def limit_memory(memory: int) -> None:
    """Set the resource limits that forks inherit, in bytes; this process needs little itself."""
    used = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    files = _FILE_MEBIBYTES * MEBIBYTE
    limits = {
        resource.RLIMIT_AS: used + memory,
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
