"""What an attempt came to: from how its tasks ended to the job's exit code and a sentence for people."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, EXIT_STOPPED
from reinforce_rl.slurm.exits import TaskEnd, first_failed

FINISHED, SAVED, FAILED = "finished", "saved", "failed"


@dataclass(frozen=True)
class Ending:
    """Attributes:
    kind: finished; saved (the same command goes on); or failed.
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
    unstarted: Sequence[str] = (),
) -> Ending:
    """How an attempt ended whose server was healthy.

    Args:
        actor, servers: how their tasks ended.
        lost: tasks that have not said how.
        unasked: a server's step that ended though nobody had asked it to; empty where none did.
        told: the signal that this job got, if any.
        unstarted: names of steps none of whose tasks began.
    """
    if unstarted:
        return Ending(FAILED, EXIT_ERROR, f"srun could not start {unstarted[0]}; it says why above", None, "")
    stopped = {EXIT_FINISHED, EXIT_STOPPED}
    if told is not None:  # which ends a program that has not begun to listen
        stopped |= {128 + signal.SIGTERM, 128 + signal.SIGUSR1}
    codes = {end.code for end in actor}
    own_lost = [end for end in lost if end.component == "actor"]
    if not unasked and codes == {EXIT_FINISHED} and not own_lost:
        return Ending(FINISHED, EXIT_FINISHED, "the run has finished")
    if not unasked and codes and codes <= stopped and not own_lost:
        if told is not None:
            return Ending(SAVED, EXIT_STOPPED, f"the actor has ended in good order, after {signal.Signals(told).name}")
        return Ending(SAVED, EXIT_STOPPED, "the actor's time was used up, or its tasks were signalled; it has saved")
    first = first_failed([*actor, *servers], lost, harmless=stopped)
    if first is None:
        return Ending(FAILED, EXIT_ERROR, f"{unasked or 'the actor'} ended without being asked to", None, unasked)
    return Ending(FAILED, first.code or EXIT_ERROR, f"first to fail: {first}", first, first.component)
