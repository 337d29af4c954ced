"""Share buckets of weights between a trainer and an engine of the same machine.

Checksums prove their arrival. A bucket is one buffer with tensors at offsets, described by a dict
of plain values:

    dtype, elements: of the buffer
    tensors: [name, first element, shape, checksum] of each tensor
    places: a worker's way to the buffer, by device: a path for "cpu", pickled CUDA IPC arguments
        for a GPU

Both environments import this file, so it needs only torch and the standard library.
"""

from __future__ import annotations

import math
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

Offer = Callable[[Tensor, Mapping[str, Tensor]], Any]

_WIDTH = 4096
_MIX = 0x9E3779B97F4A7C15


def _words(tensor: Tensor) -> Tensor:
    """View the elements' bits as integers [elements]."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return tensor.detach().contiguous().view(-1).view(kind)


def bit_sum(tensor: Tensor) -> int:
    """Return the 64-bit sum over the bits of all elements; equal on any device.

    The order of elements does not matter, zeros add nothing, and the sums of parts add up to the
    sum of the whole. So it can compare a weight with an engine's fused, padded or sharded copy.
    """
    return int(_words(tensor).sum(dtype=torch.int64)) % 2**64


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit sum over all elements' bits, weighted by position; equal on any device."""
    words = _words(tensor)
    rows = words.numel() // _WIDTH
    block = words[: rows * _WIDTH].view(rows, _WIDTH)
    total = words.numel()
    for part, axis in ((block, 1), (block, 0), (words[rows * _WIDTH :].view(1, -1), 0)):
        sums = part.sum(axis, dtype=torch.int64)
        weighted = sums * torch.arange(1, len(sums) + 1, device=sums.device)
        total = (total * _MIX + int(weighted.sum())) % 2**64
    return total


def shared_buffer(elements: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return CPU memory and a path by which this user's processes open it.

    The memory is freed with the tensor.
    """
    # Not a file in /dev/shm: that is small in containers, and a kill would leave the file.
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, elements * dtype.itemsize)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    buffer = torch.from_file(path, shared=True, size=elements, dtype=dtype)
    weakref.finalize(buffer, os.close, descriptor)
    return buffer, path


def describe(buffer: Tensor, views: Mapping[str, Tensor]) -> dict[str, Any]:
    """Describe a bucket without its places."""
    tensors = [
        [name, view.storage_offset(), list(view.shape), checksum(view)]
        for name, view in views.items()
    ]
    return {
        "dtype": str(buffer.dtype).removeprefix("torch."),
        "elements": buffer.numel(),
        "tensors": tensors,
    }


def ipc_place(buffer: Tensor) -> bytes:
    return pickle.dumps(reduce_tensor(buffer)[1])


def make_buffer(
    elements: int, dtype: torch.dtype, device: torch.device, name: str
) -> tuple[Tensor, Offer]:
    """Return a buffer on a device, and a function that offers a bucket in it.

    `name` is the device's name for engines.
    """
    if device.type == "cuda":
        buffer = torch.empty(elements, dtype=dtype, device=device)
        path = None
    else:
        buffer, path = shared_buffer(elements, dtype)

    def offer(filled: Tensor, views: Mapping[str, Tensor]) -> dict[str, Any]:
        # A handle counts its readers, so each bucket has its own.
        place = path or ipc_place(filled)
        return {**describe(filled, views), "places": {name: place}}

    return buffer, offer


def join_offers(offers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the offers of ranks into one bucket."""
    places: dict[str, Any] = {}
    for offer in offers:
        places |= offer["places"]
    return {**offers[0], "places": places}


def device_id(device: torch.device) -> str:
    """Return a name common to trainer and engine: a GPU's NVML id, else the type."""
    if device.type != "cuda":
        return device.type
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def received(
    bucket: Mapping[str, Any], device_id: str, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor); each tensor is a copy.

    Raises:
        RuntimeError: this device has no buffer, or a tensor differs from the sent one.
    """
    place = bucket["places"].get(device_id)
    if place is None:
        raise RuntimeError(
            f"no weights came for {device_id}, but for {', '.join(bucket['places']) or 'no device'}"
        )
    if isinstance(place, str):
        dtype = getattr(torch, bucket["dtype"])
        buffer = torch.from_file(place, shared=True, size=bucket["elements"], dtype=dtype)
    else:
        arguments = list(pickle.loads(place))
        # The sender may have another index for this GPU.
        arguments[6] = device.index
        buffer = rebuild_cuda_tensor(*arguments)
    for name, start, shape, sent in bucket["tensors"]:
        tensor = buffer[start : start + math.prod(shape)].view(shape).clone()
        if checksum(tensor) != sent:
            raise RuntimeError(f"{name} arrived otherwise than it was sent: its checksum differs")
        yield name, tensor
