"""Ranks watch each other, so that a rank that dies or hangs ends the job within a bounded time and is named.

A thread of each rank reports the state of its main thread to rank 0 every second, over `Links`. Rank 0 reports to the
others too, and sends the verdict once a rank is lost. The thread exits the process if the main thread is stuck in a
collective.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from socket import gethostname
from typing import Any

from reinforce_rl.errors import EXIT_FINISHED, EXIT_LOST_RANK, EXIT_STOPPED, ReinforceError
from reinforce_rl.runtime.links import Invitation, Links
from reinforce_rl.runtime.phases import Activity, PlaceWatcher
from reinforce_rl.runtime.stop import StopRequest

BEAT_SECONDS = 1.0
CONNECT_SECONDS = 30.0
SETTLE_SECONDS = 1.0  # from the first sign of a loss to the verdict, since a dead rank drags others along
GRACE_SECONDS = 5.0  # from the verdict to the exit of a process whose main thread is stuck
END_SECONDS = 120.0  # for cleanup of a main thread that is already ending

_NAMED = 8  # most ranks named in a message


@dataclass(frozen=True)
class Report:
    """Last known state of a rank."""

    rank: int
    host: str = "?"
    phase: str = "start"  # phase, step and number as in `phases.Phase`
    step: int = 0
    number: int = 0
    seconds: float = 0.0  # in this phase
    has_deadline: bool = False  # it waits for another program, with its own timeout
    line: str = ""  # of this package, where its main thread is
    in_collective: bool = False  # it waits for other ranks
    still: float = 0.0  # seconds without movement of its main thread

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host})"

    @property
    def where(self) -> str:
        return f"phase {self.phase} of step {self.step}" if self.step else f"phase {self.phase}, before the first step"


@dataclass(frozen=True)
class Verdict:
    text: str  # names rank, host and phase
    exit_code: int = EXIT_LOST_RANK  # of the ranks that end because of it
    of_first: bool = False  # rank 0 is lost, which writes the run's status


@dataclass
class _Watched:
    report: Report
    ended: tuple[int, str] | None = None  # exit code and text
    ended_at: float = 0.0  # `time.monotonic`


class Watchdog:
    """This rank's side of the watch.

    Args:
        stop: polled for this rank, and passed the requests of others.
        silence_seconds: a rank that sends nothing for this long is lost.
        hang_seconds: abort after this long without progress on any rank.
        leave: exits this process; called on the watchdog's thread.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        activity: Activity,
        stop: StopRequest,
        *,
        silence_seconds: float,
        hang_seconds: float,
        leave: Callable[[Verdict], None],
    ):
        self.rank = rank
        self._host = gethostname()
        self._activity = activity
        self._stop = stop
        self._silence_seconds = silence_seconds
        self._hang_seconds = hang_seconds
        self._leave = leave
        self._place = PlaceWatcher(threading.get_ident())
        self._links: Links | None = None
        others = range(1, world_size) if rank == 0 else [0]
        self._others = {other: _Watched(Report(other)) for other in others}
        self._verdict: Verdict | None = None
        self._timed_out: dict[int, str] = {}  # on rank 0: timeout errors by rank
        self._judged = threading.Event()
        self._closing = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def open(self, host: str) -> Invitation:
        """Listen on rank 0, reached by the others as `host`; return the invitation that they `join` with."""
        self._links, invitation = Links.listen(host)
        return invitation

    def join(self, invitation: Invitation) -> None:
        """Connect to rank 0, on the others.

        Raises:
            ReinforceError: it cannot be reached.
        """
        try:
            self._links = Links.connect(invitation, self.rank, self._beat()[0], CONNECT_SECONDS)
        except ConnectionError as error:
            raise ReinforceError(
                f"rank {self.rank} ({self._host}) cannot reach rank 0 at {invitation.host}:{invitation.port}: "
                f"{error}; ranks of a job need open ports between them"
            ) from error

    def start(self) -> None:
        """Start watching; rank 0 first waits for the others, which have all joined.

        Raises:
            ReinforceError: on rank 0, a rank is missing.
        """
        assert self._links is not None
        self._links.set_beat(BEAT_SECONDS, self._beat)
        if self.rank == 0:
            hellos = self._links.accept(self._others.keys(), CONNECT_SECONDS)
            for rank, hello in hellos.items():
                self._others[rank].report = Report(**json.loads(hello)["report"])
            if missing := sorted(self._others.keys() - hellos.keys()):
                raise ReinforceError(f"no report of rank {missing} came to rank 0 within {CONNECT_SECONDS:.0f} s")
        # Report each new phase at once, so that the verdict on a dead rank names its phase.
        self._activity.listen(lambda name: self._send(*self._beat()))
        self._thread.start()

    def explain(self, *, timed_out: str = "") -> Verdict | None:
        """Return the verdict after an error of this rank, if another rank is to blame.

        `timed_out` is a collective's own timeout error. It does not name the awaited rank; rank 0 finds it.
        """
        if timed_out and self.rank == 0:
            self._timed_out[0] = timed_out
        elif timed_out:
            self._send(_encode({"timed_out": timed_out}))
        self._judged.wait(SETTLE_SECONDS + 2 * BEAT_SECONDS)
        return self._verdict

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def end(self, exit_code: int, text: str = "") -> None:
        """Send the others the exit code of this rank's main thread. Only the first call counts."""
        if not self.is_ending:
            self._send(_encode({"end": exit_code, "text": text}))
            self._ending.set()

    def close(self) -> None:
        """Stop watching; call `end` first."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT_SECONDS)
        if self._links is not None:
            self._links.close()

    def _run(self) -> None:
        assert self._links is not None
        first_sign: float | None = None
        next_look = 0.0
        while not self._closing.is_set():
            for rank, parts in self._links.poll(0.2):
                self._receive(self._others[rank], json.loads(bytes(parts[0])))
            now = time.monotonic()
            looks = now >= next_look  # limited to once a beat, since looking for a hang walks the stack
            if looks:
                next_look = now + BEAT_SECONDS
            if self._verdict is None:
                if first_sign is None and (self._sign_of_loss() or (looks and self._hung() is not None)):
                    first_sign = now
                if first_sign is not None and now - first_sign >= SETTLE_SECONDS:
                    self._judge()
            if self._verdict is not None:
                self._see_the_end(self._links, self._verdict)
                return

    def _see_the_end(self, links: Links, verdict: Verdict) -> None:
        if self.rank == 0:
            self._send(_encode({"verdict": asdict(verdict)}))
            links.poll(0.0)
        self._judged.set()
        self._ending.wait(GRACE_SECONDS)  # give the main thread time to end by itself
        links.poll(0.0)  # flush the message of `end`
        if self._closing.wait(END_SECONDS if self._ending.is_set() else 0.0):
            return
        self._leave(verdict)

    def _report(self) -> Report:
        phase, place, now = self._activity.phase, self._place.look(), time.monotonic()
        return Report(
            self.rank,
            self._host,
            phase.name,
            phase.step,
            phase.number,
            now - phase.since,
            phase.has_deadline,
            place.line,
            place.in_collective,
            now - max(place.still_since, phase.since),
        )

    def _beat(self) -> list[bytes]:
        message: dict[str, Any] = {"report": asdict(self._report())}
        if self._stop.reason is not None:
            message["stop"] = self._stop.reason
        return [_encode(message)]

    def _send(self, message: bytes) -> None:
        if self._links is not None:
            self._links.send_all(message)

    def _receive(self, sender: _Watched, message: dict[str, Any]) -> None:
        if "report" in message:
            sender.report = Report(**message["report"])
        if "stop" in message:
            self._stop.relay(message["stop"])
        if "end" in message:
            sender.ended, sender.ended_at = (message["end"], message["text"]), time.monotonic()
            if sender.ended[0] == EXIT_STOPPED:
                self._stop.relay("a signal to another rank")
        if "timed_out" in message:
            self._timed_out[sender.report.rank] = message["timed_out"]
        if "verdict" in message and self._verdict is None:
            self._verdict = Verdict(**message["verdict"])

    def _gone(self) -> list[Report]:
        assert self._links is not None
        peers = self._links.peers
        return [o.report for rank, o in self._others.items() if o.ended is None and peers[rank].closed]

    def _silent(self) -> list[Report]:
        assert self._links is not None
        peers, limit = self._links.peers, self._silence_seconds
        return [o.report for rank, o in self._others.items() if o.ended is None and peers[rank].silence > limit]

    def _failed(self) -> list[_Watched]:
        return [o for o in self._others.values() if o.ended is not None and o.ended[0] != EXIT_FINISHED]

    def _sign_of_loss(self) -> bool:
        return bool(self._timed_out or self._failed() or self._gone() or self._silent())

    def _judge(self) -> None:
        # A dead process explains more than the errors of those that lost it.
        if gone := self._gone():
            self._verdict = died(gone)
        elif quiet := self._silent():
            self._verdict = silent(quiet, self._silence_seconds)
        else:
            self._verdict = waited_for(self._reports(), self._timed_out) or self._hung()
        if self._verdict is None and (failures := self._failed()):
            first = min(failures, key=lambda other: other.ended_at)
            assert first.ended is not None
            self._verdict = failed(first.report, *first.ended)

    def _hung(self) -> Verdict | None:
        if self.rank != 0 or self._ending.is_set() or any(o.ended is not None for o in self._others.values()):
            return None
        return hung(self._reports(), self._hang_seconds)

    def _reports(self) -> list[Report]:
        return [self._report(), *(other.report for other in self._others.values())]


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


def died(lost: Sequence[Report]) -> Verdict:
    """Return the verdict on ranks whose connections closed without a message."""
    return _verdict(lost, "died in {where}: the process has gone without a word; see its output and the kernel's log")


def silent(lost: Sequence[Report], seconds: float) -> Verdict:
    """Return the verdict on ranks that have sent nothing for `seconds`."""
    return _verdict(
        lost, f"was last heard of {seconds:.0f} s ago, in {{where}}: its process is stopped, or its machine is down"
    )


def failed(report: Report, exit_code: int, text: str) -> Verdict:
    """Return the verdict on a rank that sent its error; one stopped by a signal stops the others too."""
    if exit_code == EXIT_STOPPED:
        return Verdict(text, EXIT_STOPPED)
    return _verdict([report], f"failed in {{where}}: {text.strip() or f'exit code {exit_code}'}")


def hung(reports: Sequence[Report], limit: float) -> Verdict | None:
    """Return the verdict if no rank has moved for `limit` seconds; else None.

    Blames the ranks outside a collective; if all are in one, those with the least progress.
    """
    if any(report.still < limit for report in reports):
        return None
    seconds = min(report.still for report in reports)
    return _stuck(reports, f"no rank has got any further for {seconds:.0f} s")


def waited_for(reports: Sequence[Report], timed_out: Mapping[int, str]) -> Verdict | None:
    """Return the verdict after a collective's timeout (`timed_out`: texts by rank); None if nobody can be blamed."""
    others = [report for report in reports if report.rank not in timed_out]
    if not timed_out or not others:
        return None
    rank = min(timed_out)
    return _stuck(others, f"rank {rank} has waited for longer than torch's own limit ({timed_out[rank].strip()})")


def _stuck(reports: Sequence[Report], why: str) -> Verdict | None:
    """Blame the ranks outside a collective; None if one of them has its own timeout."""
    blamed = [report for report in reports if not report.in_collective]
    if any(report.has_deadline for report in blamed):
        return None
    if not blamed:
        least = min(report.number for report in reports)
        blamed = [report for report in reports if report.number == least]
    lines = ", ".join(dict.fromkeys(report.line for report in blamed if report.line))
    return _verdict(
        blamed,
        f"hangs in {{where}}{f' at {lines}' if lines else ''}: {why}",
    )


def _verdict(lost: Sequence[Report], text: str) -> Verdict:
    names = ", ".join(report.name for report in lost[:_NAMED])
    if len(lost) > _NAMED:
        names += f" and {len(lost) - _NAMED} more"
    what = text.replace("{where}", lost[0].where)
    advice = "The other ranks end. The same command goes on from the last checkpoint"
    return Verdict(f"{names} {what}. {advice}", of_first=any(report.rank == 0 for report in lost))
