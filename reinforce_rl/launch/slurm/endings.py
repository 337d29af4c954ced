"""What an attempt came to: from how its tasks ended to the job's exit code and a sentence for people."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, EXIT_STOPPED
from reinforce_rl.launch.slurm.commands import ACTOR
from reinforce_rl.launch.slurm.exits import TaskEnd, first_failed

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


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
