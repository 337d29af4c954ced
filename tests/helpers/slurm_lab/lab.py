"""Start and stop the lab's daemons, submit jobs, and wait for them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from helpers.slurm_lab.configuration import NODES, write_configuration

if TYPE_CHECKING:
    from typing_extensions import Self

NAMESPACES = Path(__file__).with_name("namespaces.sh")
UNSHARE = [
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "squeue",
    "sinfo",
    "scontrol",
    "scancel",
)
COMMAND_SECONDS = 60.0  # for a busy machine; a command takes a fraction of a second
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "TIMEOUT",
}


def missing_for_a_lab() -> tuple[str, bool]:
    """Return what this machine lacks for a lab, if anything, and whether installing would help."""
    if os.geteuid() != 0:
        return "a lab of Slurm must be started by root", False
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    if programs:
        return f"Slurm is not installed: no {', '.join(programs)}", True
    tried = subprocess.run(
        [*UNSHARE, "unshare", "--uts", "true"], capture_output=True, text=True, timeout=30
    )
    if tried.returncode:
        return f"no namespaces can be made here: {tried.stderr.strip()}", False
    return "", False


@dataclass(frozen=True)
class Component:
    """The state of one component of a job, from `scontrol show job`.

    `exit_code` is Slurm's `code:signal`.
    """

    id: int
    state: str
    exit_code: str
    restarts: int
    reason: str


@dataclass(frozen=True)
class Job:
    """A job, identified by the id of its first component."""

    id: int
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def last_lines(self) -> str:
        return "\n".join(self.output.splitlines()[-6:])


class SlurmLab:
    """One controller and the nodes rm0, rm1, act0 and act1, with 8 cores each; a context manager.

    Each node has its own host name, address, processes and /dev/shm (below `shared_memory`). The
    nodes share the file system and the machine's network. In `small` they see a file system of 16
    MiB.
    """

    def __init__(self) -> None:
        # short: Unix sockets are created in it
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-lab-"))
        self.shared_memory = Path(tempfile.mkdtemp(prefix="slurm-lab-", dir="/dev/shm"))
        self.small = self.folder / "small"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        environment = {**os.environ, "SLURM_CONF": str(write_configuration(self.folder))}
        self._environment = environment
        with (self.folder / "log" / "lab.out").open("w") as log:
            self._process = subprocess.Popen(
                [*UNSHARE, "bash", str(NAMESPACES), str(self.folder), str(self.shared_memory)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        try:
            for node in NODES:
                self._tell("up", node)
            self.wait_for_nodes(30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Kill all processes of the lab."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()  # its child ends by `--kill-child`
            process.wait()
        for folder in (self.folder, self.shared_memory):
            shutil.rmtree(folder, ignore_errors=True)

    def _tell(self, verb: str, node: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{verb} {node}\n")
        self._process.stdin.flush()

    def command(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> str:
        """Run one of Slurm's commands and return its output.

        Raises:
            AssertionError: the command failed, with its output.
        """
        env = {**self._environment, **(env or {})}
        with_pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, timeout=COMMAND_SECONDS, env=env, cwd=cwd, **with_pipes)
        assert done.returncode == 0, (
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done.stdout

    def inside(self, *command: str) -> str:
        """Run a command that sees the lab's mounts and return its output."""
        assert self._process is not None
        first = (
            Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            .read_text()
            .split()[0]
        )
        return self.command("nsenter", "--target", first, "--mount", *command)

    def crash(self, node: str) -> None:
        """Kill all processes of the node at once, including its slurmd."""
        self._tell("crash", node)

    def up(self, node: str, seconds: float = 60) -> None:
        """Restart a crashed node as soon as the controller has noticed the crash."""
        self._wait(
            lambda: "down" in self.command("sinfo", "-h", "-n", node, "-o", "%T"),
            seconds,
            f"{node} to be down",
        )
        self._tell("up", node)

    def wait_for_nodes(self, seconds: float) -> None:
        def ready() -> bool:
            with contextlib.suppress(AssertionError):  # the controller does not answer yet
                return set(
                    self.command("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()
                ) == set(NODES)
            return False

        self._wait(ready, seconds, "all nodes to be idle")

    def _wait(self, condition, seconds: float, awaited: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {awaited}:\n{self.logs()}"
            time.sleep(0.25)

    def logs(self) -> str:
        """Return the last lines of each daemon's log."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            parts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(parts)

    def submit(
        self,
        *command: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Job:
        """Run `sbatch` with these arguments; all attempts write to `log`."""
        places = ["--parsable", f"--output={log}", "--open-mode=append"]
        return Job(
            int(self.command("sbatch", *places, *command, env=env, cwd=cwd).strip().split(";")[0]),
            log,
        )

    def components(self, job: Job) -> list[Component]:
        shown = self.command("scontrol", "--oneliner", "show", "job", str(job.id))
        components = []
        for line in shown.splitlines():
            fields = dict(re.findall(r"(\w+)=(\S*)", line))
            if "JobId" in fields:
                state = fields["JobState"]
                exit_code = fields["ExitCode"]
                number = int(fields["JobId"])
                restarts = int(fields["Restarts"])
                components.append(Component(number, state, exit_code, restarts, fields["Reason"]))
        assert components, shown
        return components

    def wait(self, job: Job, seconds: float) -> list[Component]:
        """Wait until a job has ended and return its components.

        Raises:
            AssertionError: the job did not end in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            components = self.components(job)
            if all(component.state in ENDED for component in components):
                return components
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"after {seconds} s the job is {components}:\n{job.output}\n{self.logs()}"
                )
            time.sleep(0.25)

    def wait_for_attempt(self, job: Job, restarts: int, seconds: float) -> None:
        """Wait until all components run after `restarts` restarts."""

        def running() -> bool:
            return all(
                part.state == "RUNNING" and part.restarts == restarts
                for part in self.components(job)
            )

        self._wait(
            running, seconds, f"attempt {restarts} of job {job.id}, which says:\n{job.output}\n"
        )

    def signal(self, job: Job, name: str) -> None:
        """Send a signal to the batch script only, like `--signal=B:` before the time limit."""
        self.command("scancel", "--batch", f"--signal={name}", str(job.id))

    def cancel(self, job: Job) -> None:
        self.command("scancel", str(job.id))

    def requeue(self, job: Job) -> None:
        self.command("scontrol", "requeue", str(job.id))

    def descendants(self) -> list[psutil.Process]:
        """Return all processes of the lab, including its daemons."""
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def steps(self, job: Job) -> Sequence[str]:
        """Return the names of running steps other than the batch script's."""
        ids = ",".join(str(component.id) for component in self.components(job))
        names = self.command("squeue", "-h", "--steps", "--jobs", ids, "-o", "%i %j").split("\n")
        return [
            line.split(" ", 1)[1]
            for line in names
            if line and ".batch" not in line and ".extern" not in line
        ]
