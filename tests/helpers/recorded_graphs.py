"""CUDA graphs on a CPU: record kernels with their tensors, replay them on the same memory.

As on a GPU, capture changes no tensor, forbids transfers to the host and freezes Python's
decisions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Operators that synchronise host and device. `torch.tensor` of a list ends with `lift_fresh`.
_FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "lift_fresh")


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.replays = 0
        self.kernels: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self.kernels:
            leaves = tree_leaves(function(*args, **kwargs))
            for old, new in zip(results, (x for x in leaves if isinstance(x, Tensor)), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither in place nor a view
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph):
        super().__init__()
        self._graph = graph
        self._before = dict[int, tuple[Tensor, Tensor]]()
        self._fresh = dict[int, Tensor]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.split("::")[1]
        if name in _FORBIDDEN:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        kwargs = kwargs or {}
        given = [*zip(function._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in function._schema.arguments if a.name in kwargs]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map_only(Tensor, self._keep, value)
        output = function(*args, **kwargs)
        results = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        known = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        for result in results:
            if result.untyped_storage().data_ptr() not in known:
                # kept alive, or its address would be reused
                self._fresh[result.untyped_storage().data_ptr()] = result
        self._graph.kernels.append((function, args, kwargs, results))
        return output

    def _keep(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage().data_ptr()
        if key not in self._before and key not in self._fresh:
            storage: Any = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            self._before[key] = whole, whole.clone()

    def restore(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)


def stand_in() -> SimpleNamespace:
    """Return a substitute for `torch.cuda`; `graphs` holds the captured graphs."""
    graphs: list[Graph] = []

    def new_graph() -> Graph:
        graphs.append(Graph())
        return graphs[-1]

    @contextlib.contextmanager
    def capture(graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        recorder = _Recorder(graph)
        with recorder:
            yield
        recorder.restore()

    stream = SimpleNamespace(wait_stream=lambda _: None)
    return SimpleNamespace(
        graphs=graphs,
        CUDAGraph=new_graph,
        graph=capture,
        graph_pool_handle=lambda: (0, 1),
        Stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        current_stream=lambda: stream,
    )
