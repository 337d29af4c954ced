"""Where a thread is, seen from another one: at which line, whether it moves, and whether it waits for other ranks."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PACKAGE = Path(__file__).parent
# Files whose innermost calls are those that wait for other ranks.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/tensor_parallel/mappings.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/",
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
        return Place(text, any(part in innermost for part in _COLLECTIVES), self._still_since)


def _stack(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    """File and line of each frame, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
