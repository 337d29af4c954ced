"""The current phase of this rank, time and memory of each phase, and where its main thread is."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import torch

from reinforce_rl.runtime.profiling import StepProfiler

PACKAGE = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.02  # between two samples of a `WaitMeter`
CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
RESET_PEAK = "5"  # written to clear_refs: forget the peak of the resident set (man 5 proc)
# Files in which an innermost frame means waiting for other ranks.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/tensor_parallel/mappings.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/param_and_grad_buffer.py",  # not its neighbours, which also compute
    "reinforce_rl/megatron/mesh.py",
)

_FRAMES_LOCK = threading.Lock()


@dataclass(frozen=True)
class Phase:
    name: str
    step: int  # current step, from 1; 0 before the first
    number: int  # phases so far; all ranks have the same phases in the same order
    since: float  # `time.monotonic` of its start
    has_deadline: bool = False  # it waits for another program, and has a timeout for this


class PhaseTracker:
    """Current phase of this rank; set by one thread, read by any."""

    def __init__(self) -> None:
        self.phase = Phase("start", 0, 0, time.monotonic())
        self.step = 0  # of the following phases
        self._listeners: list[Callable[[str], None]] = []

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each new phase."""
        self._listeners.append(listener)

    def begin(self, name: str, *, has_deadline: bool = False) -> None:
        """Begin a phase, which ends the previous one."""
        self.phase = Phase(name, self.step, self.phase.number + 1, time.monotonic(), has_deadline)
        for listener in self._listeners:
            listener(name)

    @contextlib.contextmanager
    def having_deadline(self) -> Iterator[None]:
        """Give the current phase a deadline during the block."""
        before = self.phase
        self.phase = replace(self.phase, has_deadline=True)
        try:
            yield
        finally:
            self.phase = before


