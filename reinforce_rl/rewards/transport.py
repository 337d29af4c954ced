"""HTTP requests to one reward server, each with a deadline for the whole answer.

They run on one event loop, in a thread shared by all clients of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import aiohttp
import numpy as np
from yarl import URL

from reinforce_rl.errors import Fault, RewardServerError
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.wire import Scores, ServerInfo
from reinforce_rl.utils.control_characters import quoted, show_control_characters
from reinforce_rl.utils.net import Address, names_this_machine
from reinforce_rl.utils.untrusted_files import parse_json

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0  # for one request about a server's health
# Far above any answer about a server; another program may send without end.
MAX_ANSWER_BYTES = 1 << 20
MAX_NUMBER_BYTES = 32  # of an answer's number in JSON, which takes more than in binary
MAX_QUOTED = 600  # characters of what a server said, from the end
GATEWAY_CODES = (502, 503, 504)  # of a proxy whose back end is not up yet
RETRIED_CODES = (408, 425, 429)  # besides every 5xx
REASONS = (
    (aiohttp.ServerDisconnectedError, "it closed the connection"),
    (aiohttp.ClientPayloadError, "the answer was cut short"),
    (aiohttp.ClientConnectorDNSError, "the host name is unknown"),
)

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the shared event loop."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            # A daemon: a trainer that ends with an error must not wait here for a server that
            # hangs.
            threading.Thread(target=_loop.run_forever, daemon=True, name="reward-http").start()
        return asyncio.run_coroutine_threadsafe(work, _loop)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared event loop and return its result; a signal during the wait
    cancels it.
    """
    future = submit(work)
    try:
        return future.result()
    finally:
        future.cancel()


@dataclass(frozen=True)
class ModelAddress:
    place: Address  # of the server
    name: str  # of the model
    token: str | None  # None if the server needs none


@dataclass(frozen=True)
class Call:
    """A request in flight: its id in both sides' logs, and its deadline."""

    id: str
    seconds: float  # deadline, counted from `start`
    start: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def remaining(self) -> float:
        return self.seconds - self.elapsed


@dataclass(eq=False)
class FailedAttempt(Exception):
    """An attempt failed, but another one, perhaps at another server, may succeed."""

    text: str  # the failure as a predicate, for messages
    timed_out: bool = False
    bad_answer: bool = False  # it breaks the protocol, or belongs to another request
    retry_after: float | None = None  # seconds, if the server sent them
    # why this server cannot be used at all; None if it may recover
    fatal: RewardServerError | None = None

    def __str__(self) -> str:
        return self.text


class Backoff:
    """Pauses between attempts: each twice as long as the one before, with jitter."""

    def __init__(self, first_seconds: float, longest_seconds: float):
        self._first = first_seconds
        self._longest = longest_seconds
        self._next = first_seconds
        # Its own, so that jitter does not touch the trainer's random state.
        self._random = random.Random()

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._next = self._first

    def next_pause(self, retry_after: float | None) -> float:
        """Return the seconds to wait; the server's own Retry-After takes precedence."""
        pause = min(self._next * self._random.uniform(0.5, 1.5), self._longest)
        self._next = min(2 * self._next, self._longest)
        if retry_after is not None:
            # Never sooner than asked, and spread out: all of the server's clients got the same
            # answer.
            return retry_after * self._random.uniform(1.0, 1.5)
        return pause


class NoHttp(FailedAttempt):
    """The peer does not speak HTTP."""


