"""Runs a script on several ranks of one machine, for tests of what only happens between ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]


def run_ranks(script: str | Path, nproc: int, *args: object, timeout: float = 120) -> str:
    """Run a Python file under torchrun and return what its ranks printed.

    Args:
        script: must guard its entry with `if __name__ == "__main__"`; `helpers.*` can be imported in it.
        nproc: ranks.
        args: its command line.
        timeout: seconds for the whole run.

    Raises:
        AssertionError: a rank failed or the time is up, with the output. Nothing is left running in either case.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        [*launcher, str(script), *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            output, _ = process.communicate()
            raise AssertionError(f"{script} on {nproc} ranks ran past {timeout} s:\n{output}") from None
        except BaseException:
            kill_tree(process.pid)
            raise
    if process.returncode:
        raise AssertionError(f"{script} on {nproc} ranks ended with {process.returncode}:\n{output}")
    return output


def kill_tree(pid: int) -> None:
    """End a launcher and its ranks. torchrun gives each rank a session of its own, so a group would miss them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
