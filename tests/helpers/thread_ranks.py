"""Data-parallel ranks as threads, for functions that take a collective as an argument."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
DEADLINE = 60.0  # seconds until a waiting rank gives up


def gathering_ranks(
    count: int, function: Callable[[int, Callable[[Any], list[Any]]], T]
) -> list[T]:
    """Call `function(rank, gather)` on each rank and return the results.

    `gather` returns the values of all ranks. If a rank skips a call, the test fails instead of
    hanging.
    """
    parts: list[Any] = [None] * count
    barrier = threading.Barrier(count, timeout=DEADLINE)

    def run(rank: int) -> T:
        def gather(value: Any) -> list[Any]:
            parts[rank] = value
            barrier.wait()
            gathered = list(parts)
            barrier.wait()
            return gathered

        try:
            return function(rank, gather)
        except Exception:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def on_ranks(count: int, function: Callable[[int, Callable[[Tensor], Tensor]], T]) -> list[T]:
    """Call `function(rank, total)` on each rank and return the results; `total` sums over ranks."""
    return gathering_ranks(
        count,
        lambda rank, gather: function(
            rank, lambda local_tensor: torch.stack(gather(local_tensor)).sum(0)
        ),
    )
