"""Tensors whose contents wait in host memory while their GPU memory is free for something else.

A tensor's storage is resized to nothing and back, as FSDP does, so that the tensor itself, and every view and
optimizer state that refers to it, stays the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# torch rounds pinned blocks up to a power of two, so the host memory is made of such blocks, and each is filled.
BLOCK_BYTES = 2**28
_COPIES = "reinforce_rl_host_copies"


class HostCopies:
    """Moves tensors to host memory and back. The host memory is kept for the next time, as pinning takes long.

    Args:
        pin: page-locked memory, which copies to and from a GPU need to run at the bus's speed.
        overlap_restore: copy back on a stream of its own; `wait` must come before the tensors are used.
        block_bytes: of the host memory's blocks.
    """

    def __init__(self, *, pin: bool, overlap_restore: bool = False, block_bytes: int = BLOCK_BYTES):
        self._pin, self._overlap, self._block_bytes = pin, overlap_restore, block_bytes
        self._blocks: list[Tensor] = []
        self._away: list[tuple[Tensor, int]] = []  # each with the bytes of its storage
        self._stream: Any = None
        self._event: Any = None

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy contiguous tensors to the host and free their memory. Each must have a storage of its own.

        Raises:
            ValueError: a tensor is a view of a larger storage, or not contiguous.
        """
        self.wait()
        away = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
        for tensor, size in away:
            if size != tensor.nbytes or not tensor.is_contiguous():
                raise ValueError(f"a tensor of {tensor.nbytes} bytes cannot leave its storage of {size} bytes")
        for host, part in self._pieces([tensor for tensor, _ in away]):
            host.copy_(part, non_blocking=True)
        if self._pin:
            torch.cuda.current_stream().synchronize()
        for tensor, _ in away:
            tensor.untyped_storage().resize_(0)
        self._away = away

    def give_back(self) -> None:
        """Give the tensors of `take` their memory and contents again."""
        for tensor, size in self._away:
            tensor.untyped_storage().resize_(size)
        tensors, self._away = [tensor for tensor, _ in self._away], []
        if not (self._overlap and self._pin):
            self._copy_back(tensors)
            return
        self._stream = self._stream or torch.cuda.Stream()
        # The memory may still be read by kernels that were launched before it was free.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy_back(tensors)
            self._event = self._stream.record_event()

    def wait(self) -> None:
        """Let what comes next on the current stream wait for an overlapped `give_back`."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None

    def _copy_back(self, tensors: list[Tensor]) -> None:
        for host, part in self._pieces(tensors):
            part.copy_(host, non_blocking=True)

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensors' bytes in order, cut where a block of host memory ends: uint8 [n], on the host and there."""
        block, offset = 0, 0
        for tensor in tensors:
            flat, start = tensor.detach().view(-1).view(torch.uint8), 0
            while start < len(flat):
                if block == len(self._blocks):
                    memory = torch.empty(self._block_bytes, dtype=torch.uint8)
                    self._blocks.append(memory.pin_memory() if self._pin else memory)
                size = min(len(flat) - start, self._block_bytes - offset)
                yield self._blocks[block][offset : offset + size], flat[start : start + size]
                start, offset = start + size, offset + size
                if offset == self._block_bytes:
                    block, offset = block + 1, 0


def attach_copies(optimizer: Any, copies: HostCopies) -> None:
    """Make `wait_for_copies` wait for these."""
    setattr(optimizer, _COPIES, copies)


def wait_for_copies(optimizer: Any) -> None:
    """Call before reading an optimizer's states: they may still be on their way back."""
    copies: HostCopies | None = getattr(optimizer, _COPIES, None)
    if copies is not None:
        copies.wait()
