"""One HTTP request with a deadline on every wait, by the standard library: what client and health checks share."""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass

CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 1 << 26  # far above any answer of a reward server; another program may send without end


@dataclass(frozen=True)
class HttpAnswer:
    """Attributes:
    code: the HTTP status.
    headers: by lower-case name.
    body: at most MAX_ANSWER_BYTES of it.
    """

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the server wants to be asked again; None where it does not say."""
        with contextlib.suppress(ValueError):
            seconds = float(self.headers.get("retry-after", ""))
            if math.isfinite(seconds) and seconds >= 0:
                return seconds
        return None


def call(
    host: str,
    port: int,
    path: str,
    timeout: float,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """A GET, or a POST where there is a body, over a connection of its own, to a neighbour: through no proxy.

    Args:
        timeout: seconds of silence that are borne, at each step.

    Raises:
        OSError: the network's, timeouts included.
        http.client.HTTPException: what came is no HTTP, or too short.
    """
    connection = http.client.HTTPConnection(host, port, timeout=min(CONNECT_SECONDS, timeout))
    try:
        connection.connect()
        connection.sock.settimeout(timeout)
        # A server that refuses a request answers before it has read all of it, and then closes.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            method = "GET" if body is None else "POST"
            connection.request(method, path, body, {"Connection": "close", **(headers or {})})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return HttpAnswer(answer.status, found, answer.read(MAX_ANSWER_BYTES))
    except http.client.CannotSendRequest as error:
        raise ConnectionResetError("the connection was closed while the request was sent") from error
    except http.client.ResponseNotReady as error:
        raise ConnectionResetError("the connection was closed while the request was sent") from error
    finally:
        connection.close()


def reason_of(error: BaseException) -> str:
    """The cause of a network error in a few words."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "the host name is unknown"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer was cut short"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
