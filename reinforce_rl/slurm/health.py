"""Whether a reward server is healthy: GET /health, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json

TRY_SECONDS = 5.0


def ask(address: str, port: int) -> str | None:
    """None where the server can score; else what is in the way, for people."""
    connection = http.client.HTTPConnection(address, port, timeout=TRY_SECONDS)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        body = answer.read(1 << 16)
    except (OSError, http.client.HTTPException) as error:
        return f"{address}:{port} does not answer ({getattr(error, 'strerror', None) or repr(error)})"
    finally:
        connection.close()
    try:
        text = json.loads(body)["text"]
    except (ValueError, KeyError, TypeError):
        return f"{address}:{port} answers HTTP {answer.status}, and not as a reward server does"
    return None if answer.status == 200 else f"{address}:{port}: {text}"
