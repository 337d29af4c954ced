"""The generators of a job, each a step of its own, which is started again where it dies by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from reinforce_rl.errors import EXIT_FINISHED, EXIT_STOPPED
from reinforce_rl.launch.slurm.steps import Step

# from a death to the next start: the trainers may have died first, and end the job
RESTART_SECONDS = 5.0


class Generators:
    """Starts `count` generators by `start`, called with the number and how often it was started before."""

    def __init__(
        self,
        count: int,
        restarts: int,
        start: Callable[[int, int], Step],
        log: Callable[[str], None],
    ):
        self._restarts = restarts
        self._start = start
        self._log = log
        # Restarts left to each generator; those that have ended for good are removed.
        self._left = dict.fromkeys(range(count), restarts)
        self._due: dict[int, float] = {}  # when to start which again
        self._steps = [start(number, 0) for number in range(count)]

    @property
    def running(self) -> list[Step]:
        return [step for step in self._steps if not step.has_ended]

    def look(self) -> None:
        """Start again what has died, some time after its death."""
        for number, step in enumerate(self._steps):
            if not step.has_ended or number not in self._left:
                continue
            if number not in self._due and not self._may_start_again(number, step):
                del self._left[number]
            elif time.monotonic() > self._due.setdefault(
                number, time.monotonic() + RESTART_SECONDS
            ):
                del self._due[number]
                self._left[number] -= 1
                self._steps[number] = self._start(number, self._restarts - self._left[number])

    def _may_start_again(self, number: int, step: Step) -> bool:
        ends = step.ends()
        if ends and {end.code for end in ends} <= {EXIT_FINISHED, EXIT_STOPPED} and not step.lost():
            self._log(f"{step.name} has left in good order")
            return False
        first = min([*ends, *step.lost()], key=lambda end: end.time, default=None)
        how = f"{first}" if first else f"{step.name} could not be started"
        if self._left[number]:
            self._log(
                f"{how}; it is started again, {self._restarts - self._left[number] + 1} of {self._restarts}"
            )
            return True
        self._log(
            f"{how}; it was started {1 + self._restarts} times (REINFORCE_GENERATOR_RESTARTS), and is left out"
        )
        if not self.running:
            self._log(
                "no generator is left; the actor ends once generator_timeout_seconds are over"
            )
        return False
