"""Connections between the ranks of a reward server: messages, and who is still there.

They are plain TCP and no collectives: a collective that waits for weeks runs into its time limit, does not say which
rank it waits for, and cannot be given up. The end of a process closes its connection at once. A process or a host that
only stands still is found by its silence, since each end sends a sign of life every now and then from a thread of its
own, also while the model computes.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from reinforce_rl.errors import RewardServerError

logger = logging.getLogger(__name__)

BEATS_A_TIMEOUT = 5  # signs of life within the time after which silence counts
CHUNK = 1 << 20
MAX_BODY = 1 << 32  # bytes; a longer claim is no message of ours
HELLO_SECONDS = 10.0  # for whoever connects to say who it is

HELLO, BEAT, READY, SCORE, SCORES, FAILED, STOP = range(7)

_HEADER = struct.Struct("!BQ")
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class Member:
    """A rank, as the others know it.

    Attributes:
        rank: in the whole job.
        block: which copy of the model it holds a part of.
        speaks: whether it is the one of its block that reports the scores.
        host: where it runs.
        pid: its process there.
    """

    rank: int
    block: int
    speaks: bool
    host: str
    pid: int

    @classmethod
    def here(cls, rank: int, block: int, speaks: bool) -> Member:
        """This process."""
        return cls(rank, block, speaks, socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"

    def to_bytes(self) -> bytes:
        """As sent in a greeting."""
        return struct.pack("!qq?q", self.rank, self.block, self.speaks, self.pid) + self.host.encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Member:
        """Inverse of `to_bytes`."""
        rank, block, speaks, pid = struct.unpack_from("!qq?q", body)
        return cls(rank, block, speaks, body[struct.calcsize("!qq?q") :].decode(), pid)


class Link:
    """One connection. Reading, writing and watching go on in threads of its own.

    Args:
        connection: connected, both sides have said who they are.
        peer: who is at the other end.
        timeout: seconds of silence after which the peer counts as lost.
        on_message: called with the kind and the body of each message, on the link's thread.
        on_lost: called once with the reason when the peer is gone or silent, on some thread; not after `close`.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: Member,
        timeout: float,
        on_message: Callable[[int, bytes], None],
        on_lost: Callable[[str], object],
    ):
        self.peer = peer
        self._connection = connection
        self._timeout = timeout
        self._on_message = on_message
        self._on_lost = on_lost
        self._closed = threading.Event()
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=work, daemon=True, name=f"rank-{peer.rank}-{what}")
            for what, work in (("beat", self._beat), ("read", self._read))
        ]

    def start(self) -> None:
        """Begin to read and to watch."""
        for thread in self._threads:
            thread.start()

    def send(self, kind: int, body: bytes = b"") -> None:
        """Send a message. A peer that has gone is told by `on_lost`, not here."""
        with self._sending:
            try:
                self._connection.sendall(_HEADER.pack(kind, len(body)))
                self._connection.sendall(body)
            except OSError as error:
                self._lose(f"died: its connection broke ({error.strerror or error})")

    def wait_closed(self, seconds: float) -> bool:
        """Whether the peer closed the connection within this time; to be called after `expect_end`."""
        self._threads[1].join(seconds)
        return not self._threads[1].is_alive()

    def expect_end(self) -> None:
        """From now on the peer's going is no loss."""
        with self._ending:
            self._closed.set()

    def close(self) -> None:
        """End the connection."""
        self.expect_end()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(self._timeout)
        self._connection.close()

    def _lose(self, reason: str) -> None:
        with self._ending:
            if self._closed.is_set():
                return
            self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        self._on_lost(reason)

    def _beat(self) -> None:
        while not self._closed.wait(self._timeout / BEATS_A_TIMEOUT):
            # While a message is on its way, that one is the sign of life.
            if self._sending.acquire(blocking=False):
                try:
                    self._connection.sendall(_HEADER.pack(BEAT, 0))
                except OSError as error:
                    self._lose(f"died: its connection broke ({error.strerror or error})")
                finally:
                    self._sending.release()

    def _read(self) -> None:
        try:
            while True:
                kind, size = _HEADER.unpack(self._receive(_HEADER.size))
                if size > MAX_BODY:
                    raise OSError(f"a message of {size} bytes")
                body = self._receive(size)
                if kind != BEAT:
                    self._on_message(kind, body)
        except OSError as error:
            self._lose(str(error))

    def _receive(self, count: int) -> bytes:
        """Exactly so many bytes.

        Raises:
            OSError: the peer is gone or silent; its text is a reason that may follow the peer's name.
        """
        chunks = bytearray()
        step = self._timeout / BEATS_A_TIMEOUT
        silent = 0.0
        while len(chunks) < count:
            began = time.monotonic()
            if not select.select([self._connection], [], [], step)[0]:
                # Only waiting counts: had this very process been stopped meanwhile, the peer would not be to blame.
                silent += min(time.monotonic() - began, 2 * step)
                if silent > self._timeout and not self._closed.is_set():
                    raise OSError(f"hangs: it gave no sign of life for {silent:.0f} s")
                continue
            silent = 0.0
            try:
                chunk = self._connection.recv(min(CHUNK, count - len(chunks)))
            except OSError as error:
                raise OSError(f"died: its connection broke ({error.strerror or error})") from error
            if not chunk:
                raise OSError("died: its connection is closed")
            chunks += chunk
        return bytes(chunks)


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens.

    Attributes:
        host, port: of the TCP socket.
        token: what a rank must know to be let in.
    """

    host: str
    port: int
    token: bytes


class Listener:
    """Rank 0's door for the other ranks.

    Args:
        host: an address of this machine that all ranks can reach.
    """

    def __init__(self, host: str = "127.0.0.1"):
        # With several nodes the name may mean another address here than over there, so every one is listened on.
        local = host in ("127.0.0.1", "localhost", "::1")
        self._socket = socket.create_server(("127.0.0.1" if local else "", 0), backlog=1024)
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))

    def accept(self, count: int, seconds: float) -> list[tuple[socket.socket, Member]]:
        """The connections of so many ranks, in the order of their ranks.

        Raises:
            RewardServerError: not all came in time.
        """
        found: dict[int, tuple[socket.socket, Member]] = {}
        deadline = time.monotonic() + seconds
        while len(found) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                for connection, _ in found.values():
                    connection.close()
                raise RewardServerError(
                    f"only {len(found)} of {count} ranks connected to rank 0 within {seconds:.0f} s: {sorted(found)}"
                )
            connection, _ = self._socket.accept()
            connection.settimeout(HELLO_SECONDS)
            try:
                member = self._greet(connection)
            except (OSError, ValueError, struct.error):
                connection.close()  # a foreign program
                continue
            found[member.rank] = (connection, member)
        return [found[rank] for rank in sorted(found)]

    def _greet(self, connection: socket.socket) -> Member:
        kind, size = _HEADER.unpack(_exactly(connection, _HEADER.size))
        if kind != HELLO or not _TOKEN_BYTES < size < 4096:
            raise ValueError("no greeting of a rank")
        body = _exactly(connection, size)
        if not hmac.compare_digest(body[:_TOKEN_BYTES], self.address.token):
            raise ValueError("a wrong token")
        return Member.from_bytes(body[_TOKEN_BYTES:])

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def connect(address: Address, member: Member, seconds: float) -> socket.socket:
    """This rank's connection to rank 0.

    Raises:
        RewardServerError: it cannot be reached.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout=seconds)
        body = address.token + member.to_bytes()
        connection.sendall(_HEADER.pack(HELLO, len(body)) + body)
    except OSError as error:
        raise RewardServerError(
            f"{member} cannot reach rank 0 at {address.host}:{address.port} ({error}); ranks of a reward server need "
            "TCP connections to the host of rank 0"
        ) from error
    return connection


def _exactly(connection: socket.socket, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = connection.recv(count - len(chunks))
        if not chunk:
            raise OSError("closed")
        chunks += chunk
    return bytes(chunks)
