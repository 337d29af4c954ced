"""Fake `torch.distributed`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from helpers.fake_cuda.device import Idle
from helpers.fake_cuda.mode import Collective, FakeCuda
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"
from torch.utils._pytree import tree_leaves

# The arguments with a rank's part and with the whole, which may be one tensor.
_COLLECTIVES = {
    "all_reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "_all_gather_base": ("input_tensor", "output_tensor"),
    "reduce_scatter_tensor": ("output", "input"),
    "_reduce_scatter_base": ("output", "input"),
}
_KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
# The arguments with the peer: its global rank, its rank in the group.
_TO = ("dst", "group_dst")
_FROM = ("src", "group_src")
_EXCHANGES = {"send": _TO, "isend": _TO, "recv": _FROM, "irecv": _FROM}


class Network:
    """Replacements for functions of `torch.distributed`; public methods have their names.

    Calls are checked, recorded and answered at once, for one rank of an imagined job. The rank's
    data stand in for its peers' data: gathers repeat them, sums keep them. Objects reach ranks
    whose turn comes later, and all ranks if turns are repeated.
    """

    def __init__(self, gpu: FakeCuda):
        self._gpu = gpu
        self._backends: dict[Any, str] = {}
        # (group's ranks, number of the call) -> object by rank
        self.objects: dict[tuple[tuple[int, ...], int], dict[int, Any]] = {}
        self._object_calls: Counter[tuple[int, ...]] = Counter()

    def begin(self) -> None:
        self._object_calls.clear()

    def install(self) -> None:
        """Patch torch before megatron, which keeps references to some functions, is imported."""
        self._torch_new_group = dist.new_group
        self._torch_init = dist.init_process_group
        c10d: Any = dist.distributed_c10d
        names = [name for name in vars(Network) if name[0] != "_" and hasattr(c10d, name)]
        functions = {name: getattr(self, name) for name in names}
        functions |= {name: _with_torchs_arguments(name, self._collective) for name in _COLLECTIVES}
        functions |= {name: _with_torchs_arguments(name, self._exchange) for name in _EXCHANGES}
        for name, function in functions.items():
            setattr(dist, name, function)
            setattr(c10d, name, function)
        torch_rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
        torch_rendezvous.rendezvous = self.meet

    def meet(
        self,
        url: str,
        rank: int = -1,
        world_size: int = -1,
        **_: Any,
    ) -> Iterator[tuple[Any, int, int]]:
        """Return the rendezvous store without a socket; each imagined rank has a separate store."""
        yield torch.distributed.HashStore(), rank, world_size  # type: ignore[attr-defined]

    def init_process_group(
        self,
        backend: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        **_: Any,
    ) -> None:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self._torch_init("fake", rank=rank, world_size=world_size, store=store)
        self._backends = {dist.group.WORLD: backend or "cpu:gloo,cuda:nccl"}

    def new_group(
        self,
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        **_: Any,
    ) -> Any:
        group = self._torch_new_group(ranks, backend="fake")
        self._backends[group] = backend or self._backends[dist.group.WORLD]
        return group

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = self._exchanged("all_gather", group, obj)

    def gather_object(
        self,
        obj: Any,
        object_gather_list: Any = None,
        dst: Any = None,
        group: Any = None,
        **_: Any,
    ) -> None:
        objects = self._exchanged("gather", group, obj)
        if object_gather_list is not None:
            object_gather_list[:] = objects

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
    ) -> None:
        lists = self._exchanged("broadcast", group, list(object_list), device)
        if group_src is None:
            group_src = _ranks(group).index(src)
        object_list[:] = lists[group_src]

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Any = None,
        *args: Any,
        **options: Any,
    ) -> None:
        group = options.get("group")
        if scatter_object_input_list is not None:
            scatter_object_output_list[0] = scatter_object_input_list[dist.get_rank(group)]
        self._note_objects("scatter", group)

    def barrier(self, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        self._note_objects("barrier", group)
        return Idle() if async_op else None

    def _backend(self, group: Any) -> str:
        return self._backends[dist.group.WORLD if group is None else group]

    def _on_gpu(self, group: Any, tensors: list[Tensor], call: str) -> bool:
        backend = self._backend(group)
        kinds = {tensor.device.type for tensor in tensors}
        if len(kinds) > 1:
            raise RuntimeError(f"{call}: tensors on {' and '.join(sorted(kinds))}")
        kind = kinds.pop()
        if {"cpu": "gloo", "cuda": "nccl"}[kind] not in backend:
            raise RuntimeError(
                f"{call}: No backend type associated with device type {kind} (group of {backend})",
            )
        for tensor in tensors:
            if not tensor.is_contiguous():
                shape = tuple(tensor.shape)
                raise RuntimeError(
                    f"{call}: a tensor of {shape} is not contiguous: {tensor.stride()}",
                )
        return kind == "cuda"

    def _collective(self, name: str, given: dict[str, Any]) -> Any:
        group = given["group"]
        parts, wholes = (tree_leaves(given[argument]) for argument in _COLLECTIVES[name])
        kind = next(kind for kind in _KINDS if kind in name)
        on_gpu = self._on_gpu(group, [*parts, *wholes], name)
        ranks = _ranks(group)
        if name == "all_gather":
            for out in wholes:
                out.copy_(parts[0])
        elif kind in ("all_gather", "reduce_scatter"):
            expected = len(ranks) * parts[0].numel()
            assert wholes[0].numel() == expected, f"sizes of {name}"
        if len(ranks) > 1:
            nbytes = sum(tensor.nbytes for tensor in wholes)
            self._gpu.ledger.collectives.append(Collective(kind, ranks, nbytes, on_gpu))
        return Idle() if given["async_op"] else None

    def _exchanged(self, kind: str, group: Any, value: Any, device: Any = None) -> list[Any]:
        # Return each rank's object, or this rank's object for ranks that had no turn yet.
        ranks = _ranks(group)
        given = self.objects.setdefault((ranks, self._object_calls[ranks]), {})
        self._object_calls[ranks] += 1
        given[dist.get_rank()] = value
        self._note_objects(kind, group, device)
        return [given.get(rank, value) for rank in ranks]

    def _note_objects(self, kind: str, group: Any, device: Any = None) -> None:
        # NCCL sends objects as CUDA tensors, and the host waits for their sizes; gloo does not.
        ranks = _ranks(group)
        if len(ranks) == 1:
            return
        on_gpu = "gloo" not in self._backend(group)
        if device is not None:
            on_gpu = torch.device(device).type == "cuda"
        if on_gpu:
            self._gpu.sync(f"{kind} of objects")
        self._gpu.ledger.collectives.append(Collective(f"{kind}_object", ranks, 0, on_gpu))

    def _exchange(self, name: str, given: dict[str, Any]) -> Idle:
        group = given["group"]
        tensor = given["tensor"]
        kind = name.removeprefix("i")
        on_gpu = self._on_gpu(group, [tensor], kind)
        peer, peer_in_group = (given[argument] for argument in _EXCHANGES[name])
        if peer_in_group is not None:
            peer = _ranks(group)[peer_in_group]
        if peer is None:
            peer = -1
        ranks = (dist.get_rank(), int(peer))
        self._gpu.ledger.collectives.append(Collective(kind, ranks, tensor.nbytes, on_gpu))
        return Idle()

    def batch_isend_irecv(self, p2p_op_list: list[dist.P2POp]) -> list[Any]:
        return [call.op(call.tensor, call.peer, call.group, call.tag) for call in p2p_op_list]


def _with_torchs_arguments(name: str, function: Callable[[str, dict[str, Any]], Any]) -> Any:
    # Let a function of the name and the arguments take what torch's function of this name takes.
    torch_function = getattr(dist.distributed_c10d, name)
    signature = inspect.signature(torch_function)

    @functools.wraps(torch_function)
    def call(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return function(name, bound.arguments)

    return call


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
