"""The front door as a process: how the server starts it and talks to it, and what it runs.

Settings and states go to its standard input, one JSON object a line; what it reports comes from its standard output.
The end of its input means that the server is gone, however it went, and then it ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from reinforce_rl.errors import RewardServerError
from reinforce_rl.reward.front import DRAINING, Front, FrontSettings
from reinforce_rl.reward.limits import FrontLimits
from reinforce_rl.reward.progress import Progress

START_SECONDS = 60.0  # a busy machine imports slowly
END_SECONDS = 3.0
READ_BYTES = 1 << 18  # of a body at a time; the default of 64 KiB costs four times the wake-ups
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class FrontProcess:
    """The server's end.

    Args:
        listener: the socket that clients connect to; it is handed over, and closed here.
        settings: for the front door.
        progress_path: the file of the scorer's progress.
    """

    def __init__(self, listener: socket.socket, settings: FrontSettings, progress_path: Path):
        package_parent = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH", "")]))
        with listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reinforce_rl.reward.front_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                pass_fds=[listener.fileno()],
            )
            # The token goes through the pipe: a command line and an environment can be read by others.
            self._tell(
                {
                    "listener": listener.fileno(),
                    "settings": asdict(settings),
                    "progress": str(progress_path),
                    "log_level": logging.getLogger().getEffectiveLevel(),
                }
            )
        self._up = threading.Event()
        self._empty = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name="front-reports")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait_until_up(self) -> None:
        """Until it answers; raises RewardServerError where it does not come to that."""
        if not self._up.wait(START_SECONDS) or self.exit_code is not None:
            raise RewardServerError(
                f"the server's front door (process {self.pid}) did not start within {START_SECONDS:.0f} s "
                f"(exit code {self.exit_code}); its last lines are above"
            )

    def set_state(self, state: str, reason: str = "") -> None:
        """Say what the server is doing."""
        self._tell({"state": state, "reason": reason})

    def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait until those that Triton has are answered. Whether all were in time."""
        if self.exit_code is not None:
            return False
        self.set_state(DRAINING)
        self._empty.wait(seconds)
        return self._empty.is_set() and self.exit_code is None

    def close(self) -> None:
        """End it. Safe to call twice."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(2 * END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tell(self, message: dict[str, object]) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed by whoever watches it
            pipe.write((json.dumps(message) + "\n").encode())
            pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = {b"up": self._up, b"empty": self._empty}.get(line.strip())
            if event is not None:
                event.set()
        self._up.set()  # it has ended: nobody should wait for it any longer
        self._empty.set()


async def _run() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    start = json.loads(await reader.readline())
    logging.basicConfig(level=start["log_level"], format=LOG_FORMAT)
    # What it logs of a request that is no HTTP quotes the request.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    values = start["settings"]
    settings = FrontSettings(**{**values, "limits": FrontLimits(**values["limits"])})
    front = Front(settings, Progress(Path(start["progress"])))
    runner = web.AppRunner(
        front.application(),
        access_log=None,
        handler_cancellation=True,  # whoever hangs up frees its place
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        shutdown_timeout=END_SECONDS / 3,
    )
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=start["listener"])).start()
    print("up", flush=True)
    reporter: asyncio.Task[None] | None = None
    while line := await reader.readline():
        message = json.loads(line)
        front.set_state(message["state"], message["reason"])
        if message["state"] == DRAINING and reporter is None:
            reporter = asyncio.create_task(_report_empty(front))
    if reporter is not None:
        reporter.cancel()
    await runner.cleanup()


async def _report_empty(front: Front) -> None:
    await front.wait_until_empty()
    print("empty", flush=True)


def main() -> None:
    """Run the front door until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a batch system signals every process; the server says when it is time
    asyncio.run(_run())


if __name__ == "__main__":
    main()
