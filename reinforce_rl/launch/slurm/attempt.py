"""What `slurm/train_hetjob.sbatch` delegates to Python: starting and closing an attempt, and
signals that need retries.

`begin` ends what an earlier attempt has left and writes the attempt down. `times` prints when the
job ends. `drain` ends steps within a bound. `first` says how the first task of a step has ended.
`end` says who failed first, what the job's code is and whether it is requeued. All import nothing
but the standard library, in the language of Python 3.9: the batch host may have no more.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reinforce_rl.errors import (
    EXIT_ALERT,
    EXIT_DIVERGED,
    EXIT_ERROR,
    EXIT_FINISHED,
    EXIT_STOPPED,
    ConfigError,
    Fault,
    ReinforceError,
)
from reinforce_rl.launch.slurm import outcome
from reinforce_rl.launch.slurm.outcome import Attempt, Outcome
from reinforce_rl.launch.slurm.settings import (
    ACTOR,
    component_faults,
    read_settings,
    split_arguments,
    unread_variables,
)
from reinforce_rl.runtime.status import saved_step
from reinforce_rl.utils.slurm_commands import (
    END_VARIABLE,
    START_VARIABLE,
    SlurmCallError,
    call,
    job_times,
)

FINISHED_BEFORE = 3  # exit code of `begin`: nothing is left to do
POLL_SECONDS = 1.0
RETRY_SECONDS = 5.0
REQUEUE_SECONDS = 30.0  # reserved for the requeue before the end of the allocation
LEAST_SECONDS = 10.0
KILL_SECONDS = 60.0  # from SIGKILL of a step to SIGKILL of its srun
# Files through which the parts of an attempt find each other.
SIGNS = ("ready-*", "rendezvous-*", "draining", "*.srun")
OUR_STEPS = rf"{ACTOR}|rm-\d+|gen-\d+(\.\d+)?"


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not prevent an orderly end
        for line in text.splitlines():
            print(time.strftime("%H:%M:%S"), line, flush=True)


def say_error(error: ReinforceError) -> None:
    say(f"error: {error.with_keys()}")


def job_ids() -> list[str]:
    """Return the numbers of the job's components, under which Slurm lists their steps."""
    groups = range(int(os.environ["SLURM_HET_SIZE"]))
    return [os.environ[f"SLURM_JOB_ID_HET_GROUP_{group}"] for group in groups]


class CurrentJob:
    """The job that this process belongs to: its settings and its files."""

    def __init__(self) -> None:
        self.job = os.environ["SLURM_JOB_ID"]
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT") or "0")
        self.settings = read_settings([], os.environ, Path())
        self.run = self.settings.run_dir
        self.slurm = self.run / "slurm"
        self.attempt = self.slurm / f"{self.job}-{self.restart}"


def begin(servers: str, generator_ranks: str, words: Sequence[str]) -> int:
    """Begin an attempt with ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]; raise ConfigError with all
    faults.
    """
    arguments = split_arguments(words)
    faults = _faults(servers, generator_ranks, words)
    if faults:
        raise ConfigError(faults)
    current = CurrentJob()
    end_stale_steps(current.settings.grace_seconds)
    attempts = outcome.read_attempts(current.slurm)
    if text := outcome.finished(current.run, attempts, arguments):
        say(f"{text}; nothing was started")
        return FINISHED_BEFORE
    step = saved_step(current.run)
    fault = _refusal(current, attempts, step)
    if fault is not None:
        sentence = f"{fault}. Nothing was started; the run is at step {step}."
        say_error(ReinforceError(sentence, key=fault.key))
        return EXIT_ERROR
    _remove_signs(current.attempt)
    _make_token(current.slurm / "token")
    outcome.write_attempt(
        current.slurm, Attempt(current.job, current.restart, time.time(), step, arguments)
    )
    say(
        f"job {current.job}, restart {current.restart}: run {current.run} at step {step}, "
        f"logs in {current.attempt}"
    )
    for other in attempts:
        if other.job == current.job and other.end is None:
            say(
                f"restart {other.restart} left no record: a node failed, or somebody requeued the "
                "job"
            )
    return EXIT_FINISHED


