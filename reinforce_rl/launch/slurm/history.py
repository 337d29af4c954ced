"""Log of the attempts of a run's jobs, and the decision whether to requeue a job."""

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
IDLE_ATTEMPTS = 3  # attempts of one job from the same checkpoint, after which it gives up


@dataclass(frozen=True)
class Attempt:
    """One start of a job."""

    job: str
    restart: int  # number of earlier requeues
    start: float  # unix seconds, as `end`
    step_before: int  # of the newest checkpoint, as `step_after`
    arguments: Arguments = ((), ())  # of actor and server
    end: float | None = None  # None while it runs, or if not recorded
    step_after: int | None = None
    reason: str = ""
    exit_code: int | None = None  # of the job
    first_failed: str | None = None  # first task to fail
    requeued: bool = False  # by itself


class History:
    """File of attempts; the last line of an attempt counts."""

    def __init__(self, path: Path):
        self.path = path

    def attempts(self) -> list[Attempt]:
        """Return all attempts, oldest first; skips lines cut off by a full disk."""
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
        """Append a line; starts a new line after one that was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(asdict(attempt)) + "\n").encode()
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line
            file.write(line)
            os.fsync(file.fileno())


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step to resume from; 0 without a checkpoint."""
    names = [path.name for path in (run_dir / "checkpoints").glob("step_*")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)


def finished(run_dir: Path, attempts: Sequence[Attempt], arguments: Arguments) -> str | None:
    """Return a sentence if the run has finished, else None.

    None too if `arguments` (of actor and server) have changed: the trainer decides, as they may add steps.
    """
    status = read_status(run_dir)
    if status is None or status.state != "finished":
        return None
    complete = [attempt for attempt in attempts if attempt.exit_code == EXIT_FINISHED]
    if complete and complete[-1].arguments != arguments:
        return None
    return f"the run in {run_dir} has finished, at step {status.step}"


def may_requeue(*, restart: int, max_restarts: int, step_before: int, step_after: int) -> tuple[bool, str]:
    """Decide whether to requeue a job whose run has not finished; return the decision and its reason for the log.

    `restart` counts earlier requeues; the steps are of the newest checkpoint at start and end of this attempt.
    """
    if restart >= max_restarts:
        return False, f"it was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)"
    if step_after <= step_before:
        return False, f"this attempt saved nothing beyond step {step_before}, so the next one might not either"
    return True, f"from step {step_before} to step {step_after}, restart {restart + 1} of {max_restarts}"


def refusal(attempts: Sequence[Attempt], *, job: str, restart: int, max_restarts: int, step: int) -> str | None:
    """Return why a job restarted by Slurm (as after a node failure) must not train; None if it may."""
    if restart > max_restarts:
        return f"the job was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)"
    idle = [attempt for attempt in attempts if attempt.job == job and attempt.step_before == step]
    if len(idle) >= IDLE_ATTEMPTS:
        return f"{len(idle)} attempts of this job began at step {step} and got no further"
    return None
