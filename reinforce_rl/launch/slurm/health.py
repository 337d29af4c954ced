"""Whether a reward server is healthy: GET /health, with nothing but the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading

TRY_SECONDS = 5.0  # to connect, and then for all of the answer


def ask(address: str, port: int) -> str | None:
    """None where the server can score; else what is in the way, for people."""
    connection = http.client.HTTPConnection(address, port, timeout=TRY_SECONDS)
    deadline = threading.Timer(TRY_SECONDS, _hang_up, (connection,))  # the timeout is one read's, and bytes may drip
    deadline.daemon = True
    try:
        connection.connect()
        deadline.start()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException) as error:
        return f"{address}:{port} does not answer ({getattr(error, 'strerror', None) or repr(error)})"
    finally:
        deadline.cancel()
        connection.close()
    try:
        text = json.loads(body)["text"]
    except (ValueError, KeyError, TypeError):
        return f"{address}:{port} answers HTTP {answer.status}, and not as a reward server does"
    return None if answer.status == 200 else f"{address}:{port}: {text}"


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):  # it is closed already
        connection.sock.shutdown(socket.SHUT_RDWR)
