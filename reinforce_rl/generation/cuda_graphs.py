"""A step as a CUDA graph: what the host would launch kernel by kernel, launched at once."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphedStep:
    """A step that is captured for each number of rows and replayed from then on.

    What the step keeps from one call to the next lies in tensors that were made before, and that it changes in place;
    nothing of it is decided on the host but by the number of rows. Graphs hold addresses of weights: they must not
    outlive a block in which no weight is moved.

    The first call with so many rows runs as it is, on the stream of the capture: libraries make what they need at
    their first call, which must not be within one.

    Args:
        step: takes the number of rows.
    """

    def __init__(self, step: Callable[[int], None]):
        self._step = step
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()  # of all graphs, which never run at a time

    def __call__(self, rows: int) -> None:
        if rows not in self._graphs:
            self._graphs[rows] = None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(rows)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        graph = self._graphs[rows]
        if graph is None:
            graph = self._graphs[rows] = torch.cuda.CUDAGraph()
            # Other threads may call CUDA meanwhile, as NCCL's watchdog does.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                self._step(rows)
        graph.replay()
