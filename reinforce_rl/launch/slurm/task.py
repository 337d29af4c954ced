"""The wrapper of one task of a job: tells the program its place among the ranks, and writes down how it ended."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED, ReinforceError
from reinforce_rl.launch.slurm.orphans import end_orphans
from reinforce_rl.launch.slurm.outcome import TaskEnd, record
from reinforce_rl.launch.slurm.ports import claim_ports, own_address
from reinforce_rl.launch.slurm.rendezvous import Place, publish, wait_for
from reinforce_rl.launch.slurm.settings import SRUN, TORCHRUN
from reinforce_rl.utils.process import adopt_orphans, die_with_parent

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ORPHAN_SECONDS = 45.0  # a reward server drains for 30 s


@dataclass(frozen=True)
class Task:
    """This task.

    Attributes:
        component: such as actor or rm-0.
        folder: of the attempt.
        launcher: `SRUN` or `TORCHRUN`.
        devices: ranks on each node.
        serves: it is a reward server, which wants a port for HTTP.
        number: of the task in its step.
        local_number: on its node.
        node, nodes: which node of the step, and how many there are.
    """

    component: str
    folder: Path
    launcher: str
    devices: int
    serves: bool
    number: int
    local_number: int
    node: int
    nodes: int

    @property
    def ranks(self) -> str:
        """What ranks this task is."""
        if self.launcher == SRUN or self.devices == 1:
            return str(self.number)
        return f"{self.node * self.devices}-{(self.node + 1) * self.devices - 1}"

    def end(self, code: int, reason: str = "") -> TaskEnd:
        """For the record."""
        return TaskEnd(self.component, self.number, self.ranks, socket.gethostname(), code, time.time(), reason)


def command_of(task: Task, place: Place, script: Sequence[str]) -> list[str]:
    """The program with its arguments.

    Args:
        task: this one.
        place: of the component's first task.
        script: a Python file and its arguments.
    """
    command = [sys.executable]
    if task.launcher == TORCHRUN:
        command += ["-m", "reinforce_rl.utils.ranks", "--nnodes", str(task.nodes), "--node-rank", str(task.node)]
        command += ["--nproc-per-node", str(task.devices)]
        command += ["--master-addr", place.address, "--master-port", str(place.rank_port)]
    command += script
    if task.serves:
        command += [f"inference.host={place.address}", f"inference.port={place.http_port}"]
    return command


def environment_of(task: Task, place: Place, environment: Mapping[str, str], repository: Path) -> dict[str, str]:
    """The program's environment: this task's own, and what torchrun would say where it does not."""
    cpus = environment.get("SLURM_CPUS_PER_TASK", "1")
    result = {"OMP_NUM_THREADS": cpus if task.launcher == SRUN else "1", "GOMP_SPINCOUNT": "0", **environment}
    result["PYTHONUNBUFFERED"] = "1"
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(repository), environment.get("PYTHONPATH", "")]))
    if task.launcher == SRUN:
        result |= {
            "RANK": str(task.number),
            "WORLD_SIZE": str(task.nodes * task.devices),
            "LOCAL_RANK": str(task.local_number),
            "LOCAL_WORLD_SIZE": str(task.devices),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.rank_port),
        }
    return result


class _Signals:
    """Passes signals on to the program, once it is there."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        if self._child is not None:
            self._child.send_signal(number)

    def pass_to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if self.first is not None:
            child.send_signal(self.first)


@contextlib.contextmanager
def _place(task: Task, peers: Sequence[str], seconds: float, signals: _Signals) -> Iterator[Place | None]:
    """Where the component's first task is; that task itself holds its ports meanwhile. None after a signal."""
    if task.number:
        yield wait_for(task.folder, task.component, seconds, lambda: signals.first is not None)
        return
    with claim_ports(2 if task.serves else 1, f"{task.folder.name} {task.component}") as ports:
        place = Place(socket.gethostname(), own_address(peers), *ports)
        publish(task.folder, task.component, place)
        yield place


def run(
    task: Task, script: Sequence[str], repository: Path, peers: Sequence[str], seconds: float
) -> tuple[TaskEnd, bool]:
    """Run the program to its end.

    Returns:
        how it ended, and whether srun is to think well of it: it has saved, or was asked to end. For
        `--kill-on-bad-exit` would kill the tasks that still save.

    Raises:
        ReinforceError: it could not be started.
    """
    signals = _Signals()
    adopt_orphans()
    parent = os.getpid()

    def in_child() -> None:
        # Else the program would outlive a wrapper that is killed, and other ranks would wait for it.
        die_with_parent(parent)
        if task.serves:  # Slurm signals every process; this signal is the actor's, and would end a server
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    with _place(task, peers, seconds, signals) as place:
        if place is None or signals.first is not None:
            return task.end(128 + (signals.first or signal.SIGTERM), "stopped before the program began"), True
        command = command_of(task, place, script)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=environment_of(task, place, os.environ, repository),
                preexec_fn=in_child,
            )
        except OSError as error:
            raise ReinforceError(f"cannot start {command[0]}: {error.strerror}") from error
        signals.pass_to(child)
        code = child.wait()
        # Slurm may send a signal twice, and Python no longer listens when it has all but ended.
        asked = signals.first is not None and -code in SIGNALS
        end = task.end(code if code >= 0 else 128 - code)
        end_orphans(ORPHAN_SECONDS)  # while the ports are still locked
        return end, code == EXIT_STOPPED or asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run the task; returns its exit code for srun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--component", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--launcher", choices=(SRUN, TORCHRUN), required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for the first task to say where it is")
    parser.add_argument("--peers", nargs="*", default=(), help="names of other nodes")
    parser.add_argument("--serves", action="store_true")
    parser.add_argument("script", nargs="+")
    options = parser.parse_args(argv)
    task = Task(
        component=options.component,
        folder=options.folder,
        launcher=options.launcher,
        devices=options.devices,
        serves=options.serves,
        number=int(os.environ["SLURM_PROCID"]),
        local_number=int(os.environ["SLURM_LOCALID"]),
        node=int(os.environ["SLURM_NODEID"]),
        nodes=int(os.environ["SLURM_STEP_NUM_NODES"]),
    )
    try:
        end, is_well = run(task, options.script, options.repository, options.peers, options.seconds)
    except (ReinforceError, OSError) as error:  # the latter of a full disk, which nothing can be published on
        print(f"error: {error}", file=sys.stderr, flush=True)
        end, is_well = task.end(EXIT_ERROR, str(error)), False
    try:
        record(task.folder, end)
    except OSError as error:
        print(f"error: cannot write down how this task ended, {end}: {error}", file=sys.stderr, flush=True)
    return 0 if is_well else end.code


if __name__ == "__main__":
    sys.exit(main())
