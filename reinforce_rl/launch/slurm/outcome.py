"""How each task ended, which failed first, and the job's exit code; `srun` says 143 or so for any of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, EXIT_LOST_RANK, EXIT_STOPPED
from reinforce_rl.launch.slurm.commands import ACTOR
from reinforce_rl.utils.files import write_atomically

EXIT_FOLDER = "exit"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
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


@dataclass(frozen=True)
class Ending:
    """Attributes:
    kind: finished; stopped, by a signal or since its time was used up; or failed.
    code: of the job.
    text: what happened.
    first: the task that failed first, where one did.
    log_of: the step whose log says more; empty where none does.
    """

    kind: str
    code: int
    text: str
    first: TaskEnd | None = None
    log_of: str = ""


def judge(
    actor: Sequence[TaskEnd],
    servers: Sequence[TaskEnd],
    lost: Sequence[TaskEnd],
    *,
    unasked: str,
    told: int | None,
    killed: bool = False,
    unstarted: Sequence[str] = (),
) -> Ending:
    """How an attempt ended whose server was healthy.

    Args:
        actor, servers: how their tasks ended.
        lost: tasks that have not said how.
        unasked: the server's step that ended last, though nobody had asked it to; empty where one was left.
        told: the signal that this job got, if any.
        killed: the actor had to be killed, since it did not end in time after that.
        unstarted: names of steps none of whose tasks began.
    """
    if unstarted:
        return Ending(FAILED, EXIT_ERROR, f"srun could not start {unstarted[0]}; it says why above", None, "")
    if told is not None and killed:
        return Ending(
            STOPPED,
            EXIT_STOPPED,
            f"the actor had not saved in time after {signal.Signals(told).name}, and was killed; it goes on from its "
            "newest checkpoint. The lead of sbatch --signal=B:USR1@SECONDS must be above a step and a save, and 60 s",
            None,
            ACTOR,
        )
    stopped = {EXIT_FINISHED, EXIT_STOPPED}
    if told is not None:  # which ends a program that has not begun to listen
        stopped |= {128 + signal.SIGTERM, 128 + signal.SIGUSR1}
    codes = {end.code for end in actor}
    ends = [*actor, *servers]
    if not unasked:  # a server that has failed while others went on, or in being ended, is not why
        ends = list(actor)
        lost = [end for end in lost if end.component == ACTOR]
    if not unasked and codes == {EXIT_FINISHED} and not lost:
        return Ending(FINISHED, EXIT_FINISHED, "the run has finished")
    if not unasked and codes and codes <= stopped and not lost:
        if told is not None:
            return Ending(
                STOPPED, EXIT_STOPPED, f"the actor has ended in good order, after {signal.Signals(told).name}"
            )
        return Ending(STOPPED, EXIT_STOPPED, "the actor's time was used up, or its tasks were signalled; it has saved")
    first = first_failed(ends, lost, harmless=stopped)
    if first is None:
        return Ending(FAILED, EXIT_ERROR, f"{unasked or 'the actor'} ended without being asked to", None, unasked)
    return Ending(FAILED, first.code or EXIT_ERROR, f"first to fail: {first}", first, first.component)
