"""Steps of the job: `srun` processes, their end, and steps left by an earlier attempt."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reinforce_rl.launch.slurm.commands import SlurmCallError, StepPlan, is_completing, signal_step, step_id, steps
from reinforce_rl.launch.slurm.outcome import TaskEnd, read_ends
from reinforce_rl.launch.slurm.rendezvous import read_endpoint
from reinforce_rl.utils.process import Child

POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
KILL_SECONDS = 60.0  # from SIGKILL of a step to SIGKILL of its srun
KILLED = 128 + 9
STALE_POLL_SECONDS = 1.0
OUR_STEPS = re.compile(r"actor|rm-\d+")
LOST_REASON = "it left no word: its wrapper was killed, its node is gone, or the run's folder is full"


class Step:
    def __init__(
        self,
        plan: StepPlan,
        line: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Callable[[str], None],
    ):
        self.plan = plan
        self.log_file = folder / f"{plan.name}.log"
        self._messages: list[tuple[float, str]] = []
        self._folder = folder
        self._log = log
        self._srun = Child(line, own_session=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def code(self) -> int | None:
        return self._srun.exit_code

    @property
    def has_ended(self) -> bool:
        return self.code is not None

    @property
    def failed_node(self) -> str | None:
        found = (re.search(r"error: Node failure on (\S+)", message) for _, message in list(self._messages))
        return next((match.group(1) for match in found if match), None)

    def _read_messages(self) -> None:
        # srun's own messages: killed tasks, or a step that cannot start. Tasks write to the log file.
        assert self._srun.process.stderr is not None
        for line in self._srun.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._messages.append((time.time(), text))
            self._log(f"{self.name}: {text}")

    def signal(self, number: int) -> bool:
        """Signal every process of the step; return False if it must be retried."""
        try:
            found = None if self.has_ended else step_id(self.plan.component.job_id, self.name)
            if found is not None:
                signal_step(found, number)
            return found is not None
        except SlurmCallError as error:
            if is_completing(self.plan.component.job_id):  # and Slurm sends SIGTERM itself
                return True
            self._log(f"cannot signal {self.name}, trying again: {error}")
            return False

    def end(self, number: int, deadline: float) -> bool:
        """Signal the step, kill it at `deadline` (`time.monotonic`); return True if it ended by itself."""
        self._signal_until(number, deadline)
        if self._wait(deadline):
            return True
        self._log(f"{self.name} has not ended in time; killing it")
        hard = time.monotonic() + KILL_SECONDS
        self._signal_until(signal.SIGKILL, hard)
        if not self._wait(hard):
            self._srun.kill()
        return False

    def _signal_until(self, number: int, deadline: float) -> None:
        # Retry: a starting step has no id yet, and the controller may be busy.
        while not self.has_ended and not self.signal(number) and time.monotonic() < deadline:
            self._wait(min(deadline, time.monotonic() + RETRY_SECONDS))

    def _wait(self, deadline: float) -> bool:
        if self._srun.wait(deadline - time.monotonic()) is not None:
            self._reader.join(5.0)
        return self.has_ended

    def ends(self) -> list[TaskEnd]:
        return [end for end in read_ends(self._folder) if end.component == self.name]

    def lost(self) -> list[TaskEnd]:
        """Return tasks without a recorded end, after the step failed."""
        if not self.code:
            return []
        known = {end.task for end in self.ends()}
        if not known and read_endpoint(self._folder, self.name) is None:
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
    """Parse a list such as 0-1,4."""
    parts = [part.split("-") for part in text.split(",")]
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


def end_stale_steps(job_ids: Sequence[str], seconds: float, log: Callable[[str], None]) -> None:
    """End steps of an earlier attempt whose batch script is gone: SIGTERM, then SIGKILL after `seconds`.

    When a node of component 0 fails, Slurm 22.05 requeues this component alone. The actor goes on in the folder that
    the next attempt needs, and holds the cores that its srun would wait for.

    Raises:
        SlurmCallError: a step still runs, or the controller did not answer.
    """
    for number, limit in ((signal.SIGTERM, seconds), (signal.SIGKILL, KILL_SECONDS)):
        left = _end_stale(job_ids, number, time.monotonic() + limit, log)
        if not left:
            return
    raise SlurmCallError(("squeue", "--steps"), f"cannot end {left}")


def _end_stale(job_ids: Sequence[str], number: int, deadline: float, log: Callable[[str], None]) -> str:
    """Return what still runs at the deadline; empty if nothing."""
    signalled: set[str] = set()
    while True:
        try:
            found = {step: name for job in job_ids for step, name in steps(job).items() if OUR_STEPS.fullmatch(name)}
            for step, name in found.items():
                if step not in signalled:
                    signal_step(step, number)
                    signalled.add(step)
                    how = "it is asked to end" if number == signal.SIGTERM else "it is killed"
                    log(f"{name} of an earlier attempt still runs, as step {step}; {how}")
            left = ", ".join(f"step {step} ({name}) of an earlier attempt" for step, name in found.items())
        except SlurmCallError as error:
            left = f"what an earlier attempt may have left: {error}"
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(STALE_POLL_SECONDS)
