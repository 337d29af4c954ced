"""Context of a run on one rank: signals, `status.json`, the current phase, and the watch over the
other ranks.

A thread of each rank reports the state of its main thread to rank 0 every second, over `Links`.
Rank 0 reports to the others too, and once a rank is lost sends the verdict, with which the thread
ends even a process stuck in a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import (
    EXIT_ERROR,
    EXIT_FINISHED,
    AlertStop,
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    Fault,
    LostRankError,
    ReinforceError,
    StoppedEarly,
    key_of,
)
from reinforce_rl.runtime.links import Invitation, Links
from reinforce_rl.runtime.phases import PhaseTracker, StackWatcher
from reinforce_rl.runtime.run_lock import run_lock
from reinforce_rl.runtime.starts import count_start
from reinforce_rl.runtime.status import EXIT_INTERRUPTED, StatusFile, saved_step
from reinforce_rl.runtime.stop import StopNow, StopRequest
from reinforce_rl.utils.files import UNWRITABLE, write_fault
from reinforce_rl.utils.job_rank import JobRank, is_first_rank

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh
    from reinforce_rl.runtime.roles import RankRole

BEAT_SECONDS = 1.0
CONNECT_SECONDS = 30.0
# from the first sign of a loss to the verdict, since a dead rank drags others along
SETTLE_SECONDS = 1.0
GRACE_SECONDS = 5.0  # from the verdict to the exit of a process whose main thread is stuck
END_SECONDS = 120.0  # for cleanup of a main thread that is already ending

WATCH = "watch"  # where rank 0's invitation is shared
_NAMED = 8  # most ranks named in a message


@dataclass(frozen=True)
class Report:
    """Last known state of a rank."""

    rank: int
    host: str
    phase: str = "start"  # phase, step and number as in `phases.Phase`
    step: int = 0
    number: int = 0
    has_deadline: bool = False  # it waits for another program, with its own timeout
    line: str = ""  # of this package, where its main thread is
    in_collective: bool = False  # it waits for other ranks
    still: float = 0.0  # seconds without movement of its main thread


@dataclass(frozen=True)
class Verdict:
    text: str  # names rank, host and phase
    exit_code: int = LostRankError.exit_code  # of the ranks that end because of it
    of_first: bool = False  # rank 0 is lost, which writes the run's status
    key: str = ""  # of the error that the other ranks end with
    code_of_lost: int | None = None  # exit code that the lost rank had sent

    def error(self) -> ReinforceError:
        """Return the error that a rank ends with because of it."""
        if self.exit_code == StoppedEarly.exit_code:
            return StoppedEarly(self.text, key=self.key)
        return LostRankError(self.text, key=self.key, code_of_lost=self.code_of_lost)


@dataclass
class _Watched:
    report: Report
    ended: tuple[int, str, str] | None = None  # exit code, text and key
    ended_at: float = 0.0  # `time.monotonic`


class Watchdog:
    """This rank's side of the watch.

    A rank is lost after `silence_seconds` without a message; the run aborts once no rank gets
    further for `hang_seconds`. The stop request of `run` is sent to the others, and theirs passed
    to it.
    """

    def __init__(
        self,
        run: RunControl,
        rank: int,
        world_size: int,
        *,
        silence_seconds: float,
        hang_seconds: float,
    ):
        self.rank = rank
        self._run = run
        self._phases = run.phases
        self._stop = run.stop
        self._silence_seconds = silence_seconds
        self._hang_seconds = hang_seconds
        self._place = StackWatcher(threading.get_ident())
        self._links: Links | None = None
        self._others = {
            other: _Watched(Report(other, "?"))
            for other in (range(1, world_size) if rank == 0 else [0])
        }
        self._verdict: Verdict | None = None
        self._timed_out: dict[int, str] = {}  # on rank 0: timeout errors by rank
        self.ending = threading.Event()
        self._judged, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def open(self, host: str) -> Invitation:
        """Listen on rank 0, reached by the others as `host`; return the invitation that they `join`
        with.
        """
        self._links, invitation = Links.listen(host)
        return invitation

    def join(self, invitation: Invitation) -> None:
        """Connect to rank 0, on the others; raise ReinforceError if it cannot be reached."""
        try:
            self._links = Links.connect(invitation, self.rank, self._beat()[0], CONNECT_SECONDS)
        except ConnectionError as error:
            raise ReinforceError(
                f"rank {self.rank} ({gethostname()}) {error}", key="ranks.rank.not_connected"
            ) from error

    def start(self) -> None:
        """Start watching.

        Rank 0 first waits for the others, and raises ReinforceError if one is missing.
        """
        assert self._links is not None
        self._links.set_beat(BEAT_SECONDS, self._beat)
        if self.rank == 0:
            hellos = self._links.accept(self._others.keys(), CONNECT_SECONDS)
            for rank, hello in hellos.items():
                self._others[rank].report = Report(**json.loads(hello)["report"])
            if missing := sorted(self._others.keys() - hellos.keys()):
                raise ReinforceError(
                    f"rank 0 got no report of the ranks {missing} within "
                    f"{CONNECT_SECONDS:.0f} s; look at the output of these ranks",
                    key="ranks.rank.no_report",
                )
        # Report each new phase at once, so that the verdict on a dead rank names its phase.
        self._phases.listen(lambda name: self._send(self._state()))
        self._thread.start()

    def explain(self, *, timed_out: str = "") -> Verdict | None:
        """Return the verdict after an error of this rank, if another rank is to blame.

        `timed_out` is a collective's own timeout error. It does not name the awaited rank; rank 0
        finds it.
        """
        if timed_out and self.rank == 0:
            self._timed_out[0] = timed_out
        elif timed_out:
            self._send({"timed_out": timed_out})
        self._judged.wait(SETTLE_SECONDS + 2 * BEAT_SECONDS)
        return self._verdict

    def end(self, exit_code: int, text: str = "", key: str = "") -> None:
        """Send the others the exit code of this rank's main thread, and its error's text and key.

        Only the first call counts.
        """
        if not self.ending.is_set():
            self._send({"end": exit_code, "text": text, "key": key})
            self.ending.set()

    def close(self) -> None:
        """Stop watching; call `end` first."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT_SECONDS)
        if self._links is not None:
            self._links.close()

    def _watch(self) -> None:
        assert self._links is not None
        first_sign: float | None = None
        next_look = 0.0
        while not self._closing.is_set():
            for rank, parts in self._links.poll(0.2):
                self._receive(self._others[rank], json.loads(bytes(parts[0])))
            now = time.monotonic()
            # limited to once a beat, since looking for a hang walks the stack
            looks = now >= next_look
            next_look = now + BEAT_SECONDS if looks else next_look
            lost = self._timed_out or self._failed() or any(self._lost())
            if first_sign is None and (lost or (looks and self._hung() is not None)):
                first_sign = now
            if (
                self._verdict is None
                and first_sign is not None
                and now - first_sign >= SETTLE_SECONDS
            ):
                self._verdict = self._judge()
            if self._verdict is not None:
                self._see_the_end(self._links, self._verdict)
                return

    def _see_the_end(self, links: Links, verdict: Verdict) -> None:
        if self.rank == 0:
            self._send({"verdict": asdict(verdict)})
            links.poll(0.0)
        self._judged.set()
        self.ending.wait(GRACE_SECONDS)  # give the main thread time to end by itself
        links.poll(0.0)  # flush the message of `end`
        if not self._closing.wait(END_SECONDS if self.ending.is_set() else 0.0):
            self._run.leave(verdict)

    def _report(self) -> Report:
        phase = self._phases.phase
        place = self._place.look()
        still = time.monotonic() - max(place.still_since, phase.since)
        # then for scores, too
        waits = place.in_collective and not (place.of_role and phase.has_deadline)
        where = (phase.name, phase.step, phase.number, phase.has_deadline, place.line, waits, still)
        return Report(self.rank, gethostname(), *where)

    def _state(self) -> dict[str, Any]:
        stop = {} if self._stop.reason is None else {"stop": self._stop.reason}
        return {"report": asdict(self._report()), **stop}

    def _beat(self) -> list[bytes]:
        return [json.dumps(self._state()).encode()]

    def _send(self, message: dict[str, Any]) -> None:
        if self._links is not None:
            self._links.send_all(json.dumps(message).encode())

    def _receive(self, sender: _Watched, message: dict[str, Any]) -> None:
        if "report" in message:
            sender.report = Report(**message["report"])
        if "stop" in message:
            self._stop.relay(message["stop"])
        if "end" in message:
            sender.ended = message["end"], message["text"], message["key"]
            sender.ended_at = time.monotonic()
            if sender.ended[0] in (StoppedEarly.exit_code, AlertStop.exit_code):
                self._stop.relay("a signal to another rank")
        if "timed_out" in message:
            self._timed_out[sender.report.rank] = message["timed_out"]
        if "verdict" in message and self._verdict is None:
            self._verdict = Verdict(**message["verdict"])

    def _lost(self) -> tuple[list[Report], list[Report]]:
        """Return the ranks whose connections closed without a message, and the silent ranks."""
        assert self._links is not None
        left = [
            (self._links.peers[rank], other.report)
            for rank, other in self._others.items()
            if other.ended is None
        ]
        gone = [report for peer, report in left if peer.closed]
        return gone, [report for peer, report in left if peer.silence > self._silence_seconds]

    def _failed(self) -> list[_Watched]:
        return [
            o for o in self._others.values() if o.ended is not None and o.ended[0] != EXIT_FINISHED
        ]

    def _judge(self) -> Verdict | None:
        # A dead process explains more than the errors it causes on other ranks.
        verdict = lost(*self._lost(), self._silence_seconds)
        verdict = verdict or waited_for(self._reports(), self._timed_out) or self._hung()
        if verdict is None and (failures := self._failed()):
            first = min(failures, key=lambda other: other.ended_at)
            assert first.ended is not None
            return failed(first.report, *first.ended)
        return verdict

    def _hung(self) -> Verdict | None:
        if (
            self.rank != 0
            or self.ending.is_set()
            or any(o.ended is not None for o in self._others.values())
        ):
            return None
        return hung(self._reports(), self._hang_seconds)

    def _reports(self) -> list[Report]:
        return [self._report(), *(other.report for other in self._others.values())]


