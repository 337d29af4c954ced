"""Adam's state: away in host memory while a GPU generates, and in a checkpoint.

A tensor's storage is resized to nothing and back, as FSDP does, so that the tensor itself, and every view and
optimizer state that refers to it, stays the same object.

In a checkpoint the tensors are the same whether data-parallel ranks share them or not. megatron's own form does not
serve. For the distributed optimizer it gathers weights and moments, 12 bytes a parameter, on each rank; and with
torch's Adam it fails before the first step, and a load gives all parameters one counter of steps. Here every rank
writes and reads the part that it holds, as rectangles of the whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

# torch rounds pinned blocks up to a power of two, so the host memory is made of such blocks, and each is filled.
BLOCK_BYTES = 2**28
_COPIES = "reinforce_rl_host_copies"
PREFIX = "optimizer.state."  # then what it is, then the parameter's key
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"
STEP = "step"


class HostCopies:
    """Moves tensors to host memory and back. The host memory is kept for the next time, as pinning takes long.

    Args:
        pin: page-locked memory, which copies to and from a GPU need to run at the bus's speed.
        overlap_restore: copy back on a stream of its own; `wait` must come before the tensors are used.
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
    setattr(optimizer, _COPIES, copies)


def wait_for_copies(optimizer: Any) -> None:
    """Call before reading an optimizer's states: they may still be on their way back."""
    copies: HostCopies | None = getattr(optimizer, _COPIES, None)
    if copies is not None:
        copies.wait()


