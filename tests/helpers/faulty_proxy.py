"""A TCP proxy in front of a reward server that injects network faults."""

from __future__ import annotations

import contextlib
import functools
import gzip
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

INFER = b"/models/reward_model/infer"
END = b"\r\n\r\n"  # of a head
CONTINUE = b"HTTP/1.1 100 Continue" + END
LENGTH = b"Content-Length"
JSON_LENGTH = b"Inference-Header-Content-Length"
Change = Callable[[bytes, bytes], bytes]


def _without(name: bytes, head: bytes) -> bytes:
    return re.sub(rb"(?i)\r\n%b[^\r]*" % name, b"", head)


def _with(name: bytes, value: bytes) -> Change:
    return lambda head, body: b"%b\r\n%b: %b" % (_without(name, head), name, value) + END + body


def _compressed(head: bytes, body: bytes) -> bytes:
    return _with(LENGTH, b"%d" % len(body))(head + b"\r\nContent-Encoding: gzip", body)


def _other(head: bytes, body: bytes = b"") -> Change:
    """Replace the answer."""
    return lambda *_: b"HTTP/1.1 %b\r\nContent-Length: %d" % (head, len(body)) + END + body


@functools.cache
def _bomb() -> bytes:
    return gzip.compress(bytes(1 << 27), compresslevel=1)


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


# The faults of requests and connections. A dropped request does not reach the server.
CONNECTION_FAULTS = (
    "drop",  # the request is dropped, and the connection is reset
    "silence",  # the request is dropped, and no answer comes
    "delay",  # the answer comes late
    "trickle",  # the answer comes one byte at a time
    "truncate_request",  # the first half of the request arrives, then the connection ends
    "change_request",  # one bit of the request is flipped
    "duplicate",  # the request arrives twice, and the answer too
    "continues",  # "100 Continue" comes again and again before the answer
)
# The faults of answers, by head and body. After an answer the connection ends.
ANSWER_FAULTS: dict[str, Change] = {
    "truncate": lambda head, body: _half(head + END + body),
    "duplicate_bytes": lambda head, body: _half(head + END + body) + head + END + body,
    "garbage": lambda *_: b"\x16\x03\x01 no HTTP at all",
    "cut_body": lambda head, body: head + END + _half(body),
    "undelimited": lambda head, body: _without(LENGTH, head) + END + _half(body),
    "wrong_id": lambda head, body: head + END + re.sub(rb'("id": ?")\w', rb"\1?", body),
    "wrong_digest": lambda head, body: (
        re.sub(rb"(?i)(x-request-digest: )\w", rb"\1?", head) + END + body
    ),
    "no_digest": lambda head, body: _without(b"x-", head) + END + body,
    "long_header": _with(b"X-Long", b"x" * (1 << 20)),
    "negative_length": _with(LENGTH, b"-5"),
    "huge_length": _with(LENGTH, b"%d" % 10**15),
    "no_json_length": _with(JSON_LENGTH, b"12x"),
    "negative_json": _with(JSON_LENGTH, b"-5"),
    "gzip": lambda head, body: _compressed(head, gzip.compress(body)),
    "gzip_bomb": lambda head, _: _compressed(head, _bomb()),  # 128 MiB of zeros
    "continue": lambda head, body: CONTINUE + head + END + body,
    "redirect": _other(b"307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/"),
    "others_refusal": _other(b"400 Bad Request", b'{"error": "a shape of another request"}'),
    "deep_error": _other(b"500 Internal Server Error", b"[" * 100_000),
    "far_away": _other(b"503 Service Unavailable\r\nRetry-After: 1e9"),
}
HARMLESS = ("delay", "duplicate", "gzip", "continue")  # the client still gets a correct answer
ALL = (*CONNECTION_FAULTS, *ANSWER_FAULTS)
REPLAY = "replay"  # drop the request and repeat the answer to the previous one

SECONDS = 60.0  # longer than any test


class FaultyProxy:
    """Forward connections to a loopback port, one request each.

    Args:
        port: of the server.
        faults: of successive scoring requests (None: no fault); later requests have no fault.
        late_seconds: delay of "delay", and duration of "trickle" and "continues".
        path: substring of the paths to disturb.
    """

    def __init__(
        self,
        port: int,
        faults: Iterable[str | None] = (),
        late_seconds: float = 0.5,
        path: bytes = INFER,
    ):
        self.upstream = port
        self.path = path
        self.late_seconds = late_seconds
        self.happened: list[str] = []
        self.faults = iter(faults)
        self._last_answer = b""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.port = 0
        self.restore()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """Stop listening and reset all connections."""
        with self._lock:
            listener = self._listener
            self._listener = None
            sockets = self._open
            self._open = set()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            listener.close()
        for connection in sockets:
            _reset(connection)

    def restore(self) -> None:
        """Listen again on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            try:
                self._remember(client)
                request = _read_request(client)
                if request:
                    self._pass_on(client, request, self._fault_of(request))
            finally:
                client.close()

    def _fault_of(self, request: bytes) -> str | None:
        if self.path not in request.split(b"\r\n", 1)[0]:
            return None
        with self._lock:
            fault = next(self.faults, None)
            if fault is not None:
                self.happened.append(fault)
            return fault

    def _pass_on(self, client: socket.socket, request: bytes, fault: str | None) -> None:
        if fault == "drop":
            _reset(client)
            return
        if fault == "silence":
            client.settimeout(SECONDS)
            client.recv(1)
            return
        if fault == "truncate_request":
            self._ask(_half(request), waits=False)
            return
        if fault == "change_request":
            request = request[:-1] + bytes([request[-1] ^ 1])
        if fault == REPLAY:
            answer = self._last_answer
            assert answer
        else:
            answer = self._ask(request)
            if self.path in request.split(b"\r\n", 1)[0]:
                self._last_answer = answer
        if fault in ANSWER_FAULTS:
            head, _, body = answer.partition(END)
            answer = ANSWER_FAULTS[fault](head, body)
        if fault == "delay":
            time.sleep(self.late_seconds)
        elif fault == "duplicate":
            answer += self._ask(request)
        pieces = [answer]
        if fault == "trickle":
            pieces = [bytes([byte]) for byte in answer]
        elif fault == "continues":
            pieces = [CONTINUE] * 100 + [answer]
        for piece in pieces:
            client.sendall(piece)
            if len(pieces) > 1:
                time.sleep(self.late_seconds / len(pieces))

    def _ask(self, request: bytes, *, waits: bool = True) -> bytes:
        """Forward the request and return the server's answer; the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=SECONDS) as server:
            self._remember(server)
            server.sendall(request)
            if not waits:
                return b""
            parts = []
            while part := server.recv(1 << 16):
                parts.append(part)
            return b"".join(parts)

    def _remember(self, connection: socket.socket) -> None:
        with self._lock:
            if self._listener is None:
                raise ConnectionResetError("the proxy was cut")
            self._open.add(connection)


def _read_request(client: socket.socket) -> bytes:
    client.settimeout(SECONDS)
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(1 << 16)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    left = int(headers.get(b"content-length", 0)) - len(body)
    while left > 0:
        part = client.recv(1 << 16)
        if not part:
            return b""
        data += part
        left -= len(part)
    return data


def _reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
    connection.close()