@dataclass(frozen=True)
class HttpAnswer:
    """A status code, case-insensitive headers, and the uncompressed body."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after(self) -> float | None:
        """The Retry-After header in seconds; None if it is no number or out of range."""
        with contextlib.suppress(ValueError):
            seconds = float(self.headers.get("Retry-After", "nan"))
            return seconds if 0 <= seconds <= wire.MAX_RETRY_SECONDS else None

    def failed(self) -> FailedAttempt:
        """Return the failure that an HTTP error stands for, with the error's text if it has one."""
        text = f"answers HTTP {self.code}"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = str(parse_json(self.body)["error"]).split()
            text += f": {show_control_characters(' '.join(said)[-MAX_QUOTED:])}"
        return FailedAttempt(text, retry_after=self.retry_after)

    def check_digest(self, body: bytes) -> None:
        """Raise FailedAttempt unless this answers a request with this body."""
        digest = self.headers.get(wire.REQUEST_DIGEST)
        sent = hashlib.sha256(body).hexdigest()
        if digest != sent:
            text = "it bears no digest"
            if digest:
                text = f"it is to another request (digest {quoted(digest, 12)}, asked {sent[:12]})"
            raise FailedAttempt(
                f"gave a wrong answer: {text} ({wire.REQUEST_DIGEST})", bad_answer=True
            )


def url_of(place: Address, path: str) -> URL:
    return URL.build(scheme="http", host=place.host, port=place.port, path=path)


def proxy_of(url: URL) -> str | None:
    """Return the proxy that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY name for a server; None
    for this machine.

    Raises ValueError if it is no HTTP proxy.
    """
    host = url.host or ""
    if names_this_machine(host):
        return None
    if proxy_bypass(host) or proxy_bypass(f"{host}:{url.port}"):
        return None
    proxies = getproxies()
    kind = url.scheme if proxies.get(url.scheme) else "all"
    proxy = proxies.get(kind)
    if not proxy:
        return None
    if "://" not in proxy:  # as curl and requests read it
        proxy = f"http://{proxy}"
    scheme, _, rest = proxy.partition("://")
    if scheme not in ("http", "https") or not rest:
        variable = f"{kind.upper()}_PROXY"
        # What follows the scheme may hold a password.
        raise ValueError(
            f"{variable} names a proxy of the kind {scheme}://, for {host}; expected "
            f"http://HOST:PORT. Set it so, or name {host} in NO_PROXY"
        )
    return proxy


async def exchange(
    url: URL,
    seconds: float,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    proxy: str | None = None,
    socket_path: Path | None = None,
    max_bytes: int = MAX_ANSWER_BYTES,
) -> HttpAnswer:
    """Send a GET, or a POST if there is a body, over a new connection, without redirects.

    Variables such as HTTP_PROXY do not count: reward servers are in the cluster. `proxy_of` reads
    them. With `socket_path` the connection goes to that Unix socket, whatever the URL's host.

    Raises FailedAttempt if no complete answer came within `seconds`, counted from connecting, or
    its body has more than `max_bytes`.
    """
    connector: aiohttp.BaseConnector = aiohttp.TCPConnector(force_close=True)
    if socket_path is not None:
        connector = aiohttp.UnixConnector(str(socket_path), force_close=True)
    try:
        async with (
            connector,
            aiohttp.request(
                "GET" if body is None else "POST",
                url,
                data=None
                if body is None
                else io.BytesIO(body),  # in pieces, between which the loop goes on
                headers={"Accept-Encoding": "identity", **(headers or {})},
                allow_redirects=False,
                proxy=proxy,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
                connector=connector,
            ) as answer,
        ):
            received = bytearray()
            async for part in answer.content.iter_any():
                received += part
                if len(received) > max_bytes:
                    raise FailedAttempt(f"does not answer (it sends more than {max_bytes} bytes)")
            return HttpAnswer(answer.status, answer.headers, bytes(received))
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise FailedAttempt("does not answer (timed out)", timed_out=True) from error
    except aiohttp.ClientResponseError as error:
        sent = quoted(error.message, 200)
        raise NoHttp(f"does not answer (what it sends is not HTTP: {sent})") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number).lower() if number else str(error) or type(error).__name__
        reason = next((text for kind, text in REASONS if isinstance(error, kind)), reason)
        raise FailedAttempt(f"does not answer ({quoted(reason)})") from error