def adam_state(optimizer: MegatronOptimizer, model: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint holds of Adam, for megatron's `dist_checkpointing`. A load writes into the tensors themselves.

    Where Adam has no state yet, before its first step or where all were skipped, it gets that of step 0.

    Args:
        model: the sharded state of the parameters that it updates.

    Returns:
        the number of steps, and for each parameter both moments and, where the model's dtype is a lower one, the fp32
        weights.
    """
    wait_for_copies(optimizer)
    sharded = {id(entry.data): (name, entry) for name, entry in model.items() if hasattr(entry, "data")}
    found: dict[str, Any] = {STEP: _step_of(optimizer)}
    for main in _main_parameters(optimizer):
        name, entry = sharded[id(main.parameter)]
        tensors = {key: main.moment(key) for key in MOMENTS}
        if main.tensor.dtype != main.parameter.dtype:
            tensors[MAIN] = main.tensor.detach()
        for kind, tensor in tensors.items():
            for number, part in enumerate(_parts(entry, f"{PREFIX}{kind}.", tensor.view(-1), main)):
                found[f"{kind}.{name}.{number}"] = part
    return found


def set_adam_step(optimizer: MegatronOptimizer, step: float) -> None:
    """Give every parameter its number of steps: after a load, which fills the tensors."""
    for inner in inner_optimizers(optimizer):
        if _counts_by_parameter(inner):
            for state in inner.state.values():
                # One of its own each: they are counted up in place.
                place = _step_device(inner, state[MOMENTS[0]])
                state[STEP] = torch.full((), float(step), dtype=torch.float32, device=place)
        else:
            for group in inner.param_groups:
                group[STEP] = int(step)


@dataclass(frozen=True)
class _Main:
    """The part of a parameter that Adam updates on this rank."""

    parameter: Tensor  # the model's
    tensor: Tensor  # itself, its copy in fp32, or a flat range of one of them
    start: int  # of the range within the flattened parameter
    shared: bool  # the data- and context-parallel ranks have a range each; else all have the same
    inner: Any  # torch's optimizer

    def moment(self, name: str) -> Tensor:
        state = self.inner.state[self.tensor]
        if _counts_by_parameter(self.inner):
            place = _step_device(self.inner, self.tensor)
            state.setdefault(STEP, torch.zeros((), dtype=torch.float32, device=place))
        if name not in state:
            state[name] = torch.zeros_like(self.tensor)
        return state[name]


def _main_parameters(optimizer: MegatronOptimizer) -> Iterator[_Main]:
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        inner = part.optimizer
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, place) in part.model_param_group_index_map.items():
                start = part._get_model_param_range_map(parameter)["param"].start
                yield _Main(parameter, inner.param_groups[group]["params"][place], start, True, inner)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            pairs = zip(chain(*part.float16_groups), chain(*part.fp32_from_float16_groups), strict=True)
            for parameter, tensor in pairs:
                yield _Main(parameter, tensor, 0, False, inner)
            for parameter in chain(*part.fp32_from_fp32_groups):
                yield _Main(parameter, parameter, 0, False, inner)
        else:
            for parameter in chain(*(group["params"] for group in inner.param_groups)):
                yield _Main(parameter, parameter, 0, False, inner)


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """torch's, or those of Apex and Transformer Engine, that megatron drives."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts]


def _counts_by_parameter(inner: Any) -> bool:
    # The fused ones of Apex and Transformer Engine, which megatron prefers where they are installed, count by group.
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _step_device(inner: Any, tensor: Tensor) -> torch.device:
    """Where Adam expects a tensor's counter of steps: its fused kernel reads it on the tensor's own device."""
    return tensor.device if any(group.get("fused") for group in inner.param_groups) else torch.device("cpu")


def large_states(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Moments and fp32 main weights: the tensors, beside the model's own, that are as large as its parameters."""
    for main in _main_parameters(optimizer):
        state = main.inner.state.get(main.tensor, {})
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)
        if main.tensor.dtype != main.parameter.dtype:
            yield main.tensor


def _step_of(optimizer: MegatronOptimizer) -> float:
    """The same for all parameters, since a step is made of all or of none; 0 on a rank that holds none."""
    for inner in inner_optimizers(optimizer):
        holders = inner.state.values() if _counts_by_parameter(inner) else inner.param_groups
        for holder in holders:
            return float(holder.get(STEP, 0.0))
    return 0.0


def _parts(
    entry: ShardedTensor | ShardedTensorFactory, prefix: str, flat: Tensor, main: _Main
) -> Iterator[ShardedTensor]:
    """Cut a tensor like a parameter, or its range, into rectangles of whole tensors; each is a view."""
    pieces: Any = [entry]
    if isinstance(entry, ShardedTensorFactory):  # of several tensors, one after the other
        pieces = entry.build_fn(entry.key, entry.data, entry.replica_id, None)
    end, before = main.start + len(flat), 0
    for piece in pieces:
        size = math.prod(piece.local_shape)
        own = max(main.start - before, 0), min(end - before, size)
        axes = piece.prepend_axis_num
        for offset, shape in rectangles(piece.local_shape, *own):
            first = before + _flat_index(offset, piece.local_shape) - main.start
            yield replace(
                piece,
                key=prefix + piece.key,
                data=flat[first : first + math.prod(shape)].view((1,) * axes + shape),
                dtype=flat.dtype,
                local_shape=(1,) * axes + shape,
                global_offset=tuple(a + b for a, b in zip(piece.global_offset, (0,) * axes + offset, strict=True)),
                axis_fragmentations=None,  # of no regular grid
                prepend_axis_num=0,
                # The last number is the data- and context-parallel rank; each writes its own range.
                replica_id=(*piece.replica_id[:-1], 0) if main.shared else piece.replica_id,
            )
        before += size


def rectangles(shape: Sequence[int], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements start .. end-1 of a flattened tensor as rectangles, in order.

    Returns:
        offset and shape of each; at most two more a dimension after the first, and one.
    """
    if start >= end:
        return []
    if len(shape) == 1:
        return [((start,), (end - start,))]
    row = math.prod(shape[1:])

    def within(number: int, first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((number, *offset), (1, *size)) for offset, size in rectangles(shape[1:], first, last)]

    first, last = -(-start // row), end // row  # whole rows
    if first > last:
        return within(last, start - last * row, end - last * row)
    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    head = within(first - 1, start - (first - 1) * row, row) if start < first * row else []
    return [*head, *whole, *within(last, 0, end - last * row)]


def _flat_index(offset: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for place, size in zip(offset, shape, strict=True):
        index = index * size + place
    return index
