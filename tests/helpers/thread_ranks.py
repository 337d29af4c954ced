"""Data-parallel ranks as threads, for functions that take an all-reduce as an argument."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
DEADLINE = 60.0  # seconds, after which a rank that waits for the others gives up


def on_ranks(count: int, function: Callable[[int, Callable[[Tensor], Tensor]], T]) -> list[T]:
    """Return `function(rank, total)` of each rank, where `total` sums over ranks.

    A call of `total` that a rank skips fails instead of hanging.
    """
    parts: list[Tensor] = [torch.zeros(0)] * count
    barrier = threading.Barrier(count, timeout=DEADLINE)

    def run(rank: int) -> T:
        def total(own: Tensor) -> Tensor:
            parts[rank] = own
            barrier.wait()
            found = torch.stack(parts).sum(0)
            barrier.wait()
            return found

        try:
            return function(rank, total)
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