class StepClock:
    """Measures seconds and peak memory of each phase of the current step.

    With `among_ranks` it measures waits for other ranks, too. `profiler` is started and stopped
    with each step.
    """

    def __init__(
        self,
        phases: PhaseTracker,
        device: torch.device,
        *,
        among_ranks: bool = False,
        profiler: StepProfiler | None = None,
    ):
        self._phases = phases
        self._profiler = profiler
        self._waits = WaitMeter(threading.get_ident()) if among_ranks else None
        self._memory = PeakMemory(device)
        self.start(0)

    def start(self, step: int) -> None:
        self._phases.step = step
        if self._profiler is not None:
            self._profiler.start(step)
        self._started = time.perf_counter()
        self.seconds: dict[str, float] = {}  # by phase; repeated phases add up
        self.own_seconds: dict[str, float] = {}  # less the measured waits for other ranks
        self.gigabytes: dict[str, float] = {}  # highest peak

    @contextlib.contextmanager
    def phase(self, name: str, *, has_deadline: bool = False) -> Iterator[None]:
        self._phases.begin(name, has_deadline=has_deadline)
        self._memory.start()
        started = time.perf_counter()
        nothing = contextlib.nullcontext()
        named = self._profiler.phase(name) if self._profiler else nothing
        with named, self._waits.measuring() if self._waits else nothing:
            yield
        seconds = time.perf_counter() - started
        busy = seconds - (self._waits.seconds if self._waits else 0.0)
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.own_seconds[name] = self.own_seconds.get(name, 0.0) + max(busy, 0.0)
        self.gigabytes[name] = max(self.gigabytes.get(name, 0.0), self._memory.gigabytes())

    def stop(self) -> None:
        """End the step; its total time is `step_time`."""
        self.seconds["step_time"] = time.perf_counter() - self._started
        if self._profiler is not None:
            self._phases.begin("profile")
            self._profiler.stop()


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory since `start`: device memory on CUDA, else this process's resident set."""

    device: torch.device

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        # If not on Linux or not permitted, the peak is the whole run's.
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text(RESET_PEAK, encoding="utf-8")

    def gigabytes(self) -> float:
        """Return the peak in 10^9 bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        try:
            line = next(
                line
                for line in STATUS.read_text(encoding="utf-8").splitlines()
                if line.startswith("VmHWM:")
            )
            return int(line.split()[1]) * 1024 / 1e9
        except (OSError, StopIteration):
            return psutil.Process().memory_info().rss / 1e9


@dataclass(frozen=True)
class StackLocation:
    line: str  # innermost file and line in this package; empty if none
    in_collective: bool  # the thread waits for other ranks
    still_since: float  # `time.monotonic` of the first sample with the same stack
    of_role: bool = False  # the thread waits for ranks of another role


class StackWatcher:
    """Tracks where a thread is; `thread` is its `threading.get_ident`."""

    def __init__(self, thread: int):
        self._thread = thread
        self._last: tuple[tuple[str, int], ...] = ()
        self._still_since = time.monotonic()

    def look(self) -> StackLocation:
        frame = _frame_of(self._thread)
        frames = [] if frame is None else list(traceback.walk_stack(frame))
        stack = tuple((inner.f_code.co_filename, line) for inner, line in frames)
        if stack != self._last:
            self._last = stack
            self._still_since = time.monotonic()
        codes = [inner.f_code for inner, _ in frames]
        text = ""
        for code, (_, line) in zip(codes, frames, strict=True):
            if _is_of_package(code) and code is not _ROLE_WAIT and code is not _RANKS_WAIT:
                text = f"{Path(code.co_filename).relative_to(PACKAGE)}:{line}"
                break
        of_role = _waits_for_role(codes)
        return StackLocation(text, of_role or _waits_for_ranks(codes), self._still_since, of_role)


@dataclass
class WaitMeter:
    """Measures how long a thread waits for other ranks.

    It samples the stack every `SAMPLE_SECONDS`, and does not see collectives that return before
    they are done, such as NCCL's.
    """

    thread: int  # its `threading.get_ident`
    seconds: float = 0.0  # in the last measured block; accurate to about `SAMPLE_SECONDS` per wait

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        self.seconds = 0.0
        done = threading.Event()
        sampler = threading.Thread(
            target=self._sample, args=(done,), name="wait meter", daemon=True
        )
        sampler.start()
        try:
            yield
        finally:
            done.set()
            sampler.join()

    def _sample(self, done: threading.Event) -> None:
        before = time.perf_counter()
        while not done.wait(SAMPLE_SECONDS):
            frame = _frame_of(self.thread)
            now = time.perf_counter()
            frames = [] if frame is None else traceback.walk_stack(frame)
            codes = [inner.f_code for inner, _ in frames]
            if _waits_for_ranks(codes) or _waits_for_role(codes):
                self.seconds += now - before
            before = now


def wait_for_role(
    changed: threading.Condition,
    seconds: float,
    condition: Callable[[], bool] | None = None,
) -> None:
    """Wait for ranks of another role: until `changed` is notified, or `condition` holds."""
    if condition is None:
        changed.wait(seconds)
    else:
        changed.wait_for(condition, seconds)


def wait_for_ranks(work: Any) -> None:
    """Wait for other ranks: until torch's `Work` is done."""
    work.wait()


# A stack shows these functions, so a thread need not record its waits.
_ROLE_WAIT = wait_for_role.__code__
_RANKS_WAIT = wait_for_ranks.__code__


def _frame_of(thread: int) -> FrameType | None:
    # A garbage collection within _current_frames can run Python code while CPython holds its lock
    # on the list of threads, which deadlocks the process (CPython issue 106883).
    with _FRAMES_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if was_enabled:
                gc.enable()


def _waits_for_role(codes: Sequence[CodeType]) -> bool:
    """Return True if a thread with this stack, innermost first, waits for another role."""
    return next(filter(_is_of_package, codes), None) is _ROLE_WAIT


def _waits_for_ranks(codes: Sequence[CodeType]) -> bool:
    if not codes:
        return False
    file = codes[0].co_filename
    return codes[0] is _RANKS_WAIT or any(part in file for part in _COLLECTIVES)


def _is_of_package(code: CodeType) -> bool:
    return Path(code.co_filename).is_relative_to(PACKAGE)
