"""Record of a fake machine: kernels, host syncs, FLOPs, bytes, collectives and memory."""

from __future__ import annotations

import collections
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

ALLOCATION = 512  # bytes, granularity of torch's CUDA allocator


class Kernel(NamedTuple):
    name: str  # of the ATen operator
    flops: int  # floating-point operations, by torch's formulas; half for causal attention
    bytes: int  # read and written, lower bound
    low_precision: bool  # bf16 or fp16


class Collective(NamedTuple):
    kind: str  # such as "all_reduce"; with objects it ends in "_object"
    ranks: tuple[int, ...]  # global ranks of the group; for "send" and "recv" this rank and its peer
    bytes: int  # of the whole tensor: gathered, or before scattering; 0 for objects
    on_gpu: bool  # NCCL, else gloo
    phase: str


@dataclass
class Ledger:
    phase: str
    # Runs of each kernel on the device.
    kernels: collections.Counter[Kernel] = field(default_factory=collections.Counter)
    launches: int = 0  # by the host; a CUDA graph is one
    # Host syncs by operation and line.
    syncs: collections.Counter[str] = field(default_factory=collections.Counter)
    # Calls of scaled-dot-product attention by kernel and shapes.
    attention: collections.Counter[str] = field(default_factory=collections.Counter)
    collectives: list[Collective] = field(default_factory=list)  # in order
    # Bytes of device memory.
    start: int = 0
    peak: int = 0
    end: int = 0
    host_bytes: int = 0  # copied to host memory and kept there as fake tensors

    @property
    def num_kernels(self) -> int:
        return sum(self.kernels.values())

    @property
    def num_syncs(self) -> int:
        return sum(self.syncs.values())

    @property
    def flops(self) -> int:
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def bytes(self) -> int:
        return sum(kernel.bytes * count for kernel, count in self.kernels.items())

    def by_name(self) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        for kernel, count in self.kernels.items():
            found[kernel.name] += count
        return found


class Memory:
    """Live storages on the device, each counted once however many views it has."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._live: dict[int, int] = {}

    def track(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._resize(key, storage.nbytes())
        weakref.finalize(storage, self._free, key)

    def resized(self, storage: Any) -> None:
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, nbytes: int) -> None:
        size = -(-nbytes // ALLOCATION) * ALLOCATION
        self.bytes += size - self._live.get(key, 0)
        self._live[key] = size
        self.peak = max(self.peak, self.bytes)

    def _free(self, key: int) -> None:
        self.bytes -= self._live.pop(key, 0)
