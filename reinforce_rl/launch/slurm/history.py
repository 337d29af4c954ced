"""The attempts of a run's jobs, one line an event, and whether a job may be requeued once more."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import EXIT_FINISHED
from reinforce_rl.runtime.status import read_status

Arguments = tuple[tuple[str, ...], tuple[str, ...]]

HISTORY_FILE = "history.jsonl"
IDLE_ATTEMPTS = 3  # of one job that began at the same checkpoint; the next one is not begun


@dataclass(frozen=True)
class Attempt:
    """One start of a job.

    Attributes:
        job, restart: its id, and how often it was requeued before.
        start, end: unix seconds; no end while it runs, or where its end was not recorded.
        step_before, step_after: of the newest checkpoint.
        arguments: of actor and server.
        reason: why it ended.
        exit_code: of the job.
        first_failed: the task that failed first.
        requeued: it has put itself back into the queue.
    """

    job: str
    restart: int
    start: float
    step_before: int
    arguments: Arguments = ((), ())
    end: float | None = None
    step_after: int | None = None
    reason: str = ""
    exit_code: int | None = None
    first_failed: str | None = None
    requeued: bool = False


class History:
    """A file of attempts; the newest line of an attempt counts."""

    def __init__(self, path: Path):
        self.path = path

    def attempts(self) -> list[Attempt]:
        """Return all attempts, oldest first, without lines torn by a full disk."""
        found: dict[tuple[str, int], Attempt] = {}
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            values["arguments"] = tuple(tuple(args) for args in values["arguments"])
            attempt = Attempt(**values)
            found[attempt.job, attempt.restart] = attempt
        return list(found.values())

    def write(self, attempt: Attempt) -> None:
        """Append a line; one that was torn before stays a line of its own."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(asdict(attempt)) + "\n").encode()
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line
            file.write(line)
            os.fsync(file.fileno())


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step that the run resumes from; 0 without a checkpoint."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)


def finished(run_dir: Path, attempts: Sequence[Attempt], arguments: Arguments) -> str | None:
    """Return a clause saying that the run has finished; None where there may be something left to do.

    Args:
        run_dir, attempts: of the run.
        arguments: of actor and server, now. If they have changed, the trainer decides: they may ask for more steps.
    """
    status = read_status(run_dir)
    if status is None or status.state != "finished":
        return None
    complete = [attempt for attempt in attempts if attempt.exit_code == EXIT_FINISHED]
    if complete and complete[-1].arguments != arguments:
        return None
    return f"the run in {run_dir} has finished, at step {status.step}"


def may_requeue(*, restart: int, max_restarts: int, step_before: int, step_after: int) -> tuple[bool, str]:
    """Decide whether to requeue a job that has not finished its run.

    Args:
        restart: how often it was requeued.
        max_restarts: how often it may be.
        step_before, step_after: newest checkpoint when this attempt began and ended.

    Returns:
        The decision, and its reason for the log.
    """
    if restart >= max_restarts:
        return False, f"it was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)"
    if step_after <= step_before:
        return False, f"this attempt saved nothing beyond step {step_before}, so the next one might not either"
    return True, f"from step {step_before} to step {step_after}, restart {restart + 1} of {max_restarts}"


def refusal(attempts: Sequence[Attempt], *, job: str, restart: int, max_restarts: int, step: int) -> str | None:
    """Return why a job that Slurm has restarted, as after a node failure, must not train; None where it may.

    Args:
        attempts: of the run.
        job, restart: id of this job and how often it was requeued.
        max_restarts: how often it may be.
        step: of the newest checkpoint.
    """
    if restart > max_restarts:
        return f"the job was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)"
    idle = [attempt for attempt in attempts if attempt.job == job and attempt.step_before == step]
    if len(idle) >= IDLE_ATTEMPTS:
        return f"{len(idle)} attempts of this job began at step {step} and got no further"
    return None