def _faults(servers: str, generator_ranks: str, words: Sequence[str]) -> list[str]:
    faults: list[str] = []
    try:
        read_settings(words, os.environ, Path())
    except ConfigError as error:
        faults += error.faults
    faults += unread_variables(os.environ)
    sizes: list[int] = []
    for name, value in (("servers", servers), ("generator_ranks", generator_ranks)):
        if value.isdecimal() and int(value) > 0:
            sizes.append(int(value))
        else:
            faults.append(
                Fault(
                    f"{name} of the script is '{value}'; expected a whole number from 1",
                    key="slurm.variable.invalid",
                )
            )
    if len(sizes) == 2:
        servers_count, ranks = sizes
        faults += component_faults(servers_count, ranks, *split_arguments(words), os.environ)
    return faults


def _refusal(current: CurrentJob, attempts: Sequence[Attempt], step: int) -> Fault | None:
    jobs = {other.job for other in attempts if other.end is None and other.job != current.job}
    for job in sorted(jobs):
        if _states(job) & {"R", "CF", "S", "ST"}:  # it has nodes
            return Fault(
                f"job {job} is using {current.run}; wait for it, or cancel it (scancel {job})",
                key="slurm.run_dir.in_use",
            )
    return outcome.refusal(
        attempts,
        job=current.job,
        restart=current.restart,
        max_restarts=current.settings.max_restarts,
        step=step,
    )


def _states(job: str) -> set[str]:
    """Return Slurm's short names of the states of a job's components.

    There are none of a job that ended long ago. Raises SlurmCallError if Slurm does not answer.
    """
    try:
        return set(call(["squeue", "-h", "-j", job, "-o", "%t"]).split())
    except SlurmCallError as error:
        if "Invalid job id" in error.said:
            return set()
        raise


def _remove_signs(folder: Path) -> None:
    """Remove what another job of this number has left: Slurm's numbers may start again."""
    shutil.rmtree(folder / outcome.EXIT_FOLDER, ignore_errors=True)
    for pattern in SIGNS:
        for path in folder.glob(pattern):
            path.unlink()


def _make_token(path: Path) -> None:
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".token.")  # mode 0600
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        os.replace(name, path)  # atomic


def steps_of(pattern: str) -> dict[str, str]:
    """Return the names of the job's running steps whose whole name matches, by their number."""
    command = ["squeue", "-h", "--steps", "-j", ",".join(job_ids()), "-o", "%i|%j"]
    lines = (line.strip().partition("|") for line in call(command).splitlines())
    return {number: name for number, _, name in lines if re.fullmatch(pattern, name)}


def signal_step(number: str, signal_number: int) -> None:
    # Through the controller: scancel itself asks all nodes of the component, and fails where a step
    # has only some.
    call(["scancel", "--ctld", f"--signal={int(signal_number)}", number])


def end_stale_steps(seconds: float) -> None:
    """End steps of an earlier attempt whose batch script is gone: SIGTERM, SIGKILL after `seconds`.

    When a node of component 0 fails, Slurm 22.05 requeues this component alone. The actor goes on
    in the folder that the next attempt needs, and holds the cores that its srun would wait for.
    Raises SlurmCallError: they do not end.
    """
    for signal_number, limit, how in (
        (signal.SIGTERM, seconds, "asked to end"),
        (signal.SIGKILL, KILL_SECONDS, "killed"),
    ):
        deadline = time.monotonic() + limit
        signalled: set[str] = set()
        while True:
            left = f"what job {job_ids()[0]} has left behind is not known"
            with contextlib.suppress(SlurmCallError):
                steps = steps_of(OUR_STEPS)
                if not steps:
                    return
                left = ", ".join(f"step {number} ({name})" for number, name in steps.items())
                for number in sorted(steps.keys() - signalled):
                    signal_step(number, signal_number)
                    signalled.add(number)
                    say(
                        f"{steps[number]} of an earlier attempt still runs, as step {number}; "
                        f"it is {how}"
                    )
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
    raise SlurmCallError(("squeue", "--steps"), f"cannot end {left} of an earlier attempt")


def drain(name: str, seconds: float, pattern: str, sruns: Sequence[int]) -> bool:
    """Signal steps and wait for their end; kill them after `seconds`. Return whether all ended by
    themselves.

    A signal is sent again where the step had no number yet or the controller did not take it.
    `sruns` are processes of the steps.
    """
    number = signal.Signals[f"SIG{name}"]
    if _ends_by(pattern, sruns, number, time.monotonic() + _allowed(number, seconds)):
        return True
    say(f"{pattern.rstrip('-')} has not ended in time; killing it")
    if not _ends_by(pattern, sruns, signal.SIGKILL, time.monotonic() + KILL_SECONDS):
        for process in filter(_runs, sruns):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return False


