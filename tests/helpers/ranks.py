"""Run functions and scripts on several ranks of one machine."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from helpers import warm

from reinforce_rl.utils.net import free_port
from reinforce_rl.utils.process import die_with_parent

TESTS = Path(__file__).parents[1]


def call_on_ranks(
    function: Callable[..., Any], nproc: int, *args: object, timeout: float = 120
) -> list[Any]:
    """Call a module's function in a process per rank; return the results by rank.

    Ranks are forks of a process that has imported torch and megatron-core, which takes four
    seconds. What they print is printed here at the end.

    Args:
        timeout: seconds for the whole run.

    Raises:
        AssertionError: a rank failed or timed out, with the output; all ranks are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", *warm.MODULES])
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, environment_of_ranks()),
    ):
        ranks = []
        for rank in range(nproc):
            environment = {
                **os.environ,
                **address,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            of_rank = (Path(folder), environment, reference(function), args)
            process = context.Process(target=_be_rank, args=of_rank)
            process.start()
            ranks.append(process)
        try:
            failure = _failure(ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    kill_tree(process.pid)
                    process.join()
        printed = Path(folder, "output").read_text(encoding="utf-8", errors="replace")
        assert not failure, f"{function.__name__} on {nproc} ranks {failure}:\n{printed}"
        print(printed)
        files = [Path(folder, str(rank)) for rank in range(nproc)]
        return [torch.load(file, weights_only=False) for file in files]


def _be_rank(
    folder: Path, environment: dict[str, str], where: Sequence[str], args: Sequence[object]
) -> None:
    # A collection would copy the memory that it marks.
    gc.freeze()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(output, target)
    die_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    torch.save(resolve(*where)(*args), folder / environment["RANK"])


def reference(function: Callable[..., Any]) -> list[str]:
    """Return the arguments of `resolve` in another process."""
    return [function.__module__, inspect.getfile(function), function.__qualname__]


def resolve(module: str, file: str, name: str) -> Callable[..., Any]:
    if module not in sys.modules:
        # A test module is not importable by its name.
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return getattr(sys.modules[module], name)


def _failure(ranks: Sequence[Any], deadline: float) -> str:
    """Wait for all ranks or the first that fails; return how it failed."""
    while running := [process.sentinel for process in ranks if process.exitcode is None]:
        if not wait(running, deadline - time.monotonic()):
            return "timed out"
        for process in ranks:
            if process.exitcode:
                return f"ended with {process.exitcode}"
    return ""


@contextlib.contextmanager
def one_group(seconds: float = 60.0) -> Iterator[None]:
    """The process group of several meshes: joining the same store again is a race."""
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    yield
    torch.distributed.destroy_process_group()


def launch_ranks(
    script: str | Path, nproc: int, *args: object, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a Python file on the ranks of `reinforce_rl.utils.ranks`."""
    launcher = [sys.executable, "-m", "reinforce_rl.utils.ranks", "--standalone"]
    command = [*launcher, "--nproc-per-node", nproc, script, *args]
    return subprocess.run(
        list(map(str, command)),
        env=environment_of_ranks(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_ranks(script: str | Path, nproc: int, *args: object, timeout: float = 120) -> str:
    """Run a file like `launch_ranks`, to its success, and return what it printed."""
    done = launch_ranks(script, nproc, *args, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment_of_ranks() -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def kill_tree(pid: int) -> None:
    """Kill a process, its session and its descendants, including those in other sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        descendants = process.children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for descendant in (*descendants, process):
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
