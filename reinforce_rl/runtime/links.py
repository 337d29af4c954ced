"""Encrypted, authenticated ZeroMQ connections between rank 0 and the other ranks of the job.

Collectives cannot do this: they do not name the rank they wait for, and cannot be abandoned. A
process that ends closes its connection; a process that hangs sends no heartbeats. Heartbeats of
ZMTP are not used, because they would close the connection of a hanging process, too.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from socket import socketpair
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from reinforce_rl.utils.net import LOOPBACK, Address

Buffer = bytes | memoryview
Message = tuple[int, list[memoryview]]  # sender's rank, parts
OnMessage = Callable[[int, list[memoryview]], object]

BEATS_A_TIMEOUT = 5  # heartbeats per timeout
_KEYS = ("server_key", "public_key", "secret_key")
_RANK = re.compile(rb"rank ([1-9][0-9]{0,18})")  # routing id of a peer
MAX_PART_BYTES = 1 << 30  # per part of a message; ZeroMQ disconnects a peer that sends more
LINGER_SECONDS = 2.0  # to send queued messages on close


@dataclass(frozen=True)
class Invitation:
    """Address of rank 0 and the keys of both ends.

    It grants access: share it only among the ranks.
    """

    host: str
    port: int
    server_key: bytes  # rank 0's public key
    public_key: bytes
    secret_key: bytes  # shared by all other ranks

    def to_values(self) -> dict[str, Any]:
        """Return the fields as values for JSON."""
        values = dict(vars(self))
        for name in _KEYS:
            values[name] = values[name].decode()
        return values

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Invitation:
        """Return the invitation of `to_values`.

        Raises TypeError, KeyError or AttributeError for other values.
        """
        keys = {name: values[name].encode() for name in _KEYS}
        return cls(**{**values, **keys})

    def to_json(self) -> str:
        return json.dumps(self.to_values())

    @classmethod
    def from_json(cls, text: str) -> Invitation:
        return cls.from_values(json.loads(text))


@dataclass(eq=False)
class Peer:
    rank: int
    # seconds since its last message, not counting time in which this process was suspended
    silence: float = 0.0
    closed: bool = False


class Links:
    """Connections of a rank.

    Rank 0 has connections to the other ranks (`listen`, then `accept`). Another rank has one to
    rank 0 (`connect`).
    """

    def __init__(self, socket: zmq.Socket[bytes], rank: int):
        self.peers: dict[int, Peer] = {}  # by rank
        self.beat_seconds = 1.0  # heartbeat interval
        self._beat: Callable[[], Sequence[Buffer]] = lambda: (b"",)
        self._rank = rank
        self._socket = socket
        socket.set_hwm(0)  # a message is never dropped
        self._monitor = socket.get_monitor_socket()
        self._ranks: dict[int, int] = {}  # by file descriptor, on rank 0
        self._outbox: deque[tuple[int, Sequence[Buffer]]] = deque()
        self._early: list[Message] = []  # received during `accept`
        self._wakes, self._wake = socketpair()
        self._wake.setblocking(False)
        self._poller = zmq.Poller()
        for source in (socket, self._monitor, self._wakes):
            self._poller.register(source, zmq.POLLIN)
        self._last_poll = time.monotonic()
        self._next_beat = self._last_poll
        self._authenticator: ThreadAuthenticator | None = None

    @classmethod
    def listen(cls, host: str) -> tuple[Links, Invitation]:
        """Listen on rank 0; return its links and the invitation for `connect`.

        The other ranks know this rank as `host`. It listens on all addresses unless `host` is the
        loopback, because a name may resolve to another address on this machine than on others.
        """
        server_key, server_secret = zmq.curve_keypair()
        public_key, secret_key = zmq.curve_keypair()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        only_this_key = SimpleNamespace(callback=lambda domain, key: key == public_key)
        authenticator.configure_curve_callback("*", only_this_key)
        router = context.socket(zmq.ROUTER)
        router.curve_server = True
        router.curve_publickey = server_key
        router.curve_secretkey = server_secret
        router.backlog = 1024
        router.maxmsgsize = MAX_PART_BYTES
        links = cls(router, 0)
        links._authenticator = authenticator
        host = LOOPBACK if host in ("localhost", "::1") else host
        router.ipv6 = host != LOOPBACK
        router.bind(f"tcp://{'*' if router.ipv6 else host}:*")
        port = int(bytes(router.get(zmq.LAST_ENDPOINT)).rpartition(b":")[2])
        return links, Invitation(host, port, server_key, public_key, secret_key)

    @classmethod
    def connect(cls, invitation: Invitation, rank: int, hello: bytes, seconds: float) -> Links:
        """Connect another rank to rank 0; there `accept` returns the `hello`.

        Raises ConnectionError with the address if rank 0 does not answer or refuses this rank.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.routing_id = b"rank %d" % rank
        dealer.reconnect_ivl = -1  # never: a closed connection is a lost rank
        dealer.handshake_ivl = 0  # `_wait_for_handshake` has the deadline
        dealer.curve_serverkey = invitation.server_key
        dealer.curve_publickey = invitation.public_key
        dealer.curve_secretkey = invitation.secret_key
        links = cls(dealer, rank)
        dealer.ipv6 = invitation.host != LOOPBACK
        address = Address(invitation.host, invitation.port)
        try:
            dealer.connect(f"tcp://{address}")
            links._wait_for_handshake(time.monotonic() + seconds)
        except (zmq.ZMQError, ConnectionError) as error:
            links.close()
            where = f"cannot reach rank 0 at {address}: {error}"
            raise ConnectionError(
                f"{where}; the ranks of a job need open TCP ports between their hosts"
            ) from error
        links.peers = {0: Peer(0)}
        links.send(0, hello)
        links._flush()
        return links

    def accept(self, ranks: Collection[int], seconds: float) -> dict[int, bytes]:
        """Return the hellos that arrive from these ranks within `seconds`, by rank."""
        hellos: dict[int, bytes] = {}
        deadline = time.monotonic() + seconds
        while len(hellos) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            for rank, parts in self.poll(left):
                if rank in hellos:
                    self._early.append((rank, parts))
                elif rank in ranks:
                    hellos[rank] = bytes(parts[0])
        for peer in self.peers.values():
            peer.silence = 0.0
        return hellos

    def set_beat(self, seconds: float, beat: Callable[[], Sequence[Buffer]] | None = None) -> None:
        """Send the result of `beat` at this interval from now on.

        By default it is an empty message, which `poll` drops.
        """
        self.beat_seconds = seconds
        self._beat = beat or self._beat
        self._next_beat = time.monotonic()

    def send(self, rank: int, *parts: Buffer) -> None:
        """Queue a message for `poll` to send; from any thread.

        Messages to a lost peer are dropped.
        """
        self._outbox.append((rank, parts))
        self.wake()

    def send_all(self, *parts: Buffer) -> None:
        for rank in list(self.peers):
            self.send(rank, *parts)

    def wake(self) -> None:
        """Make `poll` return; from any thread."""
        with contextlib.suppress(OSError):  # full: `poll` wakes anyway; closed: nothing to wake
            self._wake.send(b"\0")

    def poll(self, seconds: float) -> list[Message]:
        """Send queued messages; return received messages as soon as there are any.

        Always call it on the same thread.
        """
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self.beat_seconds
            parts = self._beat()
            self._outbox.extend((rank, parts) for rank in self.peers)
        self._flush()
        step = 0.0 if self._early else max(0.0, min(seconds, self._next_beat - now))
        ready = dict(self._poller.poll(round(1000 * step) + 1))
        if self._wakes.fileno() in ready:
            self._wakes.recv(1 << 16)
            self._flush()
        # Read the monitor first: a peer's last messages arrive before its disconnect.
        ended = self._read_monitor()
        messages = [*self._early, *self._receive()]
        self._early = []
        for rank in ended & self.peers.keys():
            self.peers[rank].closed = True
        now = time.monotonic()
        before = self._last_poll
        self._last_poll = now
        for peer in self.peers.values():
            # A longer time means that this process was suspended.
            peer.silence += min(now - before, 2 * self.beat_seconds)
        for rank, _ in messages:
            self.peers[rank].silence = 0.0
        return [(rank, parts) for rank, parts in messages if parts[0] != b""]

    def close(self) -> None:
        """Send queued messages, and close all connections. `poll` must have ended; idempotent."""
        if self._socket.context.closed:
            return
        self._flush()
        self._socket.disable_monitor()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.context.destroy(round(1000 * LINGER_SECONDS))
        self._wake.close()
        self._wakes.close()

    def _flush(self) -> None:
        while self._outbox:
            rank, parts = self._outbox.popleft()
            to = [b"rank %d" % rank] if self._rank == 0 else []
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([*to, *parts], zmq.DONTWAIT, copy=False)

    def _receive(self) -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return messages
            rank = 0
            if self._rank == 0:
                name = _RANK.fullmatch(frames.pop(0).bytes)
                if name is None:  # not our program
                    continue
                rank = int(name[1])
                self.peers.setdefault(rank, Peer(rank))
                self._ranks[int(frames[0].get(zmq.SRCFD))] = rank
            messages.append((rank, [frame.buffer for frame in frames]))

    def _read_monitor(self) -> set[int]:
        """Return the ranks whose connections have closed."""
        ended = set()
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                ended.add(self._ranks.pop(int(event["value"]), -1) if self._rank == 0 else 0)
        return ended

    def _wait_for_handshake(self, deadline: float) -> None:
        while self._monitor.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            event = zmq.Event(recv_monitor_message(self._monitor)["event"])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return
            if event == zmq.Event.CLOSED:
                raise ConnectionError("Connection refused")
            if event in (zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.DISCONNECTED):
                raise ConnectionError("it closed the connection, as to a stranger")
        raise ConnectionError("timed out")


