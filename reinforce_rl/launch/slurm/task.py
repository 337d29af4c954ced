"""The wrapper of one task: runs its program, records how it ended, and ends what it leaves behind.

A program that is killed leaves its children, and a server's reaper outlives it for a moment; not
every Slurm has cgroups. `srun` returns the highest code of its tasks, so that each writes down its
own.

Usage: python -m reinforce_rl.launch.slurm.task [--gpus=PLACE,...] STEP FOLDER COMMAND...

`--gpus` says which of the GPUs that Slurm gives the task the program gets, such as 0,1 for the
first two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED, ReinforceError
from reinforce_rl.launch.slurm.outcome import TaskEnd, record
from reinforce_rl.launch.slurm.settings import ACTOR
from reinforce_rl.utils.process import Child, adopt_orphans

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ORPHAN_SECONDS = 45.0  # a reward server drains for 30 s
POLL_SECONDS = 0.1
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


class StopSignal:
    """Keeps the first signal to stop, and passes all on to a child, if it has one."""

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self.number: int | None = None
        self._child: Child | None = None
        for number in signals:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self._child is not None:
            self._child.send_signal(number)

    def pass_to(self, child: Child) -> None:
        self._child = child
        if self.number is not None:
            child.send_signal(self.number)


def run(step: str, number: int, command: Sequence[str]) -> tuple[TaskEnd, bool]:
    """Run a program to its end; return how it ended, and whether that was well.

    It was if the program has saved or was asked to end: `--kill-on-bad-exit` must not kill tasks
    that still save. Raises OSError: the program cannot be started.
    """
    stop = StopSignal()
    adopt_orphans()
    # The program must not outlive a killed wrapper: other ranks would wait for it. Others than the
    # actor ignore SIGUSR1: whoever signals a job signals every process, and means the actor.
    child = Child(
        command,
        own_session=False,
        death_signal=signal.SIGKILL,
        ignored_signals=[] if step == ACTOR else [signal.SIGUSR1],
    )
    stop.pass_to(child)
    code = child.process.wait()
    # Slurm may signal twice, and Python restores default handlers during its shutdown.
    was_asked = stop.number is not None and -code in SIGNALS
    end = TaskEnd(
        step, number, socket.gethostname(), code if code >= 0 else 128 - code, time.time()
    )
    end_orphans(ORPHAN_SECONDS)
    return end, code == EXIT_STOPPED or was_asked


def end_orphans(seconds: float) -> None:
    """Send SIGTERM to all children and adopted orphans in turn, SIGKILL to those alive after
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    signalled: set[int] = set()
    with contextlib.suppress(ChildProcessError):  # of waitpid, once none is left
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            is_late = time.monotonic() > deadline
            for pid in _children():
                if is_late or pid not in signalled:
                    signalled.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            time.sleep(POLL_SECONDS)


def _children() -> list[int]:
    this_process = os.getpid()
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may contain anything; state and ppid follow it.
            parent = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]
            if int(parent) == this_process:
                children.append(int(stat.parent.name))
    return children


def gpus_at(places: Sequence[str], given: str | None) -> str:
    """Return the value of `GPUS_VARIABLE` for the GPUs at these places of `given`, its value.

    Raises ReinforceError: there are not as many.
    """
    if given is None:  # Slurm does not know of GPUs: a job has all of a node
        return ",".join(places)
    if given in ("", "NoDevFiles"):  # none
        return given
    gpus = given.split(",")  # numbers, or the names of parts of GPUs
    if max(map(int, places)) >= len(gpus):
        raise ReinforceError(
            f"Slurm gives this task the GPUs {given} ({GPUS_VARIABLE}); expected one for each task "
            "of a node of component 2, without --gpus-per-task and --gpu-bind",
            key="slurm.task.too_few_gpus",
        )
    return ",".join(gpus[int(place)] for place in places)


def main(argv: Sequence[str]) -> int:
    """Run the task; return the exit code for srun."""
    places = [arg.partition("=")[2] for arg in argv[:1] if arg.startswith("--gpus=")]
    step, folder, *command = argv[len(places) :]
    number = int(os.environ["SLURM_PROCID"])
    try:
        if places:
            gpus = gpus_at(places[0].split(","), os.environ.get(GPUS_VARIABLE))
            os.environ[GPUS_VARIABLE] = gpus
        end, is_well = run(step, number, command)
    except (OSError, ReinforceError) as error:
        sentence = error.with_keys() if isinstance(error, ReinforceError) else str(error)
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        end = TaskEnd(step, number, socket.gethostname(), EXIT_ERROR, time.time(), str(error))
        is_well = False
    try:
        record(Path(folder), end)
    except OSError as error:
        failed = ReinforceError(
            f"cannot record how this task ended, {end}: {error}",
            key="slurm.task.end_not_written",
        )
        print(f"error: {failed.with_keys()}", file=sys.stderr, flush=True)
    return 0 if is_well else end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
