"""How each task ended, and which failed first. `srun` itself says 143 or so whatever the tasks' codes were."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import EXIT_LOST_RANK
from reinforce_rl.utils.files import write_atomically

EXIT_FOLDER = "exit"
# Codes that follow from another task's end: a rank that missed another, and what `srun` or we ended.
CONSEQUENCES = (EXIT_LOST_RANK, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)


@dataclass(frozen=True)
class TaskEnd:
    """One task's end.

    Attributes:
        component: such as actor or rm-0.
        task: its number in the step.
        ranks: the ranks that it was, such as 2, or 2-3 under torchrun.
        host: its node.
        code: its exit code, 128 and the signal's number where one ended it.
        time: unix seconds.
        reason: for people, where the code does not say it.
    """

    component: str
    task: int
    ranks: str
    host: str
    code: int
    time: float
    reason: str = ""

    @property
    def name(self) -> str:
        word = "ranks" if "-" in self.ranks else "rank"
        return f"{self.component} {word} {self.ranks} on {self.host}"

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code > 128:
            verb = "were" if "-" in self.ranks else "was"
            how = f"{verb} ended by {_signal_name(self.code - 128)} (exit code {self.code})"
        why = f": {self.reason}" if self.reason else ""
        at = time.strftime("%H:%M:%S", time.localtime(self.time))
        return f"{self.name} {how} at {at}{why}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def record(folder: Path, end: TaskEnd) -> None:
    """Write a task's end into the folder of the attempt."""
    write_atomically(folder / EXIT_FOLDER / f"{end.component}-{end.task:05d}.json", json.dumps(asdict(end)) + "\n")


def read_ends(folder: Path) -> list[TaskEnd]:
    """Of all tasks that have ended so far."""
    paths = sorted((folder / EXIT_FOLDER).glob("*.json"))
    return [TaskEnd(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def first_failed(
    ends: Sequence[TaskEnd], lost: Sequence[TaskEnd] = (), harmless: Collection[int] = (0,)
) -> TaskEnd | None:
    """The task whose failure the others' ends follow from; None where none failed.

    Args:
        ends: of the tasks that have said how they ended.
        lost: tasks that have not.
        harmless: exit codes that are no failure.
    """
    failed = sorted((end for end in ends if end.code not in harmless), key=lambda end: end.time)
    if lost and (not failed or failed[0].code in CONSEQUENCES):
        return lost[0]
    return failed[0] if failed else None
