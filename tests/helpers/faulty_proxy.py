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
from collections.abc import Iterable

INFER = b"/models/reward_model/infer"

# Each fault of a request or its answer. A dropped request does not reach the server.
DROP = "drop"  # the request is dropped, and the connection is reset
SILENCE = "silence"  # the request is dropped, and no answer comes
DELAY = "delay"  # the answer comes late
TRICKLE = "trickle"  # the answer comes one byte at a time
# the first half of the request arrives, then the connection ends
TRUNCATE_REQUEST = "truncate_request"
TRUNCATE = "truncate"  # the first half of the answer arrives, then the connection ends
DUPLICATE = "duplicate"  # the request arrives twice, and the answer too
# the first half of the answer arrives twice before the second one
DUPLICATE_BYTES = "duplicate_bytes"
GARBAGE = "garbage"  # the answer is not HTTP
CUT_BODY = "cut_body"  # the answer's headers and half of its body arrive, then the connection ends
UNDELIMITED = "undelimited"  # the same, and the answer has no length
CHANGE_REQUEST = "change_request"  # one bit of the request is flipped
WRONG_ID = "wrong_id"  # one letter of the request's id differs in the answer
WRONG_DIGEST = "wrong_digest"  # one digit of the request's digest differs in the answer
NO_DIGEST = "no_digest"  # the answer's headers of this project are dropped
LONG_HEADER = "long_header"  # a header of a megabyte
NEGATIVE_LENGTH = "negative_length"  # Content-Length: -5
HUGE_LENGTH = "huge_length"  # Content-Length: a petabyte; half of the body follows
NO_JSON_LENGTH = "no_json_length"  # Inference-Header-Content-Length: 12x
NEGATIVE_JSON = "negative_json"  # Inference-Header-Content-Length: -5
GZIP = "gzip"  # the body is compressed
GZIP_BOMB = "gzip_bomb"  # the body is 128 MiB of zeros, compressed
CONTINUE = "continue"  # "100 Continue" comes before the answer
CONTINUES = "continues"  # "100 Continue" comes again and again
REDIRECT = "redirect"  # to another port of this host
OTHERS_REFUSAL = "others_refusal"  # a 400 that answers another request
DEEP_ERROR = "deep_error"  # a 500 with JSON nested a hundred thousand levels deep
FAR_AWAY = "far_away"  # a 503 with Retry-After: 1e9
# The client still gets a correct answer.
HARMLESS = (DELAY, DUPLICATE, GZIP, CONTINUE)
ALL = (
    DROP,
    SILENCE,
    TRICKLE,
    TRUNCATE_REQUEST,
    TRUNCATE,
    DUPLICATE_BYTES,
    GARBAGE,
    CUT_BODY,
    UNDELIMITED,
    CHANGE_REQUEST,
    WRONG_ID,
    WRONG_DIGEST,
    NO_DIGEST,
    LONG_HEADER,
    NEGATIVE_LENGTH,
    HUGE_LENGTH,
    NO_JSON_LENGTH,
    NEGATIVE_JSON,
    GZIP_BOMB,
    CONTINUES,
    REDIRECT,
    OTHERS_REFUSAL,
    DEEP_ERROR,
    FAR_AWAY,
    *HARMLESS,
)
# drop the request and repeat the answer to the previous request, if there is one
REPLAY = "replay"

SECONDS = 60.0  # longer than any test


class FaultyProxy:
    """Forward connections to a loopback port, one request each.

    Args:
        port: of the server.
        faults: of successive scoring requests (None: no fault); later requests have no fault.
        late_seconds: delay of DELAY, and duration of TRICKLE and CONTINUES.
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
        if fault == CHANGE_REQUEST:
            request = request[:-1] + bytes([request[-1] ^ 1])
        if fault == REPLAY:
            answer = self._last_answer
            assert answer
        elif fault == GARBAGE:
            answer = b"\x16\x03\x01 no HTTP at all"
        else:
            answer = self._ask(request)
            if self.path in request.split(b"\r\n", 1)[0]:
                self._last_answer = answer
        answer = _changed(answer, fault)
        middle = len(answer) // 2
        if fault == DELAY:
            time.sleep(self.late_seconds)
        elif fault == TRUNCATE:
            answer = answer[:middle]
        elif fault == DUPLICATE:
            answer += answer
        elif fault == DUPLICATE_BYTES:
            answer = answer[:middle] + answer
        if fault in (TRICKLE, CONTINUES):
            pieces = (
                [bytes([byte]) for byte in answer]
                if fault == TRICKLE
                else [_CONTINUE] * 100 + [answer]
            )
            for piece in pieces:
                client.sendall(piece)
                time.sleep(self.late_seconds / len(pieces))
        else:
            client.sendall(answer)

    def _ask(self, request: bytes, *, half: bool = False) -> bytes:
        """Forward the request and return the server's answer; the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=SECONDS) as server:
            self._remember(server)
            server.sendall(request)
            if half:
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


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _changed(answer: bytes, fault: str | None) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    if fault == CUT_BODY:
        return answer[: -len(body) // 2]
    if fault in (UNDELIMITED, HUGE_LENGTH, NEGATIVE_LENGTH):
        lengths = {
            HUGE_LENGTH: b"\r\nContent-Length: %d" % 10**15,
            NEGATIVE_LENGTH: b"\r\nContent-Length: -5",
        }
        head = re.sub(rb"(?i)\r\ncontent-length:[^\r]*", lengths.get(fault, b""), head)
        if fault == UNDELIMITED:
            body = body[: len(body) // 2]
        return head + b"\r\n\r\n" + body
    if fault in (NO_JSON_LENGTH, NEGATIVE_JSON):
        head = re.sub(rb"(?i)\r\ninference-header-content-length:[^\r]*", b"", head)
        length = b"12x" if fault == NO_JSON_LENGTH else b"-5"
        return head + b"\r\nInference-Header-Content-Length: %b\r\n\r\n" % length + body
    if fault == WRONG_ID:
        return head + b"\r\n\r\n" + re.sub(rb'("id": ?")\w', rb"\1?", body)
    if fault == WRONG_DIGEST:
        return re.sub(rb"(?i)(x-request-digest: )\w", rb"\1?", head) + b"\r\n\r\n" + body
    if fault == NO_DIGEST:
        return re.sub(rb"(?i)\r\nx-[^\r]*", b"", head) + b"\r\n\r\n" + body
    if fault == LONG_HEADER:
        return head + b"\r\nX-Long: " + b"x" * (1 << 20) + b"\r\n\r\n" + body
    if fault in (GZIP, GZIP_BOMB):
        body = _bomb() if fault == GZIP_BOMB else gzip.compress(body)
        head = re.sub(
            rb"(?i)\r\ncontent-length:[^\r]*", b"\r\nContent-Length: %d" % len(body), head
        )
        return head + b"\r\nContent-Encoding: gzip\r\n\r\n" + body
    if fault == CONTINUE:
        return _CONTINUE + answer
    if fault == REDIRECT:
        status = b"HTTP/1.1 307 Temporary Redirect\r\n"
        return status + b"Location: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    if fault == OTHERS_REFUSAL:
        refusal = b'{"error": "a shape of another request"}'
        return b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(refusal) + refusal
    if fault == DEEP_ERROR:
        return (
            b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000
        )
    if fault == FAR_AWAY:
        return b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1e9\r\nContent-Length: 0\r\n\r\n"
    return answer


@functools.cache
def _bomb() -> bytes:
    return gzip.compress(bytes(1 << 27), compresslevel=1)


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
