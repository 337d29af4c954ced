"""HTTP front door of the reward server: authorization, admission and validation; then it forwards
to Triton.

Speaks KServe v2 for the few served paths, and adds /health and /metrics. It is a process of its
own, so that it answers even while the model is busy or stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import resource
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, cast

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, hdrs, web
from aiohttp.typedefs import Handler
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reinforce_rl.reward_model.server.admission import (
    Admission,
    FrontSettings,
    Refusal,
    check_length,
)
from reinforce_rl.reward_model.server.health import FrontMetrics, Health, ProgressReader, Verdict
from reinforce_rl.reward_model.server.request import TritonRequest, json_length, read_request
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.wire import HEADER_LENGTH, REQUEST_DIGEST, REQUEST_ID
from reinforce_rl.utils.net import BACKLOG
from reinforce_rl.utils.process import connect_to_parent, receive, send

logger = logging.getLogger(__name__)

STARTING = "starting"
READY = "ready"
DRAINING = "draining"
FAILED = "failed"

BODY_SECONDS = 120.0  # for a client to send its request
QUICK_JSON_BYTES = 1 << 18  # up to this size, parsed on the event loop
QUESTION_SECONDS = 10.0  # for Triton's answer to anything but an inference, and for a question
QUESTION_BYTES = 1 << 16
START_RETRY_SECONDS = 5
PASSED_HEADERS = (HEADER_LENGTH, "Content-Type")
CLIENT_GONE = 499  # nginx's code, for logs and metrics only
TRUSTED_ID = re.compile(r"[\w.:/+@-]{1,128}", re.ASCII)
END_SECONDS = 3.0
OPEN_FILES = 1 << 16
ADDRESS_CONNECTIONS = 512  # concurrent, per client address
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Retry-After: 5\r\n"
    b"Connection: close\r\n"
    b"Content-Length: 0\r\n"
    b"\r\n"
)
READ_BYTES = 1 << 18  # body bytes per read; the default of 64 KiB costs four times the wake-ups
LOG_LINE = "event=request id=%s path=%s code=%d bytes=%d samples=%d seconds=%.4f client=%s"


@dataclass
class _Record:
    """What is logged and measured of one request."""

    id: str
    samples: int = 0
    size: int = 0
    scores: bool = False  # asks for scores
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)  # SHA-256 of the body as received


_RECORD: web.RequestKey[_Record] = web.RequestKey("record", _Record)


class Front:
    """The aiohttp application and its state."""

    def __init__(self, settings: FrontSettings, progress: ProgressReader):
        self._settings = settings
        self._model = f"/v2/models/{settings.inference.name}"
        self._admission = Admission(settings)
        self._progress = progress
        self._metrics = FrontMetrics(self._admission)
        self._answers = 0
        self._health = Health(self._ask_model, lambda: self._answers, progress, settings)
        self._state = STARTING
        self._reason = ""
        self._session: ClientSession | None = None
        self._parser = ThreadPoolExecutor(1)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around])
        app.cleanup_ctx.append(self._with_session)
        router = app.router
        router.add_get("/health", self._answer_health)
        router.add_get("/metrics", self._answer_metrics)
        router.add_get("/v2/health/live", self._answer_live)
        router.add_get("/v2/health/ready", self._answer_ready)
        for path in ("/v2", "/v2/"):
            router.add_get(path, self._pass_question)
        version = r"/versions/{version:\d{1,6}}"
        for model in (self._model, self._model + version):
            for leaf in ("", "/ready", "/config"):
                router.add_get(model + leaf, self._pass_question)
            router.add_post(f"{model}/infer", self._infer, expect_handler=_promise_nothing)
        description = f"/v2/models/{wire.INFO_MODEL}"
        for model in (description, f"{description}/versions/1"):
            router.add_get(f"{model}/ready", self._answer_description_ready)
            router.add_post(f"{model}/infer", self._describe, expect_handler=_promise_nothing)
        return app

    async def _with_session(self, app: web.Application):
        self._session = ClientSession(
            connector=UnixConnector(self._settings.backend, limit=0),
            timeout=ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
            skip_auto_headers=[hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT],
        )
        yield
        await self._session.close()

    def set_state(self, state: str, reason: str = "") -> None:
        """Set STARTING, READY, DRAINING or FAILED."""
        self._state = state
        self._reason = reason
        if state == DRAINING:
            self._admission.drain()

    async def wait_until_empty(self) -> None:
        """Wait, once draining, for Triton's last answer, and close the connections to it."""
        await self._admission.empty.wait()
        if self._session is not None:
            await self._session.close()  # an open one would delay Triton's stop

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(REQUEST_ID, "")
        record = _Record(given if TRUSTED_ID.fullmatch(given) else secrets.token_hex(8))
        request[_RECORD] = record
        started = time.monotonic()
        code = CLIENT_GONE
        try:
            try:
                response = await handler(request)
            except Exception as error:
                response = _answer_to(error, request)
            response.headers[REQUEST_ID] = record.id
            response.headers[REQUEST_DIGEST] = record.digest.hexdigest()
            response.headers[hdrs.SERVER] = "reinforce_rl"
            code = response.status
            return response
        finally:
            seconds = time.monotonic() - started
            if record.scores:
                self._metrics.count(code, record.samples, record.size, seconds)
            resource = request.match_info.route.resource
            path = resource.canonical if resource else "unknown"
            level = logging.INFO if record.scores or code in (401, 413) else logging.DEBUG
            values = (record.id, path, code, record.size, record.samples, seconds, request.remote)
            logger.log(level, LOG_LINE, *values)

    def _authorise(self, request: web.Request) -> None:
        if not wire.is_authorised(request.headers.get(wire.TOKEN_HEADER), self._settings.token):
            raise Refusal(
                401,
                "this reward server requires an access token; send it as 'Authorization: Bearer "
                "TOKEN' (a run has it from remote_rm.reward_model.token_file or from "
                f"{wire.TOKEN_VARIABLE})",
            )

    def _check_ready(self) -> None:
        if self._state == STARTING:
            raise Refusal(503, "the reward server is starting", retry_after=START_RETRY_SECONDS)
        if self._state != READY:
            raise Refusal(
                503,
                f"the reward server is {self._state}",
                retry_after=self._admission.retry_after(),
            )

    def _check(self, request: web.Request) -> None:
        """Check what is known of a request before its body comes."""
        self._authorise(request)
        self._check_ready()
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
            raise Refusal(415, "compressed requests are not supported")
        check_length(request.content_length, self._settings)

    async def _infer(self, request: web.Request) -> web.Response:
        record = request[_RECORD]
        record.scores = True
        self._check(request)
        self._admission.check_room()
        parts = []
        try:
            async for part in _parts_of(request, BODY_SECONDS, self._settings.idle_seconds):
                check_length(record.size + len(part), self._settings)
                self._admission.hold(len(part))
                record.size += len(part)
                parts.append(part)
            body = b"".join(parts)
            parts.clear()
            wanted = await self._read(request, body, self._settings.input_forms)
            del body
            record.samples = wanted.samples
            async with self._admission.slot():  # only now, so that slow senders hold no place
                answer = await self._pass_on(
                    request, wanted, self._settings.inference.request_timeout_seconds
                )
                self._answers += 1
                return answer
        finally:
            self._admission.release(record.size)

    async def _read(
        self, request: web.Request, body: bytes, input_forms: Sequence[str]
    ) -> TritonRequest:
        """Parse long JSON in a thread, one at a time, since it needs tens of times its size in
        memory.
        """
        header = request.headers.get(HEADER_LENGTH)
        read = partial(read_request, body, header, self._settings, input_forms)
        if json_length(header, len(body)) <= QUICK_JSON_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._parser, read)

    async def _describe(self, request: web.Request) -> web.Response:
        """Answer with the server's description, as a model of KServe v2 would; no other process is
        asked.
        """
        self._check(request)
        body = b""
        async for part in _parts_of(request, QUESTION_SECONDS, QUESTION_SECONDS):
            body += part
            if len(body) > QUESTION_BYTES:
                raise Refusal(
                    413, f"expected at most {QUESTION_BYTES} bytes for the server's description"
                )
        question = json.loads((await self._read(request, body, ())).body)
        output = {
            "name": wire.INFO_OUTPUT,
            "datatype": "BYTES",
            "shape": [1],
            "data": [self._settings.description],
        }
        answer = {"model_name": wire.INFO_MODEL, "model_version": "1", "outputs": [output]}
        if "id" in question:
            answer["id"] = question["id"]
        return web.json_response(answer)

    async def _answer_description_ready(self, request: web.Request) -> web.Response:
        self._authorise(request)
        self._check_ready()
        return web.Response()

    async def _pass_question(self, request: web.Request) -> web.Response:
        self._authorise(request)
        self._check_ready()
        return await self._pass_on(request, None, QUESTION_SECONDS)

    async def _pass_on(
        self, request: web.Request, wanted: TritonRequest | None, seconds: float
    ) -> web.Response:
        headers = {HEADER_LENGTH: str(wanted.json_length)} if wanted else {}
        try:
            code, headers_back, answer = await self._ask(
                request.path, wanted and wanted.body, headers, seconds
            )
        except (asyncio.TimeoutError, TimeoutError):
            raise Refusal(504, f"the model backend did not answer within {seconds:g} s") from None
        except (ClientError, OSError) as error:
            text = f"the model backend does not answer ({type(error).__name__})"
            raise Refusal(502, text, retry_after=START_RETRY_SECONDS) from error
        if code >= 500:  # its text may quote the request, or be a traceback
            if b"Traceback" not in answer:  # the scorer logs what the model raised
                logger.error("event=backend_fault code=%d answer=%.200r", code, answer)
            raise Refusal(code, "the model backend failed; the reward server's log says why")
        kept = {name: headers_back[name] for name in PASSED_HEADERS if name in headers_back}
        return web.Response(status=code, body=answer, headers=kept)

    async def _ask(self, path: str, body: bytes | None, headers: dict[str, str], seconds: float):
        assert self._session is not None
        method = "GET" if body is None else "POST"
        timeout = ClientTimeout(seconds, sock_connect=5.0)
        url = "http://localhost" + path
        async with self._session.request(
            method, url, data=body, headers=headers, timeout=timeout
        ) as answer:
            return answer.status, answer.headers, await answer.read()

    async def _ask_model(self, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        seconds = 2 * self._settings.inference.health_timeout_seconds
        try:
            code, _, answer = await self._ask(f"{self._model}/infer", body, headers, seconds)
        except ClientError as error:
            raise ConnectionError(type(error).__name__) from error
        return code, answer

    async def _answer_live(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _answer_ready(self, _: web.Request) -> web.Response:
        self._check_ready()
        return web.Response()

    async def check_health(self) -> Verdict:
        """Return whether requests are being scored, or would be."""
        if self._state != READY:
            return Verdict(False, self._reason or f"the server is {self._state}", None)
        return await self._health.check()

    async def _answer_health(self, _: web.Request) -> web.Response:
        verdict = await self.check_health()
        values = {"state": self._state, "model": self._settings.inference.name}
        counts = {"in_flight": self._admission.in_flight, "queued": self._admission.queued}
        text = json.dumps({**values, **counts, **asdict(verdict)}) + "\n"
        return web.json_response(text=text, status=200 if verdict.healthy else 503)

    async def _answer_metrics(self, request: web.Request) -> web.Response:
        self._authorise(request)
        scored = await self._progress.read()
        text = self._metrics.text(scored, ready=self._state == READY)
        return web.Response(body=text, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})


async def _promise_nothing(request: web.Request) -> None:
    """Leave the answer to `Expect: 100-continue`, which curl sends before a large body, to
    `_parts_of`.
    """


async def _parts_of(request: web.Request, seconds: float, pause: float):
    """Yield the body as it arrives; raise Refusal (408) if it is not complete in `seconds` or
    stalls for `pause`.
    """
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer itself
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            left = min(pause, max(0.0, deadline - loop.time()))
            part = await asyncio.wait_for(request.content.readany(), left)
        except (asyncio.TimeoutError, TimeoutError):
            text = (
                f"the request's body did not come within {seconds:g} s, or paused for {pause:g} s"
            )
            raise Refusal(408, text) from None
        if not part:
            return
        request[_RECORD].digest.update(part)
        yield part


def _answer_to(error: Exception, request: web.Request) -> web.Response:
    if isinstance(error, web.HTTPException):  # aiohttp's own: no such path, no such method
        text = f"{error.reason}: {request.method} {request.path} is not served here"
        allowed = {key: value for key, value in error.headers.items() if key == hdrs.ALLOW}
        return web.json_response({"error": text}, status=error.status, headers=allowed)
    if isinstance(error, (ConnectionResetError, web.RequestPayloadError)):
        # the client hung up while sending
        error = Refusal(400, "the request ended before its body was complete")
    if not isinstance(error, Refusal):
        # Its text may quote the request.
        logger.error("event=front_fault error=%s id=%s", type(error).__name__, request[_RECORD].id)
        logger.debug("event=front_fault_details", exc_info=error)
        error = Refusal(
            500, "the HTTP front end of the reward server failed; its log has the error's name"
        )
    headers = {} if error.retry_after is None else {hdrs.RETRY_AFTER: str(error.retry_after)}
    if error.code == 401:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    response = web.json_response({"error": error.text}, status=error.code, headers=headers)
    if hdrs.EXPECT in request.headers:
        response.force_close()  # else it would wait for a body that does not come
    return response


# The process.


class _Connection(web.RequestHandler):
    """A client's connection; bounded per address, so that one client cannot shut out the others."""

    __slots__ = ("_address",)
    _open: ClassVar[Counter[str]] = Counter()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or [""])[0])
        self._open[self._address] += 1
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # the rest is for those to Triton
        if (
            self._open[self._address] > min(ADDRESS_CONNECTIONS, most // 2)
            or self._open.total() > most
        ):
            cast(asyncio.Transport, transport).write(TOO_MANY)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.subtract([self._address])
        if not self._open[self._address]:
            del self._open[self._address]
        super().connection_lost(exc)


async def _run(connection: Connection) -> None:
    loop = asyncio.get_running_loop()
    start = receive(connection)
    if start is None:
        return
    logging.basicConfig(
        level=start["log_level"], format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # Its log of a malformed request would quote the request.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    settings = FrontSettings.model_validate_json(start["settings"])
    progress = ProgressReader(partial(send, connection, {"event": "progress"}))
    front = Front(settings, progress)
    options: dict[str, Any] = {
        "access_log": None,
        "auto_decompress": False,
        "read_bufsize": READ_BYTES,
    }
    # for a header too: aiohttp counts until it is complete
    options["keepalive_timeout"] = settings.idle_seconds
    # a disconnect frees the slot
    ending = {"handler_cancellation": True, "shutdown_timeout": END_SECONDS / 3}
    runner = web.AppRunner(front.application(), **ending, **options)
    await runner.setup()
    manager = cast(web.Server, runner.server)
    listener = socket.socket(fileno=start["listener"])
    accept = partial(_Connection, manager, loop=loop, **options)
    server = await loop.create_server(accept, sock=listener, backlog=BACKLOG)
    health = _report_health(connection, front, settings.inference.model_timeout_seconds / 10)
    tasks = [asyncio.create_task(report) for report in (health, _report_empty(connection, front))]
    ended = asyncio.Event()

    def read_message() -> None:  # on the loop, so that a state applies to every later request
        message = receive(connection)
        if message is None:
            loop.remove_reader(connection.fileno())
            ended.set()
        elif "progress" in message:
            progress.answer(message["progress"])
        else:
            front.set_state(message["state"], message["reason"])

    loop.add_reader(connection.fileno(), read_message)
    # let the first report precede READY, so that it sends the model no sample
    await asyncio.sleep(0)
    send(connection, {"event": "up"})
    await ended.wait()
    for task in tasks:
        task.cancel()
    server.close()
    await runner.cleanup()


async def _report_empty(connection: Connection, front: Front) -> None:
    await front.wait_until_empty()
    send(connection, {"event": "empty"})


async def _report_health(connection: Connection, front: Front, seconds: float) -> None:
    """Report the health of the whole path to the model, or at least of this process, about every
    `seconds`.
    """
    while True:
        event = "alive"
        text = ""
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):  # the check itself goes on
            verdict = await asyncio.wait_for(front.check_health(), seconds)
            event, text = ("healthy", "") if verdict.healthy else ("unhealthy", verdict.text)
        send(connection, {"event": event, "text": text})
        await asyncio.sleep(seconds)


def main() -> None:
    """Run the front door until the server's end of the connection is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # batch systems signal every process; the server ends this one
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # systemd's usual soft limit is 1,024; a hard one may be infinite, which is -1.
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (min(most, OPEN_FILES) if most >= 0 else OPEN_FILES, most)
    )
    asyncio.run(_run(connect_to_parent()))


if __name__ == "__main__":
    main()
