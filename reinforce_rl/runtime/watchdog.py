"""Ranks watch each other, so that one that dies or hangs ends the job within a bounded time, and is named.

A thread of each rank tells rank 0 every second what its main thread does, over a connection of its own. The kernel
closes the connection of a process that ends, however it ends. Rank 0 tells the others what it is doing itself, and the
verdict once a rank is lost. The main thread may sit in a collective meanwhile: the thread then ends the process.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from reinforce_rl.errors import EXIT_FINISHED, EXIT_STOPPED, ReinforceError
from reinforce_rl.runtime.phases import Activity, PlaceWatcher
from reinforce_rl.runtime.rank_reports import Report, Verdict, died, failed, hung, silent, waited_for
from reinforce_rl.runtime.stop import StopRequest

BEAT_SECONDS = 1.0
CONNECT_SECONDS = 30.0
SEND_SECONDS = 2.0
SETTLE_SECONDS = 1.0  # from the first sign of a loss to the verdict: a rank that died drags others along
GRACE_SECONDS = 5.0  # from the verdict to the end of a process whose main thread does not hear of it
END_SECONDS = 120.0  # for a main thread that is ending, and may have something to send or to close
LINE_BYTES = 1 << 16

Message = dict[str, Any]


class Watchdog:
    """This rank's part of the watch.

    Args:
        rank, world_size: of this rank.
        activity: what this rank does.
        stop: is asked and told when some rank is to stop.
        silence_seconds: a rank of which nothing is heard for so long is lost.
        hang_seconds: so long no rank may get any further.
        leave: ends this process; called by the thread of this object.
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
        self._world_size = world_size
        self._activity = activity
        self._stop = stop
        self._silence_seconds = silence_seconds
        self._hang_seconds = hang_seconds
        self._leave = leave
        self._host = socket.gethostname()
        self._place = PlaceWatcher(threading.get_ident())
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._token = ""
        self._peers: dict[int, _Peer] = {}  # by rank; on rank 0 all others, on the others rank 0
        self._strangers: set[_Peer] = set()
        self._verdict: Verdict | None = None
        self._timed_out: dict[int, str] = {}  # on rank 0: what ranks say whose collective ran into torch's time limit
        self._end_message: Message | None = None
        self._judged = threading.Event()
        self._closing = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def open(self, address: str) -> tuple[str, int, str]:
        """Listen, on rank 0.

        Args:
            address: of this machine, for the other ranks.

        Returns:
            what the other ranks `join`.
        """
        self._listener = _listen(address)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self._selector.register(self._listener, selectors.EVENT_READ)
        now = time.monotonic()
        self._peers = {rank: _Peer(None, Report(rank), now) for rank in range(1, self._world_size)}
        return address, self._listener.getsockname()[1], self._token

    def join(self, where: tuple[str, int, str]) -> None:
        """Connect to rank 0, on the others.

        Raises:
            ReinforceError: it cannot be reached.
        """
        address, port, token = where
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            raise ReinforceError(
                f"rank {self.rank} ({self._host}) cannot reach rank 0 at {address}:{port}: {error}; ranks of a job "
                "need open ports between them"
            ) from error
        peer = _Peer(connection, Report(0), time.monotonic())
        peer.send({"token": token, "report": asdict(self._report())})
        self._peers = {0: peer}
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def start(self) -> None:
        """Watch from now on."""
        self._activity.listen(lambda name: self._beat())  # else a rank that dies would be named with an old phase
        self._thread.start()

    def explain(self, *, timed_out: str = "") -> Verdict | None:
        """After an error of this rank: the verdict, where another rank is to blame for it.

        Args:
            timed_out: the error's text, where a collective ran into torch's own time limit. It does not say who was
                waited for, but rank 0 knows where the others are.
        """
        if timed_out and self.rank == 0:
            self._timed_out[0] = timed_out
        elif timed_out:
            self._peers[0].send({"timed_out": timed_out})
        self._judged.wait(SETTLE_SECONDS + 2 * BEAT_SECONDS)
        return self._verdict

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._ending.is_set()

    def end(self, exit_code: int, text: str = "") -> None:
        """The main thread ends by itself from now on, well or not: the others are told. Only the first call counts."""
        if self.is_ending:
            return
        self._end_message = {"end": exit_code, "text": text}
        self._ending.set()
        for peer in list(self._peers.values()):
            peer.send(self._end_message)

    def close(self) -> None:
        """Watch no longer; `end` comes before."""
        self._closing.set()
        self._thread.join(2 * BEAT_SECONDS + SEND_SECONDS)
        for peer in [*self._peers.values(), *self._strangers]:
            peer.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        first_sign: float | None = None
        next_beat = before = time.monotonic()
        while not self._closing.is_set():
            for key, _ in self._selector.select(max(0.0, min(next_beat - time.monotonic(), 0.2))):
                self._accept() if key.data is None else self._receive(key.data)
            now = time.monotonic()
            if now - before > self._silence_seconds / 2:  # this process was stopped itself, and maybe all were
                self._excuse(now)
            before = now
            beats = now >= next_beat
            if beats:
                next_beat = now + BEAT_SECONDS
                self._beat()
            if self._verdict is None:
                if first_sign is None and (self._sign_of_loss(now) or (beats and self._hung() is not None)):
                    first_sign = now
                if first_sign is not None and now - first_sign >= SETTLE_SECONDS:
                    self._judge(now)
            if self._verdict is not None:
                self._see_the_end(self._verdict)
                return

    def _see_the_end(self, verdict: Verdict) -> None:
        """Tell the others, and end this process unless its main thread does so itself."""
        if self.rank == 0:
            for peer in self._peers.values():
                peer.send({"verdict": asdict(verdict)})
        self._judged.set()
        self._ending.wait(GRACE_SECONDS)
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

    def _beat(self) -> None:
        message: Message = {"report": asdict(self._report())}
        if self._stop.reason is not None:
            message["stop"] = self._stop.reason
        for peer in self._peers.values():
            peer.send(message)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            peer = _Peer(connection, None, time.monotonic())
            self._strangers.add(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Peer) -> None:
        for message in peer.receive():
            if peer in self._strangers and not self._introduces(peer, message):
                peer.closed = True
                break
            peer.heard = time.monotonic()
            if "report" in message:
                peer.report = Report(**message["report"])
            if "stop" in message:
                self._stop.relay(message["stop"])
            if "end" in message:
                peer.ended = (int(message["end"]), str(message["text"]))
                if peer.ended[0] == EXIT_STOPPED:
                    self._stop.relay("a signal to another rank")
            if "timed_out" in message and peer.report is not None:
                self._timed_out[peer.report.rank] = str(message["timed_out"])
            if "verdict" in message and self._verdict is None:
                self._verdict = Verdict(**message["verdict"])
        if peer.closed:
            self._selector.unregister(peer.connection)  # type: ignore[arg-type]
            peer.close()
            self._strangers.discard(peer)

    def _introduces(self, peer: _Peer, message: Message) -> bool:
        """Whether a stranger turns out to be a rank."""
        rank = (message.get("report") or {}).get("rank")
        if rank not in self._peers or message.get("token") != self._token:
            return False
        self._strangers.discard(peer)
        self._peers[rank] = peer
        if self._end_message is not None:  # this rank failed before that one had said who it is
            peer.send(self._end_message)
        return True

    def _excuse(self, now: float) -> None:
        for peer in self._peers.values():
            peer.heard = max(peer.heard, now)

    def _sign_of_loss(self, now: float) -> bool:
        return bool(self._timed_out) or any(
            (peer.ended is not None and peer.ended[0] != EXIT_FINISHED)
            or (peer.ended is None and (peer.closed or now - peer.heard > self._silence_seconds))
            for peer in self._peers.values()
        )

    def _judge(self, now: float) -> None:
        """What the loss was. A process that has gone explains more than the errors of those that lost it."""
        peers = [peer for peer in self._peers.values() if peer.report is not None]
        ended = [peer for peer in peers if peer.ended is not None and peer.ended[0] != EXIT_FINISHED]
        gone = [peer.report for peer in peers if peer.ended is None and peer.closed]
        quiet = [peer.report for peer in peers if peer.ended is None and now - peer.heard > self._silence_seconds]
        if gone:
            self._verdict = died(gone)  # type: ignore[arg-type]
        elif quiet:
            self._verdict = silent(quiet, self._silence_seconds)  # type: ignore[arg-type]
        else:
            self._verdict = waited_for(self._reports(), self._timed_out) or self._hung()
        if self._verdict is None and ended:
            first = min(ended, key=lambda peer: peer.heard)
            assert first.report is not None and first.ended is not None
            self._verdict = failed(first.report, *first.ended)

    def _hung(self) -> Verdict | None:
        if self.rank != 0 or self._ending.is_set() or any(peer.ended is not None for peer in self._peers.values()):
            return None
        return hung(self._reports(), self._hang_seconds)

    def _reports(self) -> list[Report]:
        return [self._report(), *(peer.report for peer in self._peers.values() if peer.report is not None)]


