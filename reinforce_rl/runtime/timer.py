"""Time left for a run, and whether the next step and save still fit."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from reinforce_rl.config.rules import END_VARIABLE, Allocation

# Reserved before the allocation's end for the launcher to stop the reward server and requeue the job.
LAUNCHER_SECONDS = 60.0
# Margin on forecasts, and for shutdown after the save.
MARGIN_SHARE, MARGIN_SECONDS = 0.1, 10.0
RECENT_STEPS = 5
# Estimate for the first save: a slow shared file system.
BYTES_A_SECOND, FIXED_SECONDS = 100e6, 5.0


@dataclass(frozen=True)
class Due:
    """Work due besides another step and the save at its end."""

    validation: bool = False  # before that step
    validation_after: bool = False  # after that step
    save: bool = False  # before that step
    running_save: bool = False  # one is being written in the background


@dataclass(frozen=True)
class Outlook:
    shortage: str | None = None  # why no step is begun; None if one fits
    validates: bool = True  # a validation and the save after it fit


class RunTimer:
    """Decides when a run must end so that its state is saved in time.

    Args:
        max_seconds: from the allocation's start if known, else from the start of this process, imports included; None
            for no bound.
        allocation: its end is a bound too.
        save_seconds: estimate until a save was measured.
    """

    def __init__(
        self,
        max_seconds: float | None = None,
        allocation: Allocation | None = None,
        save_seconds: float = FIXED_SECONDS,
    ):
        allocation = allocation or Allocation()
        known = allocation.start is not None
        self._started = allocation.start if allocation.start is not None else psutil.Process().create_time()
        since = "the allocation's start" if known else "the process's start"
        bounds = []
        if max_seconds is not None:
            bounds.append((self._started + max_seconds, f"exp_manager.max_time_per_run, counted from {since}"))
        if allocation.end is not None:
            bound = f"{END_VARIABLE}, less {LAUNCHER_SECONDS:.0f} s for the launcher"
            bounds.append((allocation.end - LAUNCHER_SECONDS, bound))
        self._deadline, self._bound = min(bounds, default=(float("inf"), ""))
        self._save_seconds = save_seconds
        self._validation_seconds: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._step_began: float | None = None

    def elapsed(self) -> float:
        """Return seconds since the start of the allocation, or of this process if unknown."""
        return time.time() - self._started

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

    def outlook(self, due: Due = Due()) -> Outlook:
        """Return whether another step and the save after it fit.

        A step is estimated by the longest of the last `RECENT_STEPS`; the first step of a process begins whenever a
        save fits.
        """
        if self._step_began is not None:
            self._steps.append(time.time() - self._step_began)
            self._step_began = None
        left, step, save = self.seconds_left(), max(self._steps, default=0.0), self._save_seconds
        validation = self._validation_seconds
        if validation is None:
            validation = step  # none measured yet
        validations, saves = due.validation + due.validation_after, 1 + due.save + due.running_save
        needed = step + validations * validation + saves * save
        if with_margin(needed) <= left:
            return Outlook()
        of_end = validation + (1 + due.running_save) * save
        known = self._validation_seconds is not None or bool(self._steps)
        parts = [f"a step {step:.1f} s"] if self._steps else []
        parts += [f"a validation {validation:.1f} s"] if validations else []
        return Outlook(
            f"the time of this run is used up ({max(left, 0.0):.1f} s are left by {self._bound}; "
            f"{', '.join([*parts, f'a save {save:.1f} s'])}, and with a margin all that is to come "
            f"{with_margin(needed):.1f} s)",
            validates=known and with_margin(of_end) <= left,
        )


def with_margin(seconds: float) -> float:
    return (1 + MARGIN_SHARE) * seconds + MARGIN_SECONDS


def first_save_seconds(num_bytes: float) -> float:
    """Return a conservative estimate of the first save's duration from its bytes."""
    return FIXED_SECONDS + num_bytes / BYTES_A_SECOND