def lost(gone: Sequence[Report], silent: Sequence[Report], seconds: float) -> Verdict | None:
    """Return the verdict on ranks that closed their connections without a message, or sent none for
    `seconds`.
    """
    if gone:
        why = Fault(
            ": the process ended without a message; see its output and the kernel's log",
            key="ranks.rank.died",
        )
        return _verdict(gone, "died in", why)
    if not silent:
        return None
    manner = f"was last heard of {seconds:.0f} s ago, in"
    why = Fault(": its process is stopped, or its machine is down", key="ranks.rank.silent")
    return _verdict(silent, manner, why)


def failed(report: Report, exit_code: int, text: str, key: str = "") -> Verdict:
    """Return the verdict on a rank that sent its error, with this key; if it was stopped, the
    others stop too.
    """
    if exit_code == StoppedEarly.exit_code:
        return Verdict(text, exit_code, key=key)
    cause = text.strip() or f"exit code {exit_code}"
    verdict = _verdict([report], "failed in", Fault(f": {cause}", key="ranks.rank.failed"))
    return replace(verdict, code_of_lost=exit_code)


def hung(reports: Sequence[Report], limit: float) -> Verdict | None:
    """Return the verdict if no rank has moved for `limit` seconds; else None.

    Blames the ranks outside a collective; if all are in one, those with the least progress.
    """
    seconds = min(report.still for report in reports)
    return (
        None
        if seconds < limit
        else _stuck(reports, f"no rank has made progress for {seconds:.0f} s")
    )


