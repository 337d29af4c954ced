"""What this rank is doing, told once and heard by all who want to know: display, timers, memory, faults."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from reinforce_rl.runtime.stack import WaitMeter
from reinforce_rl.utils.memory import PeakMemory


@dataclass(frozen=True)
class Phase:
    """A part of the run.

    Attributes:
        name: for people.
        step: that is being worked on, 1 for the first; 0 before it.
        number: of the phases so far. Every rank goes through the same ones in the same order.
        since: `time.monotonic` of its beginning.
        has_deadline: it waits for another program, and gives up by itself.
    """

    name: str
    step: int
    number: int
    since: float
    has_deadline: bool = False


class Activity:
    """The phase that this rank is in. Told by one thread, read by any."""

    def __init__(self) -> None:
        self.phase = Phase("start", 0, 0, time.monotonic())
        self._step = 0
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> None:
        """Have each new phase's name told to `listener`."""
        self._listeners.append(listener)

    def at_step(self, step: int) -> None:
        """The phases from now on belong to this step."""
        self._step = step

    def begin(self, name: str, *, has_deadline: bool = False) -> None:
        """A phase begins, and ends the one before it."""
        self.phase = Phase(name, self._step, self.phase.number + 1, time.monotonic(), has_deadline)
        for listener in self._listeners:
            listener(name)


class StepClock:
    """Seconds and the peak of memory of each phase of the present step, on this rank.

    Args:
        activity: hears of the phases.
        device: whose memory is looked at.
        among_ranks: measure how long this thread waits for other ranks.

    Attributes:
        seconds, own_seconds, gigabytes: by phase, `own_seconds` less what was seen of waits for other ranks. A phase
            that comes again adds its seconds, and keeps the higher peak.
    """

    def __init__(self, activity: Activity, device: torch.device, *, among_ranks: bool = False):
        self._activity = activity
        self._waits = WaitMeter(threading.get_ident()) if among_ranks else None
        self._memory = PeakMemory(device)
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.own_seconds: dict[str, float] = {}
        self.gigabytes: dict[str, float] = {}

    def start(self, step: int) -> None:
        """A step begins."""
        self._activity.at_step(step)
        self._started = time.perf_counter()
        self.seconds, self.own_seconds, self.gigabytes = {}, {}, {}

    @contextlib.contextmanager
    def phase(self, name: str, *, has_deadline: bool = False) -> Iterator[None]:
        """The block is a phase of the step."""
        self._activity.begin(name, has_deadline=has_deadline)
        self._memory.start()
        started = time.perf_counter()
        with contextlib.nullcontext() if self._waits is None else self._waits.measuring():
            yield
        seconds = time.perf_counter() - started
        own = seconds - (0.0 if self._waits is None else self._waits.seconds)
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.own_seconds[name] = self.own_seconds.get(name, 0.0) + max(own, 0.0)
        self.gigabytes[name] = max(self.gigabytes.get(name, 0.0), self._memory.gigabytes())

    def stop(self) -> None:
        """The step ends: its whole time is `step_time`."""
        self.seconds["step_time"] = time.perf_counter() - self._started
