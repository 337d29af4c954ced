"""Questions and orders to Slurm's controller, each with a deadline."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CALL_SECONDS = 30.0


class SlurmCallError(Exception):
    """A command of Slurm failed, or took too long. The text has the command and what it said.

    Args:
        command: with its arguments.
        said: by it, or why it said nothing.
    """

    def __init__(self, command: Sequence[str], said: str):
        super().__init__(f"{' '.join(command)}: {said}")
        self.said = said


@dataclass(frozen=True)
class JobTimes:
    """Attributes:
    start, end: of the allocation, unix seconds; None where Slurm does not know.
    """

    start: int | None = None
    end: int | None = None


def call(
    command: Sequence[str],
    *,
    seconds: float = CALL_SECONDS,
    base: Mapping[str, str] | None = None,
    with_stderr: bool = False,
    **environment: str,
) -> str:
    """Run a command and return its output.

    Args:
        command: with its arguments.
        seconds: its deadline.
        base: its environment; None for this process's.
        with_stderr: return what it prints on stderr, too.
        environment: further variables.

    Raises:
        SlurmCallError: it failed.
    """
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**(os.environ if base is None else base), **environment},
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmCallError(
            command, f"no answer within {seconds:.0f} s; is the controller up (scontrol ping)?"
        ) from error
    except OSError as error:
        raise SlurmCallError(command, str(error)) from error
    if done.returncode:
        raise SlurmCallError(command, done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout + done.stderr if with_stderr else done.stdout


def job_times(job_id: str) -> JobTimes:
    """Of a job, or of one component of a heterogeneous one."""
    text = call(["squeue", "-h", "-j", job_id, "-o", "%A|%S|%e"], SLURM_TIME_FORMAT="%s")
    for line in text.splitlines():
        found, start, end = line.split("|")
        if found == job_id:
            return JobTimes(*(int(value) if value.isdecimal() else None for value in (start, end)))
    return JobTimes()


def node_names(nodelist: str) -> list[str]:
    """Of a list such as act[0-3]."""
    return call(["scontrol", "show", "hostnames", nodelist]).split()


def steps(job_id: str) -> dict[str, str]:
    """Ids, such as 12.1, and names of the steps of a component that run, the batch script among them."""
    lines = call(["squeue", "-h", "--steps", "-j", job_id, "-o", "%i|%j"]).splitlines()
    return {step: name for step, _, name in (line.strip().partition("|") for line in lines)}


def step_id(job_id: str, name: str) -> str | None:
    """The id of the running step of that name; None where there is none."""
    return next((step for step, found in steps(job_id).items() if found == name), None)


def signal_step(step: str, number: int) -> None:
    """Send a signal to every process of a step."""
    # Through the controller: scancel itself asks all nodes of the component, and fails where a step has only some.
    call(["scancel", "--ctld", f"--signal={int(number)}", step])


def requeue(job_id: str) -> None:
    """Put the running job back into the queue; the leader's id stands for all components."""
    call(["scontrol", "requeue", job_id])


def is_running(job_id: str) -> bool:
    """Whether the job has nodes."""
    return any(state in ("R", "CF", "S", "ST") for state in _states(job_id))


def is_completing(job_id: str) -> bool:
    """Whether Slurm itself is ending the job, after `scancel` or `scontrol requeue`."""
    return "CG" in _states(job_id)


def _states(job_id: str) -> list[str]:
    try:
        return call(["squeue", "-h", "-j", job_id, "-o", "%t"]).split()
    except SlurmCallError:  # it is too long ago for Slurm to know it
        return []
