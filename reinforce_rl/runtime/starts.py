"""Count how often Slurm starts a job at the same checkpoint.

A job that fails there is requeued each time and makes no progress. The count is in the run's folder
and not in a job script, so it applies to every script that starts the trainer. A new job, which a
user has submitted, starts a new count.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.untrusted_files import read_json

STARTS_FILE = "slurm_starts.json"
MAX_STARTS = 3  # of a job at the same checkpoint; the next start gives up


def count_start(folder: Path, step: int, environment: Mapping[str, str]) -> None:
    """Record in the run's folder that this Slurm job resumes from `step`.

    Does nothing outside of a job. A start of the job counts once, however many programs it starts.

    Raises ConfigError if `MAX_STARTS` earlier starts of this job began at this step.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return
    restart = int(environment.get("SLURM_RESTART_COUNT") or "0")
    restarts = _earlier_restarts(folder, job, step) - {restart}
    if len(restarts) >= MAX_STARTS:
        raise ConfigError([no_progress(len(restarts), step)])
    restarts.add(restart)
    starts = {"job": job, "step": step, "restarts": sorted(restarts)}
    write_atomically(folder / STARTS_FILE, json.dumps(starts) + "\n")


def no_progress(starts: int, step: int) -> Fault:
    return Fault(
        f"{starts} attempts of this job began at step {step} and got no further; look for why they "
        "ended, and submit the same command again as a new job",
        key="slurm.job.no_progress",
    )


def _earlier_restarts(folder: Path, job: str, step: int) -> set[int]:
    """Return the numbers of this job's starts at this step; the first start has the number 0."""
    # An unreadable file counts as no starts: a user may change it to allow more.
    with contextlib.suppress(OSError, DataError, KeyError, TypeError, ValueError):
        starts = read_json(folder / STARTS_FILE, within=folder)
        if (starts["job"], starts["step"]) == (job, step):
            return {int(restart) for restart in starts["restarts"]}
    return set()
