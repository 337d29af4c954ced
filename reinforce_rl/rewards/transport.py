"""The client's HTTP: an event loop in a thread of its own, and one exchange with a deadline for all of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from reinforce_rl.rewards.protocol import MAX_RETRY_SECONDS, REQUEST_DIGEST
from reinforce_rl.rewards.retrying import FailedAttempt
from reinforce_rl.utils.addresses import Address

CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 1 << 26  # far above any answer of a reward server; another program may send without end

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the thread that all clients of this process share."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # A daemon: a trainer that ends with an error must not wait here for a server that hangs.
            threading.Thread(target=_loop.run_forever, daemon=True, name="reward-http").start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where a signal ends the wait."""
    future = submit(work)
    try:
        return future.result()
    finally:
        future.cancel()


class NoHttp(FailedAttempt):
    """What came is no HTTP."""


@dataclass(frozen=True)
class HttpAnswer:
    """Attributes:
    code: the HTTP status.
    headers: by name, in any case.
    body: uncompressed, whole where the answer said how long it is.
    """

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def delimited(self) -> bool:
        """Whether it said how long it is; else one that was cut looks like a whole one."""
        return "Content-Length" in self.headers or "Transfer-Encoding" in self.headers

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the server wants to be asked again; None where it names no time, or an absurd one."""
        with contextlib.suppress(ValueError):
            seconds = float(self.headers.get("Retry-After", "nan"))
            if 0 <= seconds <= MAX_RETRY_SECONDS:
                return seconds
        return None

    def check_digest(self, body: bytes) -> None:
        """Raises FailedAttempt where this is not the answer to a request with this body."""
        found, asked = self.headers.get(REQUEST_DIGEST), hashlib.sha256(body).hexdigest()
        if found is None:
            raise FailedAttempt(
                f"gave a wrong answer: it bears no digest of the request ({REQUEST_DIGEST})", bad_answer=True
            )
        if found != asked:
            text = f"gave a wrong answer: it is to another request (digest {found[:12]}, asked {asked[:12]})"
            raise FailedAttempt(text, bad_answer=True)


async def exchange(
    place: Address, path: str, seconds: float, *, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> HttpAnswer:
    """A GET, or a POST where there is a body, over a connection of its own, through no proxy and no redirect.

    Args:
        seconds: for all of it, from the connection to the answer's last byte.

    Raises:
        FailedAttempt: no whole answer came.
    """
    import aiohttp
    from yarl import URL

    try:
        async with aiohttp.request(
            "GET" if body is None else "POST",
            URL.build(scheme="http", host=place.host, port=place.port, path=path),
            data=None if body is None else io.BytesIO(body),  # in pieces, between which the loop goes on
            headers={"Accept-Encoding": "identity", **(headers or {})},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
        ) as answer:
            found = bytearray()
            async for part in answer.content.iter_any():
                found += part
                if len(found) > MAX_ANSWER_BYTES:
                    raise FailedAttempt(f"does not answer (it sends more than {MAX_ANSWER_BYTES} bytes)")
            return HttpAnswer(answer.status, answer.headers, bytes(found))
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise FailedAttempt("does not answer (timed out)", timed_out=True) from error
    except aiohttp.ClientResponseError as error:
        raise NoHttp(f"does not answer (what it sends is no HTTP: {' '.join(error.message.split())[:200]})") from error
    except aiohttp.ServerDisconnectedError as error:
        raise FailedAttempt("does not answer (it closed the connection)") from error
    except aiohttp.ClientPayloadError as error:
        raise FailedAttempt("does not answer (the answer was cut short)") from error
    except aiohttp.ClientConnectorDNSError as error:
        raise FailedAttempt("does not answer (the host name is unknown)") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number).lower() if number else str(error) or type(error).__name__
        raise FailedAttempt(f"does not answer ({reason})") from error
