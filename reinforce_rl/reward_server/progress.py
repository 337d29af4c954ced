"""What the scorer has done and is doing, for another process to read while the scorer is busy or stuck.

It is a small file of float64 numbers that both processes map. One process writes; each number is aligned, so that a
reader sees it before or after a change, and never half of one. A float64 counts exactly up to 2^53.
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
    """Counts since the start, the server's own samples of one token included.

    Attributes:
        busy: a batch is being scored.
        quiet_seconds: since the scorer was last seen to begin or to end something.
        batches, requests, tokens: scored.
        seconds: in the scorer.
        by_status: samples by STATUS_ constant.
        seconds_buckets: batches by SECONDS_BOUNDS, and those above the last; not cumulative.
    """

    busy: bool
    quiet_seconds: float
    batches: int
    requests: int
    tokens: int
    seconds: float
    by_status: tuple[int, ...]
    seconds_buckets: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.by_status)

    @property
    def failed(self) -> int:
        """Samples without a reward."""
        return self.samples - self.by_status[base.STATUS_OK]

    def why_stuck(self, seconds: float) -> str | None:
        """What to say where one call has lasted for longer than that; None where none has."""
        if not self.busy or self.quiet_seconds <= seconds:
            return None
        return (
            f"the model has been in one call for {self.quiet_seconds:.0f} s (inference.stuck_seconds is {seconds:g})"
        )


class Progress:
    """The counts, of one process that writes and any that read.

    Args:
        path: of the file; None for counts of this process alone.
        create: make the file and be its writer; else read it.
    """

    def __init__(self, path: Path | None = None, *, create: bool = False):
        self._writing = threading.Lock()
        if path is None:
            self._values = np.zeros(_SIZE)
        else:
            self._values = np.memmap(path, np.float64, "w+" if create else "r", shape=(_SIZE,))
        if create or path is None:
            self.beat()

    def begin(self) -> None:
        """A batch begins."""
        self.beat()
        with self._writing:
            self._values[_BUSY] += 1

    def beat(self) -> None:
        """Something of a batch was finished."""
        self._values[_BEAT] = time.monotonic()  # one clock for all processes of a machine

    def count(self, requests: int, by_status: Mapping[int, int], tokens: int, seconds: float) -> None:
        """A batch has been scored.

        Args:
            requests: in the batch.
            by_status: samples by STATUS_ constant.
            tokens: of the samples that the model saw.
            seconds: that it took.
        """
        values = self._values
        with self._writing:
            values[[_BATCHES, _REQUESTS, _TOKENS, _SECONDS]] += 1, requests, tokens, seconds
            for status, samples in by_status.items():
                values[_STATUS + status] += samples
            values[_BUCKETS + int(np.searchsorted(SECONDS_BOUNDS, seconds))] += 1

    def end(self) -> None:
        """A batch is over, in whatever way."""
        self.beat()
        with self._writing:
            self._values[_BUSY] -= 1

    def read(self) -> Snapshot:
        """As things are now."""
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
