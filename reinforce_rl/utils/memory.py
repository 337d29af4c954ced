"""The most memory that each phase of a step took."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
RESET_PEAK = "5"  # what the kernel takes as "forget the peak of the resident set" (man 5 proc)


class PeakMemory:
    """The peak since `start`: of the device's memory on CUDA, else of this process's resident set.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def start(self) -> None:
        """Forget what was before."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        # Not Linux, or not allowed here: the peak is then that of the whole run so far.
        with contextlib.suppress(OSError):
            _CLEAR.write_text(RESET_PEAK)

    def gigabytes(self) -> float:
        """The peak in 10^9 bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / 1e9
        try:
            line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
            return int(line.split()[1]) * 1024 / 1e9
        except (OSError, StopIteration):
            return psutil.Process().memory_info().rss / 1e9
