"""Memory bandwidth and matrix rate of this machine, as torch reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rloo_step.floors import BYTES, Machine

# Far above any cache, and a matrix that fills the cores: rates that a model can hardly exceed.
READ_COLUMNS = 16384
MATRIX_SIZE = 2048


def measure(
    threads: int, *, gigabytes: float = 1.0, matrix_size: int = MATRIX_SIZE, repeats: int = 5
) -> Machine:
    """The best of several tries: other programs only ever slow one down.

    Args:
        threads: of torch.
        gigabytes: that are read at a time.
        matrix_size: rows and columns of the matrices.
        repeats: tries.
    """
    torch.set_num_threads(threads)
    rows = max(int(gigabytes * 1e9 / BYTES / READ_COLUMNS), 1)
    data, vector = torch.ones(rows, READ_COLUMNS), torch.ones(READ_COLUMNS)
    # A decode step is matrices by a few vectors; a plain sum is there for a BLAS whose such product
    # is slow.
    reading = min(_best(lambda: data @ vector, repeats), _best(data.sum, repeats))
    rate = matrix_rate(torch.device("cpu"), torch.float32, matrix_size=matrix_size, repeats=repeats)
    return Machine(bandwidth=data.numel() * BYTES / reading, flops=rate)


def matrix_rate(
    device: torch.device, dtype: torch.dtype, *, matrix_size: int, repeats: int = 5
) -> float:
    """Floating-point operations a second of a large matrix product, the best of several tries."""
    shape = matrix_size, matrix_size
    left, right = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=out)
        synchronize(device)

    return 2 * matrix_size**3 / _best(multiply, repeats)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has done so when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _best(work: Callable[[], object], repeats: int) -> float:
    work()  # memory is touched and threads are started
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