def waited_for(reports: Sequence[Report], timed_out: Mapping[int, str]) -> Verdict | None:
    """Return the verdict after a collective's timeout (`timed_out`: texts by rank); None if nobody
    can be blamed.
    """
    others = [report for report in reports if report.rank not in timed_out]
    if not timed_out or not others:
        return None
    rank = min(timed_out)
    return _stuck(
        others,
        f"rank {rank} has waited longer than torch's timeout ({timed_out[rank].strip()})",
    )


def _stuck(reports: Sequence[Report], why: str) -> Verdict | None:
    """Blame the ranks outside a collective; None if one of them has its own timeout."""
    blamed = [report for report in reports if not report.in_collective]
    if any(report.has_deadline for report in blamed):
        return None
    if not blamed:
        least = min(report.number for report in reports)
        blamed = [report for report in reports if report.number == least]
    lines = ", ".join(dict.fromkeys(report.line for report in blamed if report.line))
    place = f" at {lines}" if lines else ""
    return _verdict(blamed, "hangs in", Fault(f"{place}: {why}", key="ranks.rank.hangs"))


def _verdict(lost: Sequence[Report], manner: str, why: Fault) -> Verdict:
    names = ", ".join(f"rank {report.rank} (host {report.host})" for report in lost[:_NAMED])
    if len(lost) > _NAMED:
        names += f" and {len(lost) - _NAMED} more"
    step = f" of step {lost[0].step}" if lost[0].step else ", before the first step"
    advice = "The other ranks end. The same command resumes from the last checkpoint"
    text = f"{names} {manner} phase {lost[0].phase}{step}{why}. {advice}"
    return Verdict(text, of_first=any(report.rank == 0 for report in lost), key=key_of(why))


