"""Run a script on several ranks of one machine."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]
START_SECONDS = 60.0  # start of the process that forks ranks
_PARENTS: dict[str, subprocess.Popen[str]] = {}


def run_ranks(script: str | Path, nproc: int, *args: object, timeout: float = 120) -> str:
    """Run a Python file on several ranks and return their output.

    Ranks are forks of a process, one per PYTHONPATH, that has imported torch and megatron-core,
    which takes four seconds.

    Args:
        script: guards its entry with `if __name__ == "__main__"`; may import `helpers.*`.
        timeout: seconds for the whole run.

    Raises:
        AssertionError: a rank failed or timed out, with the output; all processes are killed.
    """
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    parent = _parent_of_ranks(environment["PYTHONPATH"], environment)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
        request = {
            "script": str(script),
            "args": [*map(str, args)],
            "ranks": nproc,
            "environment": environment,
        }
        assert parent.stdin is not None
        assert parent.stdout is not None
        status = None
        try:
            parent.stdin.write(json.dumps({**request, "output": output.name}) + "\n")
            parent.stdin.flush()
            ready, _, _ = select.select([parent.stdout], [], [], timeout + START_SECONDS)
            status = int(parent.stdout.readline()) if ready else None
        finally:
            if status is None:
                kill_tree(parent.pid)
                _PARENTS.pop(environment["PYTHONPATH"], None)
        printed = output.read()
    if status is None:
        raise AssertionError(f"{script} on {nproc} ranks ran past {timeout} s:\n{printed}")
    if status:
        raise AssertionError(f"{script} on {nproc} ranks ended with {status}:\n{printed}")
    return printed


def _parent_of_ranks(path: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    if path not in _PARENTS:
        command = [sys.executable, str(TESTS / "helpers" / "forked_ranks.py")]
        parent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )
        _PARENTS[path] = parent
        atexit.register(kill_tree, parent.pid)
    return _PARENTS[path]


def kill_tree(pid: int) -> None:
    """Kill a launcher and its ranks, including ranks in their own sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
