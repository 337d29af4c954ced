"""What a check is given, and what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PASS = "PASS"
FAIL = "FAIL"
SKIP = "SKIP"
# a GPU; real numbers on a CPU; fake CUDA tensors, without numbers
CUDA = "cuda"
CPU = "cpu"
FAKE = "fake"


@dataclass(frozen=True)
class Context:
    """Where a check runs.

    Attributes:
        mode: CUDA, CPU or FAKE.
        folder: of its own.
        deadline: the `time.time()` at which its process is ended.
        options: of the command line, by name; most checks have none.
    """

    mode: str
    folder: Path
    deadline: float
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """As torch calls it."""
        return "cpu" if self.mode == CPU else "cuda"

    def left(self) -> float:
        """Seconds until the process is ended."""
        return self.deadline - time.time()


@dataclass
class Finding:
    """Result of a check: verdict, why, and JSON values by name, of which a list of dicts becomes a table."""

    verdict: str
    sentence: str
    numbers: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


def judged(faults: Sequence[str], sentence: str, numbers: dict[str, Any]) -> Finding:
    """FAIL with the faults where there are any, else PASS with the sentence."""
    return Finding(FAIL, "; ".join(faults), numbers) if faults else Finding(PASS, sentence, numbers)


def best_seconds(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Seconds of the fastest of several calls, after one that does not count."""
    import torch
    from rloo_step.rates import synchronize

    seconds = []
    for _ in range(repeats + 1):
        synchronize(torch.device(device))
        started = time.perf_counter()
        work()
        synchronize(torch.device(device))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
