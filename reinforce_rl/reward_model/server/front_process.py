"""The server's handle of the front door's process.

One connection carries settings, states and the scorer's progress to it, and questions for the
latter and reports of its own and the model's health back.
"""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import asdict

from reinforce_rl.errors import Fault, RewardServerError
from reinforce_rl.reward_model.server.admission import FrontSettings
from reinforce_rl.reward_model.server.front import DRAINING, END_SECONDS
from reinforce_rl.reward_model.server.health import Progress
from reinforce_rl.utils.process import Message, ModuleChild, Silence

MODULE = "reinforce_rl.reward_model.server.front"
START_SECONDS = 60.0  # a busy machine imports slowly


class FrontProcess(ModuleChild):
    """The server's handle of the front-door process; `listener` is handed over to it, and closed
    here.
    """

    def __init__(self, listener: socket.socket, settings: FrontSettings, progress: Progress):
        self._progress = progress
        self._up = threading.Event()
        self._empty = threading.Event()
        self._unhealthy = Silence()
        self._text = "a small sample has had no answer"
        with listener:
            super().__init__(MODULE, self._on_message, pass_fds=[listener.fileno()])
            # The token goes through the connection: a command line and an environment can be read
            # by others.
            start = {
                "listener": listener.fileno(),
                "log_level": logging.getLogger().getEffectiveLevel(),
                "settings": settings.model_dump_json(),
            }
            self.send(start)

    def wait_until_up(self) -> None:
        """Wait until it answers; raise RewardServerError if it does not start."""
        if not self._up.wait(START_SECONDS) or self.exit_code is not None:
            raise RewardServerError(
                f"the server's HTTP front end (process {self.pid}) did not start within "
                f"{START_SECONDS:.0f} s (exit code {self.exit_code}); its last lines are above",
                key="serve.front_door.not_started",
            )

    def set_state(self, state: str, reason: str = "") -> None:
        self._unhealthy.reset()
        self.send({"state": state, "reason": reason})

    def fault(self, seconds: float) -> Fault | None:
        """Return why the server must end: the front door died or hangs, or health was red for
        `seconds`; else None.
        """
        if (fault := super().fault(seconds)) is not None:
            self.kill()  # one that hangs would not end by itself
            return Fault(f"the HTTP front end {fault}", key="serve.front_door.lost")
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
        if event == "progress":
            self.send({"progress": asdict(self._progress.read())})
        elif event == "healthy":
            self._unhealthy.reset()
        elif event == "unhealthy" and message:
            self._text = message["text"]