_REFUSALS = (ConfigError, DataError, CheckpointError)
_STOPPED_BEFORE_FIRST_STEP = "run.stop.before_first_step"


class RunControl:
    def __init__(self, folder: str | Path, stop: StopRequest, status: StatusFile | None = None):
        self.phases = PhaseTracker()
        self.stop = stop
        self.status = status or StatusFile(Path(folder), enabled=is_first_rank())
        self.has_begun = False  # the start was not refused, and the run's files may be changed
        self._watchdog: Watchdog | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep `status.json` up to date during the block, which is the whole run.

        Raises StoppedEarly if a signal came before there was anything to save, and ConfigError if
        another process, on this machine or on another one, works in this run's folder, or if a
        Slurm job starts again and again at the same checkpoint.
        """
        folder = self.status.path.parent
        with run_lock(folder) if self.status.enabled else contextlib.nullcontext():
            if self.status.enabled:
                count_start(folder, saved_step(folder), os.environ)
            self.status.begin()
            try:
                yield
            except StopNow:
                error = StoppedEarly(
                    f"stopped by {self.stop.reason} before the first step; there was nothing to "
                    "save",
                    key=_STOPPED_BEFORE_FIRST_STEP,
                )
                self.status.end(error.exit_code, str(error))
                raise error from None
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    error.args = (
                        f"interrupted by Ctrl-C; the same command {self._resume_advice()}",
                    )
                if isinstance(error, OSError) and error.errno in UNWRITABLE:
                    failure = DiskError(
                        f"{write_fault(error)}, which {self._resume_advice()}",
                        key="disk.file.not_written",
                    )
                    self.status.end(*_outcome(failure))
                    raise failure from error
                if not self.has_begun and isinstance(error, _REFUSALS):
                    self.status.refuse(*_outcome(error))
                else:
                    self.status.end(*_outcome_of_run(error))
                raise
            self.status.end(EXIT_FINISHED)

    def _resume_advice(self) -> str:
        step = saved_step(self.status.path.parent)
        return (
            f"resumes after step {step}, the last one saved"
            if step
            else "starts over: no step was saved"
        )

    @contextlib.contextmanager
    def watching(self, mesh: Mesh, role: RankRole | None = None, **limits: float) -> Iterator[None]:
        """Watch the other ranks during the block, like `ending`; do nothing with a single rank.

        `limits` are the arguments of `Watchdog`.

        With a `role`, watch all ranks of the job, not only those of the mesh.
        """
        from reinforce_rl.megatron.mesh import rendezvous_errors  # imports torch and megatron

        rank, size = (mesh.rank, mesh.world_size) if role is None else (role.rank, role.size)
        if size == 1:
            yield
            return
        watchdog = self._watchdog = Watchdog(self, rank, size, **limits)
        try:
            with rendezvous_errors(rank, size):
                host = JobRank.of_process().host_of_first
                invitation = watchdog.open(host) if rank == 0 else None
                if role is None:
                    invitation = mesh.from_main(invitation)
                elif invitation is not None:
                    role.share(WATCH, invitation.to_json())
                else:
                    invitation = Invitation.from_json(role.shared(WATCH))
                with mesh.raise_on_all_ranks():
                    if rank != 0 and invitation is not None:
                        watchdog.join(invitation)
            watchdog.start()
            with self.ending():
                yield
            watchdog.end(EXIT_FINISHED)
        finally:
            watchdog.close()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Send an error of the block to the other ranks at once, before any cleanup.

        Raises LostRankError in its place if another rank's loss caused it, StoppedEarly if that one
        got a signal.
        """
        try:
            yield
        except BaseException as error:
            watchdog = self._watchdog
            if watchdog is None or watchdog.ending.is_set():
                raise
            # All ranks raise our own errors together; any other error may be caused by another
            # rank's end.
            may_be_echo = isinstance(error, Exception) and not isinstance(error, ReinforceError)
            verdict = watchdog.explain(timed_out=_time_out_of(error)) if may_be_echo else None
            watchdog.end(*_outcome(error), key=_key_of_error(error))
            if verdict is not None:
                if verdict.of_first:
                    self.status.take_over_reporting()
                raise verdict.error() from error
            raise

    def leave(self, verdict: Verdict) -> None:
        """Exit from the watchdog's thread while the main thread is stuck."""
        if verdict.of_first:
            self.status.take_over_reporting()
        error = verdict.error()
        self.status.end(*_outcome_of_run(error))
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h")  # show the cursor, hidden by the live display
            kind = "" if verdict.exit_code == StoppedEarly.exit_code else "error: "
            print(f"{kind}{error.with_keys()}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(verdict.exit_code)


def _time_out_of(error: BaseException) -> str:
    """Return the text of a collective's timeout error; empty for any other error."""
    text = str(error)
    return (
        text
        if isinstance(error, RuntimeError) and re.search(r"tim(ed|ing) out|timeout", text, re.I)
        else ""
    )


def _key_of_error(error: BaseException) -> str:
    """Return the key of an error; empty for one that is not this package's."""
    if isinstance(error, StopNow):
        return _STOPPED_BEFORE_FIRST_STEP
    return key_of(error)


def _outcome_of_run(error: BaseException) -> tuple[int, str]:
    """Return exit code and text for `status.json`: the code of the rank that failed first.

    The other ranks exit with `EXIT_LOST_RANK`, so that a launcher can tell the first one.
    """
    code, text = _outcome(error)
    if isinstance(error, LostRankError) and error.code_of_lost is not None:
        code = error.code_of_lost
    return code, text


def _outcome(error: BaseException) -> tuple[int, str]:
    if isinstance(error, ReinforceError):
        return error.exit_code, str(error)
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return EXIT_ERROR, write_fault(error)
    if isinstance(error, StopNow):
        return StoppedEarly.exit_code, "stopped by a signal to another rank"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, str(error) or "interrupted by Ctrl-C"
    return EXIT_ERROR, f"{type(error).__name__}: {error}"
