"""What a run's jobs came to, one line an event, and whether a job may be requeued once more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
        job, restart: which one.
        start, end: unix seconds; no end while it runs, or where it ended without a word.
        step_before, step_after: of the newest checkpoint.
        reason: why it ended.
        exit_code: of the job.
        first_failed: the task that failed first.
        requeued: it has put itself back into the queue.
        arguments: of actor and server.
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


@dataclass(frozen=True)
class Decision:
    """Attributes:
    requeue: whether.
    why: for people.
    """

    requeue: bool
    why: str


class History:
    """The file that keeps the attempts; the newest line of an attempt counts."""

    def __init__(self, path: Path):
        self.path = path

    def attempts(self) -> list[Attempt]:
        """All, oldest first. A line that is not whole, as a full disk leaves it, is left out."""
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
        """Add a line, whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(asdict(attempt)) + "\n").encode()
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":  # torn by a full disk or a kill
                line = b"\n" + line
            file.write(line)
            os.fsync(file.fileno())


def close(attempt: Attempt, **values: object) -> Attempt:
    """An attempt that has ended now."""
    return replace(attempt, end=time.time(), **values)  # type: ignore[arg-type]


def newest_checkpoint(run_dir: Path) -> int:
    """The step that the run goes on from; 0 where there is no checkpoint."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)


def finished(run_dir: Path, attempts: Sequence[Attempt], arguments: Arguments) -> str | None:
    """Half a sentence where the run has finished; None where there may be something left to do.

    Args:
        run_dir: of the run.
        attempts: of the run.
        arguments: of actor and server, as they are now. Others than before may ask for more steps, or for something
            else that the trainer has to judge.
    """
    status = read_status(run_dir)
    if status is None or status.state != "finished":
        return None
    complete = [attempt for attempt in attempts if attempt.exit_code == EXIT_FINISHED]
    if complete and complete[-1].arguments != arguments:
        return None
    return f"the run in {run_dir} has finished, at step {status.step}"


def decide(*, restart: int, max_restarts: int, step_before: int, step_after: int) -> Decision:
    """Whether a job that has not finished its run is to be requeued.

    Args:
        restart: how often it was.
        max_restarts: how often it may be.
        step_before, step_after: of the newest checkpoint, when this attempt began and ended.
    """
    if restart >= max_restarts:
        return Decision(False, f"it was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)")
    if step_after <= step_before:
        return Decision(
            False, f"this attempt saved nothing beyond step {step_before}, so the next one might not either"
        )
    return Decision(True, f"from step {step_before} to step {step_after}, restart {restart + 1} of {max_restarts}")


def refusal(attempts: Sequence[Attempt], *, job: str, restart: int, max_restarts: int, step: int) -> str | None:
    """Why a job that Slurm has started again, after the failure of a node, is not to train; None where it is to.

    Args:
        attempts: of the run.
        job, restart: this one.
        max_restarts: how often it may be requeued.
        step: of the newest checkpoint.
    """
    if restart > max_restarts:
        return f"the job was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)"
    idle = [attempt for attempt in attempts if attempt.job == job and attempt.step_before == step]
    if len(idle) >= IDLE_ATTEMPTS:
        return f"{len(idle)} attempts of this job began at step {step} and got no further"
    return None