class LinkThread:
    """Sends and receives on its own thread, and detects lost and silent peers.

    After `timeout` seconds of silence a peer counts as lost. The thread calls `on_message` with the
    sender's rank and the message's parts, and `on_lost` once per lost peer with its rank and the
    reason. With `is_open` peers may join later, and a lost peer is forgotten; otherwise the thread
    ends with the last peer.
    """

    def __init__(
        self,
        links: Links,
        timeout: float,
        on_message: OnMessage,
        on_lost: Callable[[int, str], object],
        *,
        is_open: bool = False,
    ):
        self.stopping = threading.Event()  # set when a peer's end is no longer a loss
        self._links = links
        self._timeout = timeout
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_open = is_open
        self._end = threading.Event()
        links.set_beat(timeout / BEATS_A_TIMEOUT)
        self._thread = threading.Thread(target=self._run, daemon=True, name="links")
        self._thread.start()

    def wait_closed(self, seconds: float) -> list[int]:
        """Return the ranks whose connections are still open after `seconds`."""
        self._thread.join(seconds)
        return [peer.rank for peer in list(self._links.peers.values()) if not peer.closed]

    def close(self) -> None:
        self.stopping.set()
        self._end.set()
        self._links.wake()
        self._thread.join(2 * self._timeout / BEATS_A_TIMEOUT)
        self._links.close()

    def _run(self) -> None:
        watched = set(self._links.peers.values())
        while (watched or self._is_open) and not self._end.is_set():
            for rank, parts in self._links.poll(self._links.beat_seconds):
                self._on_message(rank, parts)
            for peer in list(self._links.peers.values() if self._is_open else watched):
                stopping = self.stopping.is_set()
                is_silent = peer.silence > self._timeout
                if peer.closed or (is_silent and not stopping):
                    watched.discard(peer)
                    if self._is_open:
                        del self._links.peers[peer.rank]
                    silent = f"hangs: it sent no heartbeat for {peer.silence:.0f} s"
                    if not stopping:
                        self._on_lost(
                            peer.rank, "died: its connection is closed" if peer.closed else silent
                        )
