"""Steps of the job: `srun` as a process, and how it is asked to end and watched."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reinforce_rl.launch.slurm.calls import SlurmCallError, is_completing, signal_step, step_id
from reinforce_rl.launch.slurm.commands import StepPlan
from reinforce_rl.launch.slurm.outcome import TaskEnd, read_ends

POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
KILL_SECONDS = 60.0  # from SIGKILL of a step to that of its srun
KILLED = 128 + 9
LOST_REASON = "it left no word: its wrapper was killed, its node is gone, or the run's folder is full"


class Step:
    """One step that runs.

    Args:
        plan: of the step.
        line: the command.
        environment: of srun and the tasks.
        folder: of the attempt.
        say: for lines to people.
    """

    def __init__(
        self,
        plan: StepPlan,
        line: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
    ):
        self.plan = plan
        self.log = folder / f"{plan.name}.log"
        self._messages: list[tuple[float, str]] = []
        self._folder = folder
        self._say = say
        self._srun = subprocess.Popen(
            list(line),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environment),
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def code(self) -> int | None:
        """Of srun; None while it runs."""
        return self._srun.poll()

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    @property
    def failed_node(self) -> str | None:
        """The node that Slurm says has failed, for which it requeues the job."""
        found = (re.search(r"error: Node failure on (\S+)", message) for _, message in list(self._messages))
        return next((match.group(1) for match in found if match), None)

    def _read_messages(self) -> None:
        # What srun itself says: tasks that were killed, steps that cannot be made. Tasks write to the log.
        assert self._srun.stderr is not None
        for line in self._srun.stderr:
            self._messages.append((time.time(), line.rstrip()))
            self._say(f"{self.name}: {line.rstrip()}")

    def signal(self, number: int) -> bool:
        """Signal every process of the step; False where that is to be tried again."""
        try:
            found = None if self.has_ended else step_id(self.plan.component.job_id, self.name)
            if found is not None:
                signal_step(found, number)
            return found is not None
        except SlurmCallError as error:
            if is_completing(self.plan.component.job_id):  # and Slurm sends SIGTERM itself
                return True
            self._say(f"cannot signal {self.name}, trying again: {error}")
            return False

    def end(self, number: int, deadline: float) -> bool:
        """Signal the step, wait, and kill it at the deadline.

        Args:
            number: of the signal.
            deadline: of time.monotonic().

        Returns:
            whether it ended by itself.
        """
        self._signal_until(number, deadline)
        if self._wait(deadline):
            return True
        self._say(f"{self.name} has not ended in time; killing it")
        hard = time.monotonic() + KILL_SECONDS
        self._signal_until(9, hard)
        if not self._wait(hard):
            self._srun.kill()
            self._srun.wait()
        return False

    def _signal_until(self, number: int, deadline: float) -> None:
        # A step that is being made has no id yet, and the controller may be busy.
        while not self.has_ended and not self.signal(number) and time.monotonic() < deadline:
            self._wait(min(deadline, time.monotonic() + RETRY_SECONDS))

    def _wait(self, deadline: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._srun.wait(max(0.0, deadline - time.monotonic()))
            self._reader.join(5.0)
        return self.has_ended

    def ends(self) -> list[TaskEnd]:
        """Of the tasks that have said how they ended."""
        return [end for end in read_ends(self._folder) if end.component == self.name]

    def lost(self) -> list[TaskEnd]:
        """Tasks that were started, have ended, and have not said how. After the end of a step that failed."""
        if not self.code:
            return []
        known = {end.task for end in self.ends()}
        if not known and not (self._folder / f"rendezvous-{self.name}.json").exists():
            return []  # nothing was started
        tasks = self.plan.tasks
        each = self.plan.ranks // tasks
        found = [self._lost_task(task, each) for task in range(tasks) if task not in known]
        return sorted(found, key=lambda end: end.time)

    def _lost_task(self, task: int, each: int) -> TaskEnd:
        ranks = str(task) if each == 1 else f"{task * each}-{(task + 1) * each - 1}"
        # srun: error: act1: task 2: Killed        srun: error: act0: tasks 0-1: Exited with exit code 1
        for when, message in self._messages:
            found = re.search(r"error: (\S+): tasks? ([\d,-]+): (Exited with exit code (\d+))?", message)
            if found and task in _numbers(found.group(2)):
                code = int(found.group(4) or KILLED)
                return TaskEnd(self.name, task, ranks, found.group(1), code, when, LOST_REASON)
        return TaskEnd(self.name, task, ranks, "an unknown node", KILLED, time.time(), LOST_REASON)


def _numbers(text: str) -> set[int]:
    """Of a list such as 0-1,4."""
    parts = [part.split("-") for part in text.split(",")]
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}
