"""Asks a reward server over plain HTTP whether it can score."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading

from reinforce_rl.utils.net import Address
from reinforce_rl.utils.untrusted_files import parse_json

HEALTH_SECONDS = 5.0  # to connect, and then for the whole answer


def health_fault(server: Address) -> str | None:
    """Query /health of a reward server; return why it cannot score, or None."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=HEALTH_SECONDS)
    # HTTPConnection's timeout is for one read
    deadline = threading.Timer(HEALTH_SECONDS, _hang_up, (connection,))
    try:
        connection.connect()
        deadline.start()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException) as error:
        return f"{server} does not answer ({getattr(error, 'strerror', None) or repr(error)})"
    finally:
        deadline.cancel()
        connection.close()
    try:
        text = parse_json(body)["text"]
    except (ValueError, KeyError, TypeError):
        return f"{server} answers HTTP {answer.status}, and not as a reward server does"
    return None if answer.status == 200 else f"{server}: {text}"


def _hang_up(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):  # it is closed already
        connection.sock.shutdown(socket.SHUT_RDWR)
