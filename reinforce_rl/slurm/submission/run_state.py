"""What is known of a run before it is submitted: jobs that are still in the queue, whether it has finished."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.files import read_json_lines
from reinforce_rl.slurm.submission.commands import SlurmError, run

SUBMITTED_FILE = "submitted.jsonl"
LAST_JOBS = 100  # that are asked for: more than any chain, and a short command line


@dataclass(frozen=True)
class Submitted:
    """A job that was handed to Slurm.

    Attributes:
        job: its id.
        name: of its first component.
        time: unix seconds.
    """

    job: str
    name: str
    time: float


def record(folder: Path, job: str, name: str) -> None:
    """Remember a job in the run's folder.

    Args:
        folder: of the run's jobs.
        job: its id.
        name: of its first component.
    """
    with (folder / SUBMITTED_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(Submitted(job, name, time.time()))) + "\n")


def recorded(folder: Path) -> list[Submitted]:
    """The jobs that were remembered, oldest first."""
    path = folder / SUBMITTED_FILE
    return [Submitted(**line) for line in read_json_lines(path)] if path.is_file() else []


@dataclass(frozen=True)
class Queued:
    """A job that waits, runs or ends just now."""

    job: str
    name: str
    state: str


def still_queued(jobs: Iterable[Submitted]) -> list[Queued]:
    """Those of the jobs that Slurm still has to do with.

    Raises:
        SlurmError: squeue failed.
    """
    names = {job.job: job.name for job in list(jobs)[-LAST_JOBS:]}
    if not names:
        return []
    try:
        text = run(["squeue", "--noheader", f"--jobs={','.join(names)}", "--format=%A|%T|%j"])
    except SlurmError as error:
        if "Invalid job id" in str(error):  # of a single job that ended long ago
            return []
        raise
    found = []
    for line in text.splitlines():
        job, state, name = line.strip().split("|", 2)
        if names.get(job) == name:  # ids begin again some day
            found.append(Queued(job, name, state))
    return found


def queue_fault(queued: Iterable[Queued], run_dir: Path) -> str | None:
    """A sentence where there are such jobs."""
    jobs = list(queued)
    if not jobs:
        return None
    told = ", ".join(f"{job.job} ({job.name}, {job.state})" for job in jobs)
    ids = " ".join(job.job for job in jobs)
    return (
        f"exp_manager.explicit_log_dir is {run_dir}, and jobs of this run are in the queue already: {told}; wait for "
        f"them, cancel them (scancel {ids}), or give this run another folder"
    )
