"""Stop a run on SIGTERM, on SIGUSR1, or if its time is used up.

All ranks stop at the same point.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import psutil

from reinforce_rl.errors import AlertStop, StoppedEarly
from reinforce_rl.utils.job_time import JobTimes
from reinforce_rl.utils.process import STOP_SIGNALS, active_stop_signals
from reinforce_rl.utils.slurm_commands import END_VARIABLE

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

T = TypeVar("T")

# Reserved before the allocation's end: the launcher stops the reward server and requeues the job.
LAUNCHER_SECONDS = 60.0
# Margin on forecasts, and for shutdown after the save.
MARGIN_SHARE = 0.1
MARGIN_SECONDS = 10.0
RECENT_STEPS = 5
# Estimate for the first save: a slow shared file system.
BYTES_A_SECOND = 100e6
FIXED_SECONDS = 5.0


class StopNow(BaseException):
    """Raised by a signal while there is nothing to save.

    A BaseException: `except Exception` must not catch it.
    """


def ignore_stop_signals() -> None:
    """Ignore `STOP_SIGNALS` while this process ends; call on the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Whether this rank was asked to stop; only `on_signals` makes one that listens."""

    def __init__(self) -> None:
        self.reason: str | None = None  # source of the request; None without a request
        self._listens = False
        self._raises = False
        self._relayed: str | None = None

    @classmethod
    def on_signals(cls) -> StopRequest:
        """Listen to `STOP_SIGNALS`; call on the main thread.

        A signal raises `StopNow` until `wait_for_checks`.
        """
        request = cls()
        request._listens = True
        request._raises = True
        for number in active_stop_signals():
            signal.signal(number, request._on_signal)
        # Python restores default handlers during shutdown, and a late signal would then change the
        # exit code of a saved run.
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
            # Interrupt the main thread, as a signal to this process would.
            os.kill(os.getpid(), signal.SIGUSR1)

    def wait_for_checks(self) -> None:
        """Let signals take effect at the next `check` from now on."""
        self._raises = False

    def run_interruptible(self, action: Callable[[], T]) -> T | None:
        """Return the result of `action`; None if this rank is asked to stop.

        A request during `action` interrupts it.
        """
        try:
            self._raises = self._listens
            return None if self.reason is not None else action()
        except StopNow:
            return None
        finally:
            self._raises = False

    def asked_of_block(self, mesh: Mesh) -> bool:
        """Return, on all ranks of the block, whether its first rank was asked; collective."""
        asked = self.reason is not None
        return asked if mesh.dp_size == mesh.world_size else mesh.from_model_parallel_rank_0(asked)

    def check(self, mesh: Mesh, verdict: str | None = None) -> None:
        """Raise StoppedEarly, with the signal, on all ranks if a rank was asked; collective.

        `verdict`, on the first rank, describes the alert that stops the run; it raises AlertStop.
        """
        if mesh.any_rank(self.reason is not None or verdict is not None):
            verdict = mesh.from_main(verdict)
            if verdict is not None:
                raise AlertStop(verdict, key="run.stop.by_alert")
            who = self.reason or "a signal to another rank"
            raise StoppedEarly(f"stopped by {who}", key="run.stop.by_signal")


@dataclass(frozen=True)
class TimeBudget:
    """Whether further work fits into a run's remaining time."""

    shortage: str | None = None  # why no further step fits; None if it fits
    validates: bool = True  # a validation and the save after it fit


class RunTimer:
    """Decides when a run must end to save its state in time.

    `max_seconds` count from the allocation's start if known, otherwise from this process's start;
    None for no bound. The allocation's end is a bound, too. `save_seconds` is an estimate until a
    save was measured.
    """

    def __init__(
        self, max_seconds: float | None, times: JobTimes, save_seconds: float = FIXED_SECONDS
    ):
        started = times.start
        since = "the allocation's start"
        if started is None:
            started = psutil.Process().create_time()
            since = "the process's start"
        bounds = [(float("inf"), "")]
        if max_seconds is not None:
            bounds.append(
                (started + max_seconds, f"exp_manager.max_time_per_run, counted from {since}")
            )
        if times.end is not None:
            bound = f"{END_VARIABLE}, less {LAUNCHER_SECONDS:.0f} s for the launcher"
            bounds.append((times.end - LAUNCHER_SECONDS, bound))
        self._deadline, self._bound = min(bounds)
        self._save_seconds = save_seconds
        self._validation_seconds: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step_began: float | None = None

    def seconds_left(self) -> float:
        """Return seconds until the run must have ended; infinite without a bound."""
        return self._deadline - time.time()

    def begin_step(self) -> None:
        self._step_began = time.time()

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Measure the block as a validation; ignored if it raises."""
        began = time.time()
        yield
        self._validation_seconds = time.time() - began

    def saved(self, seconds: float) -> None:
        self._save_seconds = seconds

    def time_budget(
        self,
        *,
        validation: bool = False,  # due before that step
        validation_after: bool = False,  # due after that step
        save: bool = False,  # due before that step
        running_save: bool = False,  # one is being written in the background
    ) -> TimeBudget:
        """Return whether a further step and the save after it fit.

        A step takes as long as the longest of the last `RECENT_STEPS`. The first step of a process
        begins whenever a save fits.
        """
        if self._step_began is not None:
            self._steps.append(time.time() - self._step_began)
            self._step_began = None
        left = self.seconds_left()
        step_seconds = max(self._steps, default=0.0)
        save_seconds = self._save_seconds
        validation_seconds = self._validation_seconds
        if validation_seconds is None:
            validation_seconds = step_seconds
        validations = validation + validation_after
        saves = 1 + save + running_save
        needed = step_seconds + validations * validation_seconds + saves * save_seconds
        if with_margin(needed) <= left:
            return TimeBudget()
        parts = []
        if self._steps:
            parts.append(f"a step {step_seconds:.1f} s")
        if validations:
            parts.append(f"a validation {validation_seconds:.1f} s")
        parts.append(f"a save {save_seconds:.1f} s")
        shortage = (
            f"the time limit of this run is reached ({max(left, 0.0):.1f} s are left by "
            f"{self._bound}; {', '.join(parts)}, and with a margin the remaining work takes "
            f"{with_margin(needed):.1f} s)"
        )
        # An unmeasured validation counts as a step, whose time may be unknown, too.
        is_known = self._validation_seconds is not None or bool(self._steps)
        end_seconds = validation_seconds + (1 + running_save) * save_seconds
        return TimeBudget(shortage, validates=is_known and with_margin(end_seconds) <= left)


def with_margin(seconds: float) -> float:
    return (1 + MARGIN_SHARE) * seconds + MARGIN_SECONDS


def first_save_seconds(num_bytes: float) -> float:
    """Return a conservative estimate of the first save's seconds from its bytes."""
    return FIXED_SECONDS + num_bytes / BYTES_A_SECOND
