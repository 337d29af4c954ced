"""Where a thread is, seen from another one: at which line, whether it moves, and whether it waits for other ranks."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parents[1]
LOOK_SECONDS = 0.02  # between two looks of a `WaitMeter`
# Files whose innermost calls are those that wait for other ranks.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/tensor_parallel/mappings.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/param_and_grad_buffer.py",  # not its neighbours, which add up gradients themselves
    "reinforce_rl/megatron/mesh.py",
)


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
        line: file and line of this package, the innermost; empty where there is none.
        in_collective: it waits for other ranks.
        still_since: `time.monotonic` of the first of the looks that all found it there.
    """

    line: str
    in_collective: bool
    still_since: float


class PlaceWatcher:
    """Looks at a thread now and then.

    Args:
        thread: its id, as of `threading.get_ident`.
    """

    def __init__(self, thread: int):
        self._thread = thread
        self._last: tuple[tuple[str, int], ...] = ()
        self._still_since = time.monotonic()

    def look(self) -> Place:
        """The thread's place now."""
        stack = _stack(sys._current_frames().get(self._thread))
        if stack != self._last:
            self._last, self._still_since = stack, time.monotonic()
        innermost = stack[0][0] if stack else ""
        own = next(((file, line) for file, line in stack if Path(file).is_relative_to(PACKAGE)), None)
        text = f"{Path(own[0]).relative_to(PACKAGE)}:{own[1]}" if own else ""
        return Place(text, _waits_for_ranks(innermost), self._still_since)


class WaitMeter:
    """How long a thread waits for other ranks, by a look at it every few milliseconds.

    Collectives that return before they are done, as NCCL's do, are not seen.

    Args:
        thread: its id, as of `threading.get_ident`.

    Attributes:
        seconds: of the last block that was measured; right to about `LOOK_SECONDS` a wait.
    """

    def __init__(self, thread: int):
        self._thread = thread
        self.seconds = 0.0

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Around what the thread does."""
        self.seconds = 0.0
        done = threading.Event()
        looks = threading.Thread(target=self._look, args=(done,), name="wait meter", daemon=True)
        looks.start()
        try:
            yield
        finally:
            done.set()
            looks.join()

    def _look(self, done: threading.Event) -> None:
        before = time.perf_counter()
        while not done.wait(LOOK_SECONDS):
            frame, now = sys._current_frames().get(self._thread), time.perf_counter()
            if frame is not None and _waits_for_ranks(frame.f_code.co_filename):
                self.seconds += now - before
            before = now


def _waits_for_ranks(file: str) -> bool:
    return any(part in file for part in _COLLECTIVES)


def _stack(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    """File and line of each frame, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
