"""Progress of the scorer in a shared file, which other processes can read while the scorer is busy or stuck.

The file holds float64 numbers, mapped by one writer and any readers. Aligned, so that reads never see half a number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reinforce_rl.rewards import base

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BUSY, _BEAT, _BATCHES, _REQUESTS, _TOKENS, _SECONDS, _STATUS = range(7)
_BUCKETS = _STATUS + len(base.STATUS_TEXT)
_SIZE = _BUCKETS + len(SECONDS_BOUNDS) + 1


@dataclass(frozen=True)
class Snapshot:
    """Counts since the start, including the server's own one-token samples."""

    busy: bool  # a batch is being scored
    quiet_seconds: float  # since the last begin, beat or end
    batches: int
    requests: int
    tokens: int
    seconds: float  # spent in the scorer
    by_status: tuple[int, ...]  # samples, indexed by STATUS_ constant
    seconds_buckets: tuple[int, ...]  # batches per bin of SECONDS_BOUNDS, plus overflow; not cumulative

    @property
    def samples(self) -> int:
        return sum(self.by_status)

    @property
    def failed(self) -> int:
        """Samples without a reward."""
        return self.samples - self.by_status[base.STATUS_OK]

    def why_stuck(self, seconds: float) -> str | None:
        """Return an error text if one call has lasted longer than `seconds`, else None."""
        if not self.busy or self.quiet_seconds <= seconds:
            return None
        return (
            f"the model has been in one call for {self.quiet_seconds:.0f} s (inference.stuck_seconds is {seconds:g})"
        )


class Progress:
    """The scorer's counters in a file, written by the process that sets `create`; without a path, for itself only."""

    def __init__(self, path: Path | None = None, *, create: bool = False):
        self._writing = threading.Lock()
        if path is None:
            self._values = np.zeros(_SIZE)
        else:
            self._values = np.memmap(path, np.float64, "w+" if create else "r", shape=(_SIZE,))
        if create or path is None:
            self.beat()

    def begin(self) -> None:
        self.beat()
        with self._writing:
            self._values[_BUSY] += 1

    def beat(self) -> None:
        """Mark that part of a batch was finished."""
        self._values[_BEAT] = time.monotonic()  # one clock for all processes of a machine

    def count(self, requests: int, by_status: Mapping[int, int], tokens: int, seconds: float) -> None:
        """Count a scored batch; `by_status` are samples by STATUS_ constant, `tokens` those that the model saw."""
        values = self._values
        with self._writing:
            values[[_BATCHES, _REQUESTS, _TOKENS, _SECONDS]] += 1, requests, tokens, seconds
            for status, samples in by_status.items():
                values[_STATUS + status] += samples
            values[_BUCKETS + int(np.searchsorted(SECONDS_BOUNDS, seconds))] += 1

    def end(self) -> None:
        self.beat()
        with self._writing:
            self._values[_BUSY] -= 1

    def read(self) -> Snapshot:
        values = self._values.tolist()
        return Snapshot(
            busy=values[_BUSY] > 0,
            quiet_seconds=max(0.0, time.monotonic() - values[_BEAT]),
            batches=int(values[_BATCHES]),
            requests=int(values[_REQUESTS]),
            tokens=int(values[_TOKENS]),
            seconds=values[_SECONDS],
            by_status=tuple(int(value) for value in values[_STATUS:_BUCKETS]),
            seconds_buckets=tuple(int(value) for value in values[_BUCKETS:]),
        )
