"""Capture a decode step as a CUDA graph, so that the host launches it once instead of kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphedStep:
    """Capture a step, which takes the number of rows, once per number of rows; then replay it.

    The step must update preallocated tensors in place and branch on the host by the number of rows only. Graphs hold
    weight addresses, so weights must not move.
    """

    def __init__(self, step: Callable[[int], None]):
        self._step = step
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()  # shared, since graphs never run concurrently

    def __call__(self, rows: int) -> None:
        if rows not in self._graphs:
            # Warm up on the capture stream: libraries allocate workspaces at their first call, illegal in a capture.
            self._graphs[rows] = None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(rows)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        graph = self._graphs[rows]
        if graph is None:
            graph = self._graphs[rows] = torch.cuda.CUDAGraph()
            # thread_local, as NCCL's watchdog thread calls CUDA during the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._step(rows)
        graph.replay()
