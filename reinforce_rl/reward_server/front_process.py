"""The front door as a process: the server's handle, and the process's main function.

One connection carries settings and states to it, and reports of its own and the model's health back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, cast

from aiohttp import web

from reinforce_rl.errors import Fault, RewardServerError
from reinforce_rl.reward_server.admission import FrontSettings
from reinforce_rl.reward_server.front import DRAINING, Front
from reinforce_rl.reward_server.health import Progress
from reinforce_rl.utils.net import BACKLOG
from reinforce_rl.utils.process import (
    Message,
    ModuleChild,
    Silence,
    connect_to_parent,
    receive,
    send,
)

MODULE = "reinforce_rl.reward_server.front_process"
START_SECONDS = 60.0  # a busy machine imports slowly
END_SECONDS = 3.0
OPEN_FILES = 1 << 16
ADDRESS_CONNECTIONS = 512  # concurrent, per client address
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
READ_BYTES = 1 << 18  # body bytes per read; the default of 64 KiB costs four times the wake-ups


class FrontProcess(ModuleChild):
    """The server's handle of the front-door process; `listener` is handed over to it, and closed here."""

    def __init__(self, listener: socket.socket, settings: FrontSettings, progress_path: Path):
        self._up, self._empty = threading.Event(), threading.Event()
        self._unhealthy = Silence()
        self._text = "a small sample has had no answer"
        with listener:
            super().__init__(MODULE, self._on_message, pass_fds=[listener.fileno()])
            # The token goes through the connection: a command line and an environment can be read
            # by others.
            start = {"listener": listener.fileno(), "progress": str(progress_path)}
            log_level = logging.getLogger().getEffectiveLevel()
            self.send({**start, "log_level": log_level, "settings": settings.model_dump_json()})

    def wait_until_up(self) -> None:
        """Wait until it answers; raise RewardServerError if it does not start."""
        if not self._up.wait(START_SECONDS) or self.exit_code is not None:
            raise RewardServerError(
                f"the server's front door (process {self.pid}) did not start within "
                f"{START_SECONDS:.0f} s (exit code {self.exit_code}); its last lines are above",
                key="serve.front_door.not_started",
            )

    def set_state(self, state: str, reason: str = "") -> None:
        self._unhealthy.reset()
        self.send({"state": state, "reason": reason})

    def fault(self, seconds: float) -> Fault | None:
        """Return why the server must end: the front door died or hangs, or health was red for `seconds`; else None."""
        if (fault := super().fault(seconds)) is not None:
            self.kill()  # one that hangs would not end by itself
            return Fault(f"the front door {fault}", key="serve.front_door.lost")
        unhealthy = self._unhealthy.seconds()
        if unhealthy <= seconds:
            return None
        return Fault(
            f"/health has not been green for {unhealthy:.0f} s: {self._text}",
            key="serve.health.not_green",
        )

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for those in flight; return whether all finished in time."""
        self.set_state(DRAINING)
        return self._empty.wait(seconds) and self.exit_code is None

    def close(self) -> None:
        """End it. Safe to call twice."""
        self.stop(2 * END_SECONDS)

    def _on_message(self, message: Message | None) -> None:
        event = message["event"] if message else "ended"
        if event in ("up", "ended"):  # "ended" must wake the waiters too
            self._up.set()
        if event in ("empty", "ended"):
            self._empty.set()
        if event == "healthy":
            self._unhealthy.reset()
        elif event == "unhealthy" and message:
            self._text = message["text"]


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
    front = Front(settings, Progress(Path(start["progress"])))
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
    health = _report_health(connection, front, settings.inference.stuck_seconds / 10)
    tasks = [asyncio.create_task(report) for report in (health, _report_empty(connection, front))]
    ended = asyncio.Event()

    def read_message() -> None:  # on the loop, so that a state applies to every later request
        message = receive(connection)
        if message is None:
            loop.remove_reader(connection.fileno())
            ended.set()
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
    """Report the health of the whole path to the model, or at least of this process, about every `seconds`."""
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