async def ask_description(model: ModelAddress, timeout: float) -> ServerInfo:
    """Ask a server once for its description, and whether the reward model is ready; `timeout` is
    for each request.

    Raises FailedAttempt if a retry may succeed, RewardServerError if it cannot: another program is
    on the port, it serves another model or protocol version, or it wants another token.
    """
    question = json.dumps({"id": uuid.uuid4().hex, "inputs": []}).encode()
    answer = await _ask(model, f"/v2/models/{wire.INFO_MODEL}/infer", timeout, question)
    code = answer.code
    if code in (401, 403):
        raise _token_refused(model)
    if code in GATEWAY_CODES:
        raise answer.failed()
    if code != 200:
        answer = await _ask(model, "/v2", timeout)
        if answer.code != 200 or b'"extensions"' not in answer.body:  # it is no Triton
            raise _foreign(model.place, f"HTTP {code}")
        program = f"is a Triton server without '{wire.INFO_MODEL}' (HTTP {code})"
        raise FailedAttempt(
            f"{program}: a reward server that starts, or none of this project; check host and port"
        )
    try:
        info = ServerInfo.from_json(parse_json(answer.body)["outputs"][0]["data"][0])
    except wire.OtherVersion as error:
        raise RewardServerError(
            f"the reward server at {model.place} {error}",
            key="reward_server.protocol.other_version",
        ) from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        answered = f"an answer that is not a reward server's ({quoted(error)})"
        raise _foreign(model.place, answered) from error
    answer.check_digest(question)
    if info.name != model.name:
        name = quoted(info.name, 100)
        raise RewardServerError(
            f"the reward server at {model.place} serves the model '{name}', but '{model.name}' "
            f"was asked for. Set remote_rm.reward_model.name={name}, or the port to the other "
            "server's.",
            key="reward_server.model.other_name",
        )
    answer = await _ask(model, f"/v2/models/{model.name}/ready", timeout)
    if answer.code != 200:
        raise FailedAttempt(
            f"is up, its model '{model.name}' is not ready", retry_after=answer.retry_after
        )
    return info


def infer_json(
    model: ModelAddress, inputs: list[dict[str, Any]], timeout: float
) -> dict[str, list[Any]]:
    """Make one KServe v2 inference in JSON, as `curl` would; return each output's flat data by
    name.

    Raises RewardServerError for anything but a proper answer.
    """
    body = json.dumps({"inputs": inputs}).encode()
    try:
        answer = wait_for(_ask(model, f"/v2/models/{model.name}/infer", timeout, body))
        if answer.code != 200:
            raise answer.failed()
        outputs = parse_json(answer.body)["outputs"]
        return {output["name"]: list(output["data"]) for output in outputs}
    except (FailedAttempt, ValueError, KeyError, TypeError) as error:
        answered = f"gave no proper answer to a request to '{model.name}': {quoted(error)}"
        raise RewardServerError(
            f"{model.place} {answered}",
            key="reward_server.answer.not_proper",
        ) from error


