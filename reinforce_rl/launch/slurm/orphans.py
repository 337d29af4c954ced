"""What a program leaves behind: a launcher that is killed leaves its ranks, and a guard outlives its server a moment.

A cgroup would catch them, but not every Slurm has cgroups, nor does a step's end give a guard its moment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

POLL_SECONDS = 0.1


def end_orphans(seconds: float) -> None:
    """SIGTERM to all children and what they leave in turn, and SIGKILL to those that live on for so long."""
    deadline = time.monotonic() + seconds
    told: set[int] = set()
    while _reap():
        late = time.monotonic() > deadline
        for pid in _children():
            if late or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def _reap() -> bool:
    """Collect those that have ended; whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


def _children() -> list[int]:
    me, found = os.getpid(), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; the state and the parent come after it.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == me:
                found.append(int(stat.parent.name))
    return found
