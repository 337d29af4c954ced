"""Slurm's commands with deadlines, and the times of a job."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

CALL_SECONDS = 30.0
# By which releases of Slurm after 22.05 say the same as `job_times`.
START_VARIABLE = "SLURM_JOB_START_TIME"
END_VARIABLE = "SLURM_JOB_END_TIME"


class SlurmCallError(Exception):
    """A Slurm command failed or timed out; `said` is its stderr, or why there is none."""

    def __init__(self, command: Sequence[str], said: str):
        super().__init__(f"{' '.join(command)}: {said}")
        self.said = said


def call(
    command: Sequence[str],
    *,
    seconds: float = CALL_SECONDS,
    env: Mapping[str, str] | None = None,
    stderr: bool = False,
) -> str:
    """Run a command and return its stdout, with its stderr if asked; SlurmCallError if it
    failed.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env=env,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        said = f"no answer within {seconds:.0f} s; is the controller up (scontrol ping)?"
        raise SlurmCallError(command, said) from error
    except OSError as error:
        raise SlurmCallError(command, str(error)) from error
    if done.returncode:
        raise SlurmCallError(command, done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout + done.stderr if stderr else done.stdout


def job_times(*job_ids: str, seconds: float = CALL_SECONDS) -> tuple[int | None, int | None]:
    """Return the first allocation's start and the earliest end of all, in unix seconds.

    They are the components of one job, whose times differ if Slurm has requeued one alone. A time
    that Slurm does not know is None. Raises SlurmCallError.
    """
    env = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    command = ["squeue", "-h", "-j", ",".join(job_ids), "-o", "%A|%S|%e"]
    starts: dict[str, int] = {}
    ends = []
    for line in call(command, seconds=seconds, env=env).splitlines():
        job_id, start, end = line.strip().split("|")
        if start.isdecimal():
            starts[job_id] = int(start)
        if end.isdecimal() and job_id in job_ids:  # NONE without a limit
            ends.append(int(end))
    return starts.get(job_ids[0]), min(ends, default=None)