async def infer(
    model: ModelAddress,
    arrays: Mapping[str, np.ndarray],
    attributes: int,
    timeout: float,
    request_id: str,
) -> Scores:
    """Ask once for the scores of N samples.

    Args:
        arrays: the inputs by name, each [N, ...].
        attributes: K, from the server's description.
        timeout: seconds until the answer must be complete.
        request_id: appears in the request, the server's log and messages.

    Raises FailedAttempt if a retry, perhaps at another server, may succeed, RewardServerError if
    the server refuses this request, as any other of the same model would.
    """
    # tritonclient encodes and decodes the bodies. It has no deadline for a whole answer, so
    # `exchange` sends them.
    import tritonclient.http as triton
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    keys = [wire.REWARDS, wire.STATUS, *([wire.ATTRIBUTES] if attributes else [])]
    outputs = [triton.InferRequestedOutput(key) for key in keys]
    client = triton.InferenceServerClient
    body, json_size = client.generate_request_body(inputs, outputs=outputs, request_id=request_id)
    headers = {
        "Content-Type": "application/octet-stream",
        wire.HEADER_LENGTH: str(json_size),
        wire.REQUEST_ID: request_id,
        **wire.bearer(model.token),
    }
    url = url_of(model.place, f"/v2/models/{model.name}/infer")
    count = len(next(iter(arrays.values())))
    max_bytes = MAX_ANSWER_BYTES + count * (2 + attributes) * MAX_NUMBER_BYTES
    answer = await exchange(url, timeout, body=body, headers=headers, max_bytes=max_bytes)
    if answer.code != 200:
        raise await _error_of(model, answer, request_id)
    answer.check_digest(body)
    try:
        json_length = answer.headers.get(wire.HEADER_LENGTH)
        parsed = client.parse_response_body(
            answer.body, header_length=int(json_length) if json_length else None
        )
        if (answered_id := parsed.get_response().get("id")) != request_id:
            other = quoted(answered_id, 100)
            raise ValueError(f"it is to the request with the id '{other}', not {request_id!r}")
        wire.check_json_numbers(parsed.get_response())
        return wire.check_answer(parsed.as_numpy, count, attributes)
    except Exception as error:  # tritonclient may raise anything on malformed bytes
        if not any(name in answer.headers for name in ("Content-Length", "Transfer-Encoding")):
            # Without its length, a truncated answer looks complete.
            raise FailedAttempt("does not answer (the answer was cut short, or is none)") from error
        raise FailedAttempt(f"gave a wrong answer: {quoted(error)}", bad_answer=True) from error


async def _error_of(model: ModelAddress, answer: HttpAnswer, request_id: str) -> Exception:
    """Turn an HTTP error into a FailedAttempt, or a RewardServerError if no retry can succeed."""
    failed = answer.failed()
    if answer.code in (401, 403):
        return FailedAttempt(f"answers HTTP {answer.code}", fatal=_token_refused(model))
    if answer.code >= 500 or answer.code in RETRIED_CODES:
        return failed
    try:  # while starting, Triton calls its models unknown
        await ask_description(model, PROBE_SECONDS)
    except FailedAttempt as error:
        return error
    except RewardServerError as error:
        return FailedAttempt(failed.text, fatal=error)
    if "unknown model" in failed.text or "not ready" in failed.text:  # it has become ready since
        return FailedAttempt(failed.text)
    if answer.headers.get(wire.REQUEST_ID) != request_id:  # a proxy's, or to another request
        return FailedAttempt(f"{failed}, and not to this request", bad_answer=True)
    said = failed.text.removeprefix("answers ")
    return RewardServerError(
        f"the reward server at {model.place} refused a request (id {request_id}): {said}",
        key="reward_server.request.refused",
    )


async def _ask(
    model: ModelAddress, path: str, timeout: float, body: bytes | None = None
) -> HttpAnswer:
    headers = {"Content-Type": "application/json", **wire.bearer(model.token)}
    try:
        return await exchange(url_of(model.place, path), timeout, body=body, headers=headers)
    except NoHttp as error:
        raise RewardServerError(
            f"what listens on {model.place} does not speak HTTP ({error}). Check the port.",
            key="reward_server.port.no_http",
        ) from error


def _token_refused(model: ModelAddress) -> RewardServerError:
    if model.token is None:
        fault = Fault("no token was sent", key="reward_server.token.not_sent")
    else:
        fault = Fault(
            "it does not know the token that was sent",
            key="reward_server.token.unknown",
        )
    return RewardServerError(
        f"the reward server at {model.place} asks for an access token, and {fault}. Give the "
        "server's token by remote_rm.reward_model.token_file=FILE or by the environment variable "
        f"{wire.TOKEN_VARIABLE}.",
        key=fault.key,
    )


def _foreign(place: Address, answered: str) -> RewardServerError:
    return RewardServerError(
        f"another program listens on {place}: expected a reward server, got {answered}. "
        "Check host and port against the server's line 'ready at http://...'.",
        key="reward_server.port.other_program",
    )