def _allowed(number: int, seconds: float) -> float:
    """Return the seconds until SIGKILL, which leave time for a requeue before the time limit.

    After SIGUSR1, which announces the time limit, the step gets all of that time.
    """
    try:
        _, end = job_times(*job_ids())
    except SlurmCallError:
        end = int(os.environ.get(END_VARIABLE) or 0) or None
    if end is None:
        return seconds
    left = max(end - REQUEUE_SECONDS - time.time(), LEAST_SECONDS)
    return left if number == signal.SIGUSR1 else min(seconds, left)


def _ends_by(pattern: str, sruns: Sequence[int], number: int, deadline: float) -> bool:
    """Signal each step once; return whether no step and no srun is left at the deadline."""
    signalled: set[str] = set()
    last_look = -math.inf
    has_steps = True
    while True:
        has_sruns = any(map(_runs, sruns))
        # a step ends with its sruns, or a moment later
        pause = RETRY_SECONDS if has_sruns else POLL_SECONDS
        if time.monotonic() >= last_look + pause:
            last_look = time.monotonic()
            try:
                steps = steps_of(rf"{pattern}\S*")
                has_steps = bool(steps)
                for step in sorted(steps.keys() - signalled):
                    signal_step(step, number)
                    signalled.add(step)
            except SlurmCallError as error:
                if not has_sruns or _slurm_ends_this_job():
                    has_steps = False
                else:
                    say(f"cannot signal {pattern.rstrip('-')}, trying again: {error}")
        if not has_sruns and not has_steps:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS / 4)


def _slurm_ends_this_job() -> bool:
    try:
        return "CG" in _states(job_ids()[0])
    except SlurmCallError:  # not known
        return False


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):  # an ended srun's number may be given again
        return False
    return True


def times() -> str:
    """Return a shell's line that exports this job's times, as far as Slurm knows them."""
    try:
        start, end = job_times(*job_ids())
    except SlurmCallError as error:
        print(f"warning: the end of this job is not known: {error}", file=sys.stderr, flush=True)
        return ""
    known = {START_VARIABLE: start, END_VARIABLE: end}
    words = [f"{name}={value}" for name, value in known.items() if value is not None]
    return f"export {' '.join(words)}" if words else ""


def first(step: str) -> str:
    """Return how the first task of a step has ended."""
    folder = CurrentJob().attempt
    ends = [*outcome.read_ends(folder), *outcome.read_lost(folder)]
    ends = [end for end in ends if end.component == step]
    return str(min(ends, key=lambda end: end.time)) if ends else f"{step} could not be started"


def end(facts: argparse.Namespace) -> int:
    """Close the attempt; return the job's exit code."""
    current = CurrentJob()
    step = saved_step(current.run)
    attempts = outcome.read_attempts(current.slurm)
    attempt = next(
        other for other in attempts if (other.job, other.restart) == (current.job, current.restart)
    )
    result = _judge(current, facts)
    if facts.stopped_alone and step == attempt.step_before:
        result = replace(result, never_began=True)
    log = current.attempt / f"{result.log_of}.log"
    if result.log_of and log.exists():
        say(outcome.last_lines(log))
    say(result.text)
    requeue, advice = _next(current, facts, attempt, result, step)
    say(
        f"the run is at step {step}, which was {attempt.step_before} when this attempt began; "
        f"{advice}"
    )
    closed = replace(
        attempt,
        end=time.time(),
        step_after=step,
        reason=result.text,
        exit_code=result.code,
        first_failed=result.first.name if result.first else None,
        requeued=requeue,
    )
    with contextlib.suppress(OSError):
        outcome.write_attempt(current.slurm, closed)
    if requeue:
        try:
            call(["scontrol", "requeue", current.job])  # with all its components
        except SlurmCallError as error:
            sentence = f"the job could not be requeued ({error}); submit the same command again"
            say_error(ReinforceError(sentence, key="slurm.job.not_requeued"))
            with contextlib.suppress(OSError):
                outcome.write_attempt(current.slurm, replace(closed, requeued=False))
    return result.code


