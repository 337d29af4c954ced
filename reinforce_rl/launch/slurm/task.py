"""The wrapper of one task: starts its program as a rank, records how it ended, and ends what it leaves behind.

A launcher that is killed leaves its ranks, and a server's reaper outlives it for a moment; not every Slurm has
cgroups.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED, ReinforceError
from reinforce_rl.launch.slurm.outcome import TaskEnd, record
from reinforce_rl.launch.slurm.rendezvous import Endpoint, publish, wait_for_endpoint
from reinforce_rl.launch.slurm.settings import SRUN, TORCHRUN
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.net import claim_ports, own_address
from reinforce_rl.utils.process import Child, adopt_orphans

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ORPHAN_SECONDS = 45.0  # a reward server drains for 30 s
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Task:
    component: str  # such as actor or rm-0
    folder: Path  # of the attempt
    repository: str
    launcher: str  # `SRUN` or `TORCHRUN`
    devices: int  # ranks per node
    number: int  # in its step
    local_number: int  # on its node
    node: int  # index of its node in the step
    nodes: int  # number of nodes
    serves: bool = False  # it is a reward server, which needs an HTTP port
    listens: bool = False  # for generators, at its first task's address
    # of a generator, which may share its node: rank there of its first task
    first_local: int | None = None
    seconds: float = 0.0  # for the first task to publish its endpoint
    peers: Sequence[str] = ()  # names of other nodes
    script: Sequence[str] = ()  # arguments of Python: a file, or -m and a name, and what follows

    @property
    def ranks(self) -> str:
        if self.launcher == SRUN or self.devices == 1:
            return str(self.number)
        return f"{self.node * self.devices}-{(self.node + 1) * self.devices - 1}"

    def end(self, code: int, reason: str = "") -> TaskEnd:
        return TaskEnd(
            self.component, self.number, self.ranks, socket.gethostname(), code, time.time(), reason
        )


def command_of(task: Task, first: Endpoint) -> list[str]:
    """Return the command of the task's program; `first` is the endpoint of the component's first task."""
    command = [sys.executable]
    if task.launcher == TORCHRUN:
        command += [
            "-m",
            "reinforce_rl.utils.ranks",
            "--nnodes",
            str(task.nodes),
            "--node-rank",
            str(task.node),
        ]
        command += ["--nproc-per-node", str(task.devices)]
        command += ["--master-addr", first.address, "--master-port", str(first.rank_port)]
    command += task.script
    if task.serves:
        command += [f"inference.host={first.address}", f"inference.port={first.http_port}"]
    if task.listens:
        command.append(f"generator_host={first.address}")
    return command


def environment_of(task: Task, first: Endpoint, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment; without torchrun, including the variables that torchrun would set."""
    cpus = environment.get("SLURM_CPUS_PER_TASK", "1")
    result = {
        "OMP_NUM_THREADS": cpus if task.launcher == SRUN else "1",
        "GOMP_SPINCOUNT": "0",
        **environment,
    }
    result["PYTHONUNBUFFERED"] = "1"
    result["PYTHONPATH"] = os.pathsep.join(
        filter(None, [task.repository, environment.get("PYTHONPATH", "")])
    )
    if task.launcher == SRUN:
        place = JobRank(
            rank=task.number,
            size=task.nodes * task.devices,
            local_rank=(task.first_local or 0) + task.local_number,
            local_size=task.devices,
            host=first.address,
            port=str(first.rank_port),
        )
        result |= place.variables()
    return result


class StopSignal:
    """Keeps the first signal to stop, and passes all on to a child, if it has one."""

    def __init__(self, signals: Sequence[int] = SIGNALS) -> None:
        self.number: int | None = None
        self._child: Child | None = None
        for number in signals:
            signal.signal(number, self._on_signal)

    @property
    def name(self) -> str:
        return "" if self.number is None else signal.Signals(self.number).name

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if self._child is not None:
            self._child.send_signal(number)

    def pass_to(self, child: Child) -> None:
        self._child = child
        if self.number is not None:
            child.send_signal(self.number)


def run(task: Task) -> tuple[TaskEnd, bool]:
    """Run the program to its end; a ReinforceError or OSError says why it could not be started.

    Returns how it ended, and whether to return 0 to srun: it has saved or was asked to end, and `--kill-on-bad-exit`
    must not kill tasks that still save.
    """
    stop = StopSignal()
    adopt_orphans()
    with contextlib.ExitStack() as held:
        if task.number:
            first = wait_for_endpoint(
                task.folder, task.component, task.seconds, lambda: stop.number is not None
            )
        else:
            ports = held.enter_context(
                claim_ports(2 if task.serves else 1, f"{task.folder.name} {task.component}")
            )
            first = Endpoint(
                socket.gethostname(),
                own_address(task.peers),
                rank_port=ports[0],
                http_port=ports[1] if task.serves else 0,
            )
            publish(task.folder, task.component, first)
        if first is None or stop.number is not None:
            return task.end(
                128 + (stop.number or signal.SIGTERM), "stopped before the program began"
            ), True
        # The program must not outlive a killed wrapper: other ranks would wait for it. Others than
        # the actor ignore SIGUSR1: Slurm signals every process, and it is meant for the actor.
        child = Child(
            command_of(task, first),
            own_session=False,
            death_signal=signal.SIGKILL,
            ignored_signals=[signal.SIGUSR1] if task.serves or task.first_local is not None else [],
            env=environment_of(task, first, os.environ),
        )
        stop.pass_to(child)
        code = child.process.wait()
        # Slurm may signal twice, and Python restores default handlers during its shutdown.
        asked = stop.number is not None and -code in SIGNALS
        end = task.end(code if code >= 0 else 128 - code)
        end_orphans(ORPHAN_SECONDS)  # while the ports are still claimed
        return end, code == EXIT_STOPPED or asked


def end_orphans(seconds: float) -> None:
    """Send SIGTERM to all children and adopted orphans in turn, SIGKILL to those alive after `seconds`."""
    deadline = time.monotonic() + seconds
    signalled: set[int] = set()
    with contextlib.suppress(ChildProcessError):  # of waitpid, once none is left
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            late = time.monotonic() > deadline
            for pid in _children():
                if late or pid not in signalled:
                    signalled.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(POLL_SECONDS)


def _children() -> list[int]:
    me = os.getpid()
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may contain anything; state and ppid follow it.
            if int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == me:
                found.append(int(stat.parent.name))
    return found


def main(text: str) -> int:
    """Run the task whose fields, but for its place in the step, are this JSON; return the exit code for srun."""
    slurm = {
        "number": "PROCID",
        "local_number": "LOCALID",
        "node": "NODEID",
        "nodes": "STEP_NUM_NODES",
    }
    place = {name: int(os.environ[f"SLURM_{variable}"]) for name, variable in slurm.items()}
    given = json.loads(text)
    task = Task(**given | place | {"folder": Path(given["folder"])})
    try:
        end, is_well = run(task)
    except (ReinforceError, OSError) as error:  # OSError: a full disk, say
        said = error.with_keys() if isinstance(error, ReinforceError) else str(error)
        print(f"error: {said}", file=sys.stderr, flush=True)
        end = task.end(EXIT_ERROR, str(error))
        is_well = False
    try:
        record(task.folder, end)
    except OSError as error:
        failed = ReinforceError(
            f"cannot write down how this task ended, {end}: {error}",
            key="slurm.task.end_not_written",
        )
        print(f"error: {failed.with_keys()}", file=sys.stderr, flush=True)
    return 0 if is_well else end.code
