"""How each task ended, which failed first, and the job's exit code and log.

Each task writes its own exit code to a file, since `srun` returns 143 or so whatever the tasks' codes are.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, EXIT_LOST_RANK, EXIT_STOPPED
from reinforce_rl.launch.slurm.commands import ACTOR
from reinforce_rl.utils.files import write_atomically

EXIT_FOLDER = "exit"
LAST_LOG_LINES = 20
TAIL_BYTES = 1 << 18
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
# Exit codes caused by another task's end: a rank that lost its peer, and tasks killed by `srun` or by us.
CONSEQUENCES = (EXIT_LOST_RANK, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)


@dataclass(frozen=True)
class TaskEnd:
    component: str  # such as actor or rm-0
    task: int  # its number in the step
    ranks: str  # such as 2, or 2-3 under torchrun
    host: str  # its node
    code: int  # 128 + number for a signal
    time: float  # unix seconds
    reason: str = ""  # if the code does not say it

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
    write_atomically(folder / EXIT_FOLDER / f"{end.component}-{end.task:05d}.json", json.dumps(asdict(end)) + "\n")


def read_ends(folder: Path) -> list[TaskEnd]:
    paths = sorted((folder / EXIT_FOLDER).glob("*.json"))
    return [TaskEnd(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def first_failed(
    ends: Sequence[TaskEnd], lost: Sequence[TaskEnd] = (), harmless: Collection[int] = (0,)
) -> TaskEnd | None:
    """Return the task whose failure caused the others; None if none failed.

    `lost` are tasks that did not record their end; `harmless` are exit codes that are not failures.
    """
    failed = sorted((end for end in ends if end.code not in harmless), key=lambda end: end.time)
    if lost and (not failed or failed[0].code in CONSEQUENCES):
        return lost[0]
    return failed[0] if failed else None


@dataclass(frozen=True)
class Outcome:
    kind: str  # FINISHED; STOPPED, by a signal or for lack of time; FAILED
    code: int  # exit code of the job
    text: str
    first: TaskEnd | None = None  # first task to fail, if any
    log_of: str = ""  # step whose log says more; empty for none


def judge(
    actor: Sequence[TaskEnd],
    servers: Sequence[TaskEnd],
    lost: Sequence[TaskEnd],
    *,
    unasked: str,
    signalled: int | None,
    killed: bool = False,
    unstarted: Sequence[str] = (),
) -> Outcome:
    """Judge an attempt whose servers were healthy.

    Args:
        actor, servers: ends of their tasks.
        lost: tasks that did not record their end.
        unasked: step of the last server if it ended unasked; else empty.
        signalled: signal received by this job, if any.
        killed: the actor did not end in time after that signal and was killed.
        unstarted: steps without a started task.
    """
    by = "" if signalled is None else _signal_name(signalled)
    if unstarted:
        return Outcome(FAILED, EXIT_ERROR, f"srun could not start {unstarted[0]}; it says why above", None, "")
    if signalled is not None and killed:
        return Outcome(
            STOPPED,
            EXIT_STOPPED,
            f"the actor had not saved in time after {by}, and was killed; it goes on from its newest checkpoint. The "
            "lead of sbatch --signal=B:USR1@SECONDS must be above a step and a save, and 60 s",
            None,
            ACTOR,
        )
    stopped = {EXIT_FINISHED, EXIT_STOPPED}
    if signalled is not None:  # a program still starting has no handler and dies of it
        stopped |= {128 + signal.SIGTERM, 128 + signal.SIGUSR1}
    codes = {end.code for end in actor}
    ends = [*actor, *servers]
    if not unasked:  # a server that failed while others went on, or during shutdown, is not the cause
        ends = list(actor)
        lost = [end for end in lost if end.component == ACTOR]
    if not unasked and codes == {EXIT_FINISHED} and not lost:
        return Outcome(FINISHED, EXIT_FINISHED, "the run has finished")
    if not unasked and codes and codes <= stopped and not lost:
        if signalled is not None:
            return Outcome(STOPPED, EXIT_STOPPED, f"the actor has ended in good order, after {by}")
        text = "the actor's time was used up, or its tasks were signalled; it has saved"
        return Outcome(STOPPED, EXIT_STOPPED, text)
    first = first_failed(ends, lost, harmless=stopped)
    if first is None:
        return Outcome(FAILED, EXIT_ERROR, f"{unasked or 'the actor'} ended without being asked to", None, unasked)
    return Outcome(FAILED, first.code or EXIT_ERROR, f"first to fail: {first}", first, first.component)


class Journal:
    """The job's log: stdout and the attempt's job.log."""

    def __init__(self, path: Path):
        self._path = path

    def log(self, text: str) -> None:
        lines = "".join(f"{time.strftime('%H:%M:%S')} {line}\n" for line in text.splitlines())
        with contextlib.suppress(OSError):  # a full disk must not prevent an orderly end
            sys.stdout.write(lines)
            sys.stdout.flush()
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(lines)


def last_lines(log: Path, count: int = LAST_LOG_LINES) -> str:
    """Return the end of a `srun --label` log, without Python warnings, which explain no failure."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    shown: list[str] = []
    warned: set[str] = set()  # tasks whose next line is the source line of a warning
    for line in lines:
        task, _, text = line.partition(": ")
        if task in warned and text.startswith("  "):
            warned.discard(task)
        elif re.search(r"\.py:\d+: \w*Warning: ", text):
            warned.add(task)
        else:
            shown.append(line)
    return "\n".join([f"the last lines of {log}:", *(f"  | {line}" for line in shown[-count:] or ["(empty)"])])