class _Peer:
    """The other end of a connection.

    Attributes:
        report: the last one.
        heard: `time.monotonic` of it.
        closed: the connection is.
        ended: exit code and text of a rank that has said how it ends.
    """

    def __init__(self, connection: socket.socket | None, report: Report | None, heard: float):
        self.connection = connection
        self.report = report
        self.heard = heard
        self.closed = False
        self.ended: tuple[int, str] | None = None
        self._pending = b""
        self._sending = threading.Lock()
        if connection is not None:
            connection.settimeout(SEND_SECONDS)

    def send(self, message: Message) -> None:
        """A message that does not get through says nothing: who does not read falls silent or has gone."""
        if self.connection is None or self.closed:
            return
        with self._sending, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message]:
        """What has come; `closed` is set where nothing more will."""
        assert self.connection is not None
        try:
            chunk = self.connection.recv(LINE_BYTES)
        except TimeoutError:
            return []
        except OSError:
            chunk = b""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        self.closed = not chunk or len(self._pending) > LINE_BYTES
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                self.closed = True  # no rank writes so
                break
            messages.append(message if isinstance(message, dict) else {})
        return messages

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def _listen(address: str) -> socket.socket:
    """On this machine's address, or on all where it has another name for itself."""
    for family, _, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError):
            return socket.create_server((place[0], 0), family=family)
    return socket.create_server(("", 0))
