"""Graceful stop: SIGTERM and SIGUSR1 request it, and all ranks stop together at the same point."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from reinforce_rl.errors import StoppedEarly
from reinforce_rl.utils.process import STOP_SIGNALS, active_stop_signals

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

T = TypeVar("T")


class StopNow(BaseException):
    """Raised by a signal while there is nothing to save. A BaseException, so `except Exception` does not catch it."""


def ignore_stop_signals() -> None:
    """Ignore them while this process ends; from the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Whether this rank was asked to stop; never, unless created by `on_signals`."""

    def __init__(self) -> None:
        self.reason: str | None = None  # who asked; None if nobody has
        self._listens = False
        self._raises = False
        self._relayed: str | None = None

    @classmethod
    def on_signals(cls) -> StopRequest:
        """Listen to `STOP_SIGNALS` until this process ends; from the main thread.

        Until `wait_for_checks`, a signal raises `StopNow`, as there is nothing to save.
        """
        request = cls()
        request._listens = request._raises = True
        for number in active_stop_signals():
            signal.signal(number, request._on_signal)
        # Python restores default handlers during shutdown. A late signal would then turn the exit code of a saved run
        # into that of a killed one.
        atexit.register(ignore_stop_signals)
        return request

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = self.reason is None
        self.reason = self.reason or self._relayed or signal.Signals(number).name
        if first and self._raises:
            raise StopNow

    def relay(self, reason: str) -> None:
        """Pass on a request made to another rank; from any thread."""
        if self._listens and self.reason is None:
            self._relayed = reason
            os.kill(os.getpid(), signal.SIGUSR1)  # interrupt the main thread as its own signal would

    def wait_for_checks(self) -> None:
        """Let signals take effect at the next `check` from now on."""
        self._raises = False

    def unless_asked(self, action: Callable[[], T]) -> T | None:
        """Return the result of `action`; None if this rank is asked to stop before it or during it (interrupts it)."""
        try:
            self._raises = self._listens
            return None if self.reason is not None else action()
        except StopNow:
            return None
        finally:
            self._raises = False

    def asked_of_block(self, mesh: Mesh) -> bool:
        """Return whether this block's first rank was asked; called by, and equal on, all ranks of the block."""
        asked = self.reason is not None
        return asked if mesh.dp_size == mesh.world_size else mesh.from_block_leader(asked)

    def check(self, mesh: Mesh) -> None:
        """Stop all ranks if one was asked; collective.

        Raises:
            StoppedEarly: naming the signal.
        """
        if mesh.any_rank(self.reason is not None):
            raise StoppedEarly(f"stopped by {self.reason or 'a signal to another rank'}")
