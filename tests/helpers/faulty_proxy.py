"""A TCP proxy before a reward server that does to connections what bad networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable

INFER = b"/models/reward_model/infer"

DROP = "drop"  # the request is not passed on, and the connection is reset
SILENCE = "silence"  # the request is not passed on, and nobody ever answers
DELAY = "delay"  # the answer comes late
TRICKLE = "trickle"  # the answer comes byte by byte
TRUNCATE_REQUEST = "truncate_request"  # the first half of the request arrives, then the connection ends
TRUNCATE = "truncate"  # the first half of the answer arrives, then the connection ends
DUPLICATE = "duplicate"  # the request arrives twice, and the answer too
DUPLICATE_BYTES = "duplicate_bytes"  # the first half of the answer arrives twice before the second one
GARBAGE = "garbage"  # the answer is not HTTP
ALL = (DROP, SILENCE, DELAY, TRICKLE, TRUNCATE_REQUEST, TRUNCATE, DUPLICATE, DUPLICATE_BYTES, GARBAGE)

SECONDS = 60.0  # longer than any test


class FaultyProxy:
    """Passes connections on to a port of the loopback, each for one request.

    Args:
        port: of the server.
        faults: what happens to requests for scores, one after the other; then nothing happens.
        late_seconds: of DELAY, and of TRICKLE altogether.
    """

    def __init__(self, port: int, faults: Iterable[str] = (), late_seconds: float = 0.5):
        self.upstream = port
        self.late_seconds = late_seconds
        self.happened: list[str] = []
        self._faults = iter(faults)
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
        """Nothing listens any more, and every connection is reset."""
        with self._lock:
            listener, self._listener = self._listener, None
            sockets, self._open = self._open, set()
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        for one in sockets:
            _reset(one)

    def restore(self) -> None:
        """Listen again, on the same port."""
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
        if INFER not in request.split(b"\r\n", 1)[0]:
            return None
        with self._lock:
            fault = next(self._faults, None)
            if fault is not None:
                self.happened.append(fault)
            return fault

    def _pass_on(self, client: socket.socket, request: bytes, fault: str | None) -> None:
        if fault == DROP:
            _reset(client)
            return
        if fault == SILENCE:
            client.settimeout(SECONDS)
            client.recv(1)
            return
        if fault == TRUNCATE_REQUEST:
            self._ask(request[: len(request) // 2], half=True)
            return
        if fault == DUPLICATE:
            self._ask(request)
        answer = b"\x16\x03\x01 no HTTP at all" if fault == GARBAGE else self._ask(request)
        middle = len(answer) // 2
        if fault == DELAY:
            time.sleep(self.late_seconds)
        elif fault == TRUNCATE:
            answer = answer[:middle]
        elif fault == DUPLICATE:
            answer += answer
        elif fault == DUPLICATE_BYTES:
            answer = answer[:middle] + answer
        if fault == TRICKLE:
            for byte in answer:
                client.sendall(bytes([byte]))
                time.sleep(self.late_seconds / len(answer))
        else:
            client.sendall(answer)

    def _ask(self, request: bytes, *, half: bool = False) -> bytes:
        """The server's answer; it closes the connection after it."""
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=SECONDS) as server:
            self._remember(server)
            server.sendall(request)
            if half:
                return b""
            parts = []
            while part := server.recv(1 << 16):
                parts.append(part)
            return b"".join(parts)

    def _remember(self, one: socket.socket) -> None:
        with self._lock:
            if self._listener is None:
                raise ConnectionResetError("the proxy was cut")
            self._open.add(one)


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


def _reset(one: socket.socket) -> None:
    """End it with RST in place of FIN."""
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
    one.close()
