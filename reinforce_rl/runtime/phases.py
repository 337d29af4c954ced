"""The current phase of this rank, time and memory of each phase, and where its main thread is."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil
import torch

from reinforce_rl.runtime.profiling import StepProfiler

PACKAGE = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.02  # between two samples of a `WaitMeter`
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # written to clear_refs: forget the peak of the resident set (man 5 proc)
# Files in which an innermost frame means waiting for other ranks.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "megatron/core/tensor_parallel/mappings.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/param_and_grad_buffer.py",  # not its neighbours, which also compute
    "reinforce_rl/megatron/mesh.py",
    "reinforce_rl/generation/weight_sync.py",
)

# Whose waits on a condition are for the ranks of another role.
_OF_ROLES = (
    "reinforce_rl/trainer/generator_pool.py",
    "reinforce_rl/trainer/generate.py",
    "reinforce_rl/trainer/separate.py",
)

_FRAMES_LOCK = threading.Lock()


@dataclass(frozen=True)
class Phase:
    name: str
    step: int  # current step, from 1; 0 before the first
    number: int  # phases so far; every rank goes through the same ones in the same order
    since: float  # `time.monotonic` of its start
    has_deadline: bool = False  # it waits for another program, with its own timeout


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
        """Let the current phase have a deadline during the block."""
        before, self.phase = self.phase, replace(self.phase, has_deadline=True)
        try:
            yield
        finally:
            self.phase = before


class StepClock:
    """Measures seconds and peak memory of each phase of the current step, and `among_ranks` the waits for others.

    `profiler` is started and stopped with each step.
    """

    def __init__(
        self,
        phases: PhaseTracker,
        device: torch.device,
        *,
        among_ranks: bool = False,
        profiler: StepProfiler | None = None,
    ):
        self._phases, self._profiler = phases, profiler
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
        own = seconds - (self._waits.seconds if self._waits else 0.0)
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.own_seconds[name] = self.own_seconds.get(name, 0.0) + max(own, 0.0)
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
        # Not Linux, or not permitted: the peak is then the whole run's.
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text(RESET_PEAK, encoding="utf-8")

    def gigabytes(self) -> float:
        """Return the peak in 10^9 bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        try:
            line = next(line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024 / 1e9
        except (OSError, StopIteration):
            return psutil.Process().memory_info().rss / 1e9


@dataclass(frozen=True)
class StackLocation:
    line: str  # innermost file and line in this package; empty if none
    in_collective: bool  # it waits for other ranks
    still_since: float  # `time.monotonic` of the first sample with the same stack
    of_role: bool = False  # it waits for ranks of another role


class StackWatcher:
    """Tracks where a thread is; `thread` is its `threading.get_ident`."""

    def __init__(self, thread: int):
        self._thread = thread
        self._last: tuple[tuple[str, int], ...] = ()
        self._still_since = time.monotonic()

    def look(self) -> StackLocation:
        frame = _frame_of(self._thread)
        walk = [] if frame is None else traceback.walk_stack(frame)
        stack = tuple((one.f_code.co_filename, line) for one, line in walk)
        if stack != self._last:
            self._last, self._still_since = stack, time.monotonic()
        innermost = stack[0][0] if stack else ""
        own = next(((file, line) for file, line in stack if Path(file).is_relative_to(PACKAGE)), None)
        text = f"{Path(own[0]).relative_to(PACKAGE)}:{own[1]}" if own else ""
        of_role = _waits_for_role(innermost, own[0] if own else "")
        return StackLocation(text, of_role or _waits_for_ranks(innermost), self._still_since, of_role)


@dataclass
class WaitMeter:
    """Measures how long a thread waits for other ranks, by sampling its stack every `SAMPLE_SECONDS`.

    Does not see collectives that return before they are done, such as NCCL's.
    """

    thread: int  # its `threading.get_ident`
    seconds: float = 0.0  # in the last measured block; accurate to about `SAMPLE_SECONDS` per wait

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        self.seconds = 0.0
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(done,), name="wait meter", daemon=True)
        sampler.start()
        try:
            yield
        finally:
            done.set()
            sampler.join()

    def _sample(self, done: threading.Event) -> None:
        before = time.perf_counter()
        while not done.wait(SAMPLE_SECONDS):
            frame, now = _frame_of(self.thread), time.perf_counter()
            if frame is not None and _waits(frame):
                self.seconds += now - before
            before = now


def _frame_of(thread: int) -> FrameType | None:
    # A garbage collection within _current_frames can run Python code while CPython holds its lock on the list of
    # threads, which deadlocks the process (CPython issue 106883).
    with _FRAMES_LOCK:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if was_enabled:
                gc.enable()


def _waits(frame: FrameType) -> bool:
    files = (one.f_code.co_filename for one, _ in traceback.walk_stack(frame))
    own = next((file for file in files if Path(file).is_relative_to(PACKAGE)), "")
    return _waits_for_ranks(frame.f_code.co_filename) or _waits_for_role(frame.f_code.co_filename, own)


def _waits_for_role(innermost: str, own: str) -> bool:
    """Whether a thread waits for ranks of another role; `own` is its innermost file of this package."""
    return own.endswith(_OF_ROLES) and innermost.endswith("/threading.py")


def _waits_for_ranks(file: str) -> bool:
    return any(part in file for part in _COLLECTIVES)
