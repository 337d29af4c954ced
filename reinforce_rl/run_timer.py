"""How much of the allowed time is left, counted from the start of the process."""

from __future__ import annotations

import re
import time

import psutil


def parse_duration(text: str) -> float:
    """Seconds of `DD:HH:MM:SS`, NeMo's form; leading parts may be left out (`30:00` is half an hour).

    Raises:
        ValueError: not of that form, or zero.
    """
    if not re.fullmatch(r"\d+(:\d+){0,3}", text):
        raise ValueError("expected DD:HH:MM:SS, such as 00:03:45:00")
    seconds = 0
    for part, unit in zip(reversed(text.split(":")), (1, 60, 3600, 86400), strict=False):
        seconds += int(part) * unit
    if seconds == 0:
        raise ValueError("expected more than no time at all")
    return float(seconds)


class RunTimer:
    """Says when a run has used up its time.

    Args:
        max_seconds: from the start of this process, imports and loading included; None for no bound.
    """

    def __init__(self, max_seconds: float | None = None):
        self._max_seconds = max_seconds
        self._started = psutil.Process().create_time()

    def elapsed(self) -> float:
        """Seconds since the process started."""
        return time.time() - self._started

    def is_finished(self) -> bool:
        """True once the time is used up."""
        return self._max_seconds is not None and self.elapsed() >= self._max_seconds
