"""What is known of a run before it is submitted: jobs that are still in the queue, whether it has finished."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.launch.slurm.calls import SlurmCallError, call
from reinforce_rl.launch.slurm.history import HISTORY_FILE, History
from reinforce_rl.utils.files import read_json_lines

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


def still_queued(run_dir: Path) -> str | None:
    """A sentence where jobs of this run wait, run or end just now.

    Args:
        run_dir: of the run.

    Raises:
        SlurmCallError: squeue failed.
    """
    folder = run_dir / "slurm"
    names: dict[str, str | None] = {job.job: job.name for job in recorded(folder)}
    for attempt in History(folder / HISTORY_FILE).attempts():
        if attempt.end is None or attempt.requeued:
            names.setdefault(attempt.job, None)  # of a job that was submitted without this program
    if not names:
        return None
    ids = list(names)[-LAST_JOBS:]
    try:
        text = call(["squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%i|%A|%T|%j"])
    except SlurmCallError as error:
        if "Invalid job id" in error.said:  # of a single job that ended long ago
            return None
        raise
    found: dict[str, str] = {}
    for line in text.splitlines():
        shown, job, state, name = line.strip().split("|", 3)
        if job in names and names[job] in (None, name):  # the numbers begin again some day
            found[job] = f"{shown.split('+')[0]} ({name}, {state.lower()})"
    if not found:
        return None
    told = ", ".join(text for _, text in sorted(found.items(), key=lambda item: int(item[0])))
    return (
        f"the run in {run_dir} is in the queue already: {told}; wait for it, cancel it (scancel {' '.join(found)}), "
        "or set exp_manager.explicit_log_dir to another folder"
    )
