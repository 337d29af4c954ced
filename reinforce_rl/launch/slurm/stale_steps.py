"""Steps of an earlier attempt that still run when the next one begins."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence

from reinforce_rl.launch.slurm import calls
from reinforce_rl.launch.slurm.calls import SlurmCallError

POLL_SECONDS = 1.0
KILL_SECONDS = 60.0
OURS = re.compile(r"actor|rm-\d+")


def end_earlier_steps(job_ids: Sequence[str], seconds: float, say: Callable[[str], None]) -> None:
    """End what an attempt has left whose batch script is gone.

    Where a node of component 0 fails, Slurm 22.05 requeues this component alone. The actor goes on, in the folder in
    which the next attempt is to train, and has the cores that its srun would wait for.

    Args:
        job_ids: of all components.
        seconds: that a step may take to end, before it is killed.
        say: for lines to people.

    Raises:
        SlurmCallError: a step goes on all the same, or the controller has not answered.
    """
    for number, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, KILL_SECONDS)):
        left = _end(job_ids, number, time.monotonic() + limit, say)
        if not left:
            return
    raise SlurmCallError(("squeue", "--steps"), f"cannot end {left}")


def _end(job_ids: Sequence[str], number: int, deadline: float, say: Callable[[str], None]) -> str:
    """What is left at the deadline; empty if nothing."""
    told: set[str] = set()
    while True:
        try:
            found = {step: name for job in job_ids for step, name in calls.steps(job).items() if OURS.fullmatch(name)}
            for step, name in found.items():
                if step not in told:
                    calls.signal_step(step, number)
                    told.add(step)
                    how = "it is asked to end" if number == signal.SIGTERM else "it is killed"
                    say(f"{name} of an earlier attempt still runs, as step {step}; {how}")
            left = ", ".join(f"step {step} ({name}) of an earlier attempt" for step, name in found.items())
        except SlurmCallError as error:
            left = f"what an earlier attempt may have left: {error}"
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_SECONDS)
