"""How tasks and attempts of a run's jobs ended, and what follows: exit code, log, and whether a job
is requeued.

Each task writes its own exit code to a file, since `srun` returns 143 or so whatever the tasks'
codes are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, EXIT_LOST_RANK, EXIT_STOPPED, Fault
from reinforce_rl.launch.slurm.settings import ACTOR
from reinforce_rl.runtime.starts import MAX_STARTS, no_progress
from reinforce_rl.runtime.status import read_status
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.untrusted_files import open_regular, read_json

EXIT_FOLDER = "exit"
HISTORY_FILE = "history.jsonl"
LAST_LOG_LINES = 20
TAIL_BYTES = 1 << 18
# Exit codes caused by another task's end: a rank that lost its peer, and tasks killed by `srun` or
# by us.
CONSEQUENCES = (EXIT_LOST_RANK, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)

# Exit codes of tasks that were asked to end. A program that is still starting dies of the signal.
STOPPED = (EXIT_STOPPED, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)

KILLED = 128 + signal.SIGKILL
LOST_REASON = (
    "it left no record: its wrapper was killed, its node is gone, or the run's folder is full"
)
_FAILED_TASKS = re.compile(
    r"error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?:Exited with exit code (?P<code>\d+))?"
)
_FAILED_NODE = re.compile(r"error: Node failure on (\S+)")

Arguments = tuple[tuple[str, ...], tuple[str, ...]]


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


@dataclass(frozen=True)
class TaskEnd:
    component: str  # such as actor or rm-0
    task: int  # its number in the step, which is its rank
    host: str  # its node
    code: int  # 128 + number for a signal
    time: float  # unix seconds
    reason: str = ""  # if the code does not say it

    @property
    def name(self) -> str:
        return f"{self.component} rank {self.task} on {self.host}"

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}"
        if self.code > 128:
            how = f"was ended by {_signal_name(self.code - 128)} (exit code {self.code})"
        why = f": {self.reason}" if self.reason else ""
        return f"{self.name} {how} at {time.strftime('%H:%M:%S', time.localtime(self.time))}{why}"


TaskEnds = Sequence[TaskEnd]


def record(folder: Path, end: TaskEnd) -> None:
    write_atomically(
        folder / EXIT_FOLDER / f"{end.component}-{end.task:05d}.json",
        json.dumps(asdict(end)) + "\n",
    )


def read_ends(folder: Path) -> list[TaskEnd]:
    paths = sorted((folder / EXIT_FOLDER).glob("*.json"))
    return [TaskEnd(**read_json(path, within=folder)) for path in paths]


def read_lost(folder: Path) -> list[TaskEnd]:
    """Return the tasks that have failed by `srun`'s files NAME.srun, and recorded no end.

    Sorted by when `srun` last wrote to each file. Servers come first among equals, because other
    tasks fail when they lose a server.
    """
    known = {(end.component, end.task) for end in read_ends(folder)}
    tasks = []
    for path in sorted(folder.glob("*.srun")):
        when = path.stat().st_mtime
        # srun: error: act1: task 2: Killed
        # srun: error: act0: tasks 0-1: Exited with exit code 1
        for match in _FAILED_TASKS.finditer(path.read_text(encoding="utf-8", errors="replace")):
            code = int(match["code"] or KILLED)
            for span in match["tasks"].split(","):
                first, _, last = span.partition("-")
                for task in range(int(first), int(last or first) + 1):
                    if (path.stem, task) not in known:
                        known.add((path.stem, task))
                        lost = TaskEnd(path.stem, task, match["host"], code, when, LOST_REASON)
                        tasks.append(lost)
    return sorted(tasks, key=lambda end: (end.time, not end.component.startswith("rm-")))


def failed_nodes(folder: Path) -> list[str]:
    """Return the nodes whose failure `srun` reports."""
    texts = (path.read_text("utf-8", "replace") for path in folder.glob("*.srun"))
    return sorted({node for text in texts for node in _FAILED_NODE.findall(text)})


def first_failed(ends: TaskEnds, lost: TaskEnds, harmless: Collection[int]) -> TaskEnd | None:
    """Return the task that failed first and caused the other failures; None if none failed.

    `lost` are tasks without a record.
    """
    failed = min(
        (end for end in ends if end.code not in harmless), key=lambda end: end.time, default=None
    )
    if lost and (failed is None or failed.code in CONSEQUENCES):
        return lost[0]
    return failed


@dataclass(frozen=True)
class Outcome:
    # Exit code of the job: EXIT_FINISHED; EXIT_STOPPED after a signal or for lack of time; any
    # other code is a failure.
    code: int
    text: str
    first: TaskEnd | None = None  # first task to fail, if any
    log_of: str = ""  # step whose log says more; empty for none
    never_began: bool = False  # the actor did not begin, and may in another attempt


def judge(
    actor: TaskEnds,
    servers: TaskEnds,
    lost: TaskEnds,
    *,
    unasked: str,
    signalled: int | None,
    killed: bool = False,
    has_met: bool = False,
) -> Outcome:
    """Judge an attempt whose servers were healthy by the ends of tasks; those in `lost` recorded
    none.

    `unasked` is the step of the last server if it ended unasked, else empty; `signalled` the signal
    that this job received; `killed` is true if the actor did not end in time after it, `has_met` if
    its tasks have met as ranks.
    """
    by = "" if signalled is None else _signal_name(signalled)
    if signalled is not None and killed:
        text = (
            f"the actor had not saved in time after {by}, and was killed; the run resumes from its "
            "newest checkpoint"
        )
        if signalled == signal.SIGUSR1:
            text += (
                ". The lead of sbatch --signal=B:USR1@SECONDS must be above a step and a save, and "
                "60 s"
            )
        return Outcome(EXIT_STOPPED, text, None, ACTOR)
    stopped = {EXIT_FINISHED, EXIT_STOPPED}
    if signalled is not None:
        stopped |= set(STOPPED)
    ends = [*actor, *servers]
    if not unasked:
        # a server that failed while others went on, or during shutdown, is not the cause
        ends = list(actor)
        lost = [end for end in lost if end.component == ACTOR]
        if not ends and not lost and signalled is None:
            if has_met:
                text = "the actor's tasks left no record of their ends; is the run's folder full?"
                return Outcome(EXIT_ERROR, text, None, ACTOR)
            return Outcome(EXIT_ERROR, "srun could not start actor; it says why above")
    codes = {end.code for end in actor}
    if not unasked and codes and codes <= stopped and not lost:
        if codes == {EXIT_FINISHED}:
            return Outcome(EXIT_FINISHED, "the run has finished")
        text = "the actor's time limit was reached or its tasks were signalled; it has saved"
        return Outcome(EXIT_STOPPED, f"the actor ended cleanly after {by}" if by else text)
    first = first_failed(ends, lost, harmless=stopped)
    if first is None:
        return Outcome(
            EXIT_ERROR, f"{unasked or 'the actor'} ended without being asked to", None, unasked
        )
    return Outcome(first.code or EXIT_ERROR, f"first to fail: {first}", first, first.component)


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


def read_attempts(folder: Path) -> list[Attempt]:
    """Return all attempts, oldest first; skips lines cut off by a full disk or of another
    version.
    """
    attempts: dict[tuple[str, int], Attempt] = {}  # the last line of an attempt counts
    path = folder / HISTORY_FILE
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            values = json.loads(line)
            values["arguments"] = tuple(tuple(args) for args in values["arguments"])
            attempt = Attempt(**values)
            attempts[attempt.job, attempt.restart] = attempt
    return list(attempts.values())


def write_attempt(folder: Path, attempt: Attempt) -> None:
    """Append a line; starts a new line after one that was cut off."""
    folder.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(asdict(attempt)) + "\n").encode()
    with (folder / HISTORY_FILE).open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line
        file.write(line)
        os.fsync(file.fileno())


def finished(run_dir: Path, attempts: Sequence[Attempt], arguments: Arguments) -> str | None:
    """Return a sentence if the run has finished; None too if `arguments` have changed, as they may
    add steps.
    """
    status = read_status(run_dir)
    if status is None or status.state != "finished":
        return None
    complete = [attempt for attempt in attempts if attempt.exit_code == EXIT_FINISHED]
    if complete and complete[-1].arguments != arguments:
        return None
    return f"the run in {run_dir} has finished, at step {status.step}"


def may_requeue(
    restart: int, max_restarts: int, step_before: int, step_after: int
) -> tuple[bool, str]:
    """Decide whether to requeue a job whose run has not finished; return the decision and its
    reason for the log.
    """
    if restart >= max_restarts:
        return False, f"it was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)"
    if step_after <= step_before:
        return (
            False,
            f"this attempt saved nothing beyond step {step_before}, so the next one might not "
            "either",
        )
    return (
        True,
        f"from step {step_before} to step {step_after}, restart {restart + 1} of {max_restarts}",
    )


def refusal(
    attempts: Sequence[Attempt], *, job: str, restart: int, max_restarts: int, step: int
) -> Fault | None:
    """Return why a job restarted by Slurm (as after a node failure) must not train; None if it
    may.
    """
    if restart > max_restarts:
        return Fault(
            f"the job was requeued {restart} times, of {max_restarts} (REINFORCE_MAX_RESTARTS)",
            key="slurm.job.too_many_restarts",
        )
    idle = sum(attempt.job == job and attempt.step_before == step for attempt in attempts)
    return None if idle < MAX_STARTS else no_progress(idle, step)


def last_lines(log: Path, count: int = LAST_LOG_LINES) -> str:
    """Return the end of a `srun --label` log, without Python warnings, which explain no failure."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    # A warning is followed by its source line, mostly the call of `warn`.
    shown = [
        line
        for line in lines
        if not re.search(r"\.py:\d+: \w*Warning: |^( *\d+: )?  (\w+\.)?warn\(", line)
    ]
    return "\n".join(
        [f"the last lines of {log}:", *(f"  | {line}" for line in shown[-count:] or ["(empty)"])]
    )