def _judge(current: CurrentJob, facts: argparse.Namespace) -> Outcome:
    ends = outcome.read_ends(current.attempt)
    actor = [end for end in ends if end.component == ACTOR]
    servers = [end for end in ends if end.component.startswith("rm-")]
    lost = [
        end
        for end in outcome.read_lost(current.attempt)
        if end.component == ACTOR or end.component.startswith("rm-")
    ]
    signalled = None if facts.signal is None else signal.Signals[f"SIG{facts.signal}"]
    if facts.never_healthy is not None:
        text = facts.never_healthy
        if signalled is not None:
            return Outcome(EXIT_STOPPED, text)
        ended = re.match(r"(rm-\d+) ended", text)
        if ended is None:
            return Outcome(EXIT_ERROR, text, None, "rm-0")
        servers = [end for end in servers if end.component == ended[1]]
        lost = [end for end in lost if end.component == ended[1]]
        result = outcome.judge([], servers, lost, unasked=ended[1], signalled=None)
        return replace(result, text=f"{text}; {result.text}", log_of=ended[1])
    if facts.never_began is not None:
        return Outcome(EXIT_ERROR, facts.never_began, never_began=True)
    if signalled is None and facts.stopped_alone:
        signalled = signal.SIGTERM
    return outcome.judge(
        actor,
        servers,
        lost,
        unasked=facts.unasked or "",
        signalled=signalled,
        killed=facts.killed,
        has_met=(current.attempt / f"rendezvous-{ACTOR}.json").exists(),
    )


def _next(
    current: CurrentJob, facts: argparse.Namespace, attempt: Attempt, result: Outcome, step: int
) -> tuple[bool, str]:
    """Decide whether to requeue the job at `step`; return the decision and what comes next."""
    if result.code == EXIT_FINISHED:
        return False, "nothing is left to do"
    advice = f"submit the same command again to resume from step {step}"
    if nodes := " and ".join(outcome.failed_nodes(current.attempt)):
        return (
            False,
            f"Slurm itself requeues the job, since {nodes} failed; it resumes from step {step}",
        )
    if facts.signal == "TERM":
        return False, f"not requeued after SIGTERM; {advice}"
    if result.code == EXIT_DIVERGED:
        return (
            False,
            "not requeued: the policy has diverged, and would again from the same checkpoint",
        )
    if result.code == EXIT_ALERT:
        return False, f"not requeued: an alert has stopped the run; {advice}"
    max_restarts = current.settings.max_restarts
    if result.never_began and current.restart < max_restarts:
        # `_refusal` ends what never gets further
        return True, "requeued, as another attempt may begin"
    if result.code != EXIT_STOPPED and not current.settings.restart_after_crash:
        return (
            False,
            f"not requeued after a failure (REINFORCE_RESTART_AFTER_CRASH is false); {advice}",
        )
    requeue, why = outcome.may_requeue(current.restart, max_restarts, attempt.step_before, step)
    if requeue:
        return True, f"requeued: {why}; Slurm waits about two minutes before"
    return False, f"not requeued: {why}; {advice}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attempt", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    draining = verbs.add_parser("drain")
    draining.add_argument("signal")
    draining.add_argument("seconds", type=float)
    draining.add_argument("steps", help="what their names begin with")
    draining.add_argument("sruns", type=int, nargs="*")
    verbs.add_parser("times")
    naming = verbs.add_parser("first")
    naming.add_argument("step")
    ending = verbs.add_parser("end")
    ending.add_argument("--signal", help="that this job got")
    ending.add_argument("--killed", action="store_true", help="the actor did not end after it")
    ending.add_argument("--unasked", help="step of the last server, which ended unasked")
    ending.add_argument("--stopped-alone", action="store_true")
    ending.add_argument("--never-began", help="why the actor did not")
    ending.add_argument("--never-healthy", help="why the servers were not")
    return parser


def main(argv: Sequence[str]) -> int:
    # Slurm signals every process of the batch step; the script decides what follows.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        if argv[:1] == ["begin"]:
            return begin(argv[1], argv[2], argv[3:])
        values = _parser().parse_args(argv)
        if values.verb == "drain":
            in_time = drain(values.signal, values.seconds, values.steps, values.sruns)
            if values.steps == ACTOR:
                # before the servers end: Slurm may kill a cancelled job meanwhile
                step = saved_step(CurrentJob().run)
                say(f"the actor has ended; the newest checkpoint is of step {step}")
            return 0 if in_time else 1
        if values.verb == "times":
            print(times())
            return 0
        if values.verb == "first":
            print(first(values.step))
            return 0
        return end(values)
    except ConfigError as error:
        print(f"error: {error.with_keys()}", flush=True)
    except OSError as error:
        folder = os.environ["REINFORCE_RUN_DIR"]
        say_error(
            ReinforceError(
                f"the job cannot work in {folder}, the run's folder: {error}",
                key="slurm.run_dir.unusable",
            )
        )
    except SlurmCallError as error:
        sentence = f"Slurm does not answer: {error}"
        say_error(ReinforceError(sentence, key="slurm.command.failed"))
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
