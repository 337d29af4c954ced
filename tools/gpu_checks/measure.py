"""Time and peak memory of a piece of work, and what happens if it takes too much memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import psutil
import torch
from rloo_step.rates import synchronize

from gpu_checks.workload import OURS, PLAIN
from reinforce_rl.runtime.phases import PeakMemory

# of CUDA, a CPU's allocator, cuBLAS
_OUT_OF_MEMORY = "out of memory", "can't allocate memory", "ALLOC_FAILED"


@dataclass(frozen=True)
class Sample:
    """One repetition.

    Attributes:
        seconds: it took.
        gigabytes: of the device at its peak, in 10^9 bytes, what lay there before included; on a
            CPU the process's.
        parts: seconds of its parts, where it has any.
    """

    seconds: float
    gigabytes: float
    parts: dict[str, float] = field(default_factory=dict)


class Side(Protocol):
    """A model on the device, and what can be done with it."""

    def run(self, phase: str) -> dict[str, float]:
        """Do it once; seconds of its parts, where it has any."""
        ...


@dataclass(frozen=True)
class Builder:
    """How a side is made.

    Attributes:
        name: of the side.
        phases: that it can run, in this order.
        least_bytes: what lies on the device in a phase all the time.
        build: makes it.
    """

    name: str
    phases: Sequence[str]
    least_bytes: Callable[[str], int]
    build: Callable[[], Side]


@dataclass
class Results:
    """Of one shape.

    Attributes:
        samples: of each side and phase, one a round.
        skipped: of each side and phase that did not fit, why.
    """

    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    skipped: dict[tuple[str, str], str] = field(default_factory=dict)

    def median(self, side: str, phase: str) -> float | None:
        """Seconds; None where there are no samples."""
        samples = self.samples.get((side, phase))
        return statistics.median(sample.seconds for sample in samples) if samples else None

    def gigabytes(self, side: str, phase: str) -> float | None:
        """The highest peak; None where there are no samples."""
        samples = self.samples.get((side, phase))
        return max(sample.gigabytes for sample in samples) if samples else None

    def speedup(self, phase: str) -> float | None:
        """The plain side's seconds over ours, the median over rounds; None without samples."""
        # A side that did not fit has no samples.
        both = [self.samples.get((side, phase), []) for side in (PLAIN, OURS)]
        ratios = [plain.seconds / ours.seconds for plain, ours in zip(*both, strict=False)]
        return statistics.median(ratios) if ratios else None


def measure(builders: Sequence[Builder], repeats: int, device: torch.device) -> Results:
    """Rounds in which the sides take turns.

    Each is built, runs its phases, and is gone before the other comes.

    Args:
        builders: of the sides.
        repeats: rounds.
        device: they run on.
    """
    results = Results()
    free(device)
    for builder in builders:
        for phase in builder.phases:
            least = builder.least_bytes(phase) / 1e9
            free_now = free_bytes(device) / 1e9
            if least > free_now:
                reason = f"takes {least:.1f} GB at least, {free_now:.1f} GB are free"
                results.skipped[builder.name, phase] = reason
    for number in range(repeats):
        for builder in builders if number % 2 == 0 else reversed(builders):
            left = list(builder.phases)
            while left := [phase for phase in left if (builder.name, phase) not in results.skipped]:
                left = _visit(builder, left, results, device)
                free(device)
    return results


def _visit(
    builder: Builder,
    phases: Sequence[str],
    results: Results,
    device: torch.device,
) -> list[str]:
    """Run the phases in order; return the remaining phases when one does not fit.

    They need a new side.
    """
    phase = phases[0]
    try:
        side = builder.build()
        for phase in phases:
            side.run(phase)  # a warm-up: kernels are chosen and Adam's moments made in it
            results.samples.setdefault((builder.name, phase), []).append(timed(side, phase, device))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        results.skipped[builder.name, phase] = (str(error).splitlines() or ["out of memory"])[0]
        results.samples.pop((builder.name, phase), None)
        return list(phases[phases.index(phase) + 1 :])
    return []


def timed(side: Side, phase: str, device: torch.device) -> Sample:
    """Run a phase once, between two points at which the device has nothing left to do."""
    peak = PeakMemory(device)
    synchronize(device)
    peak.start()
    started = time.perf_counter()
    parts = side.run(phase)
    synchronize(device)
    return Sample(time.perf_counter() - started, peak.gigabytes(), parts)


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was too little memory, on a GPU or on a CPU."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(text in str(error) for text in _OUT_OF_MEMORY)


def free(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
