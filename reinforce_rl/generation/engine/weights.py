"""Weights for an engine: whole tensors under Hugging Face names, in bounded buckets.

Each bucket is gathered over tensor-parallel ranks and stages on model-parallel rank 0, and copied
to the ranks whose device has a worker of the engine. So an engine needs none of the trainer's
layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.generation.engine.buckets import Offer
from reinforce_rl.megatron.hf_weights import hf_tensors
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_map import Row, weight_map

_ALIGNED = 64  # elements; each tensor in a bucket begins at a multiple of this


def send_weights(
    lm: CausalLM,
    deliver: Callable[[list[Any]], None],
    *,
    max_bytes: int,
    make_buffer: Callable[[int, torch.dtype], tuple[Tensor, Offer]],
    hosts_worker: bool,
    is_spread: bool,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Send all weights bucket by bucket; a collective call of the block.

    Args:
        deliver: passes a bucket, as the offers of the ranks with a worker, to the engine. Called on
            all ranks, with an empty list on all but model-parallel rank 0. The bucket's memory is
            reused after it returns.
        max_bytes: bucket size, exceeded only by a single larger parameter.
        make_buffer: allocates a buffer, given elements and dtype. It also returns a function that
            makes a rank's offer from the buffer and its tensors by name.
        hosts_worker: whether the engine has a worker on this rank's device.
        is_spread: whether a worker is on another device than model-parallel rank 0's.
        values: tensors to send instead of the weights, by the names of `parameters_of`.
    """
    mesh = lm.mesh
    dtype = lm.config.params_dtype
    buckets = plan_buckets(weight_map(lm.architecture, mesh.tp_size), max_bytes // dtype.itemsize)
    buffer, offer = make_buffer(max(map(elements_of, buckets)), dtype)
    for filled, views in fill_buckets(lm, buckets, [buffer], values):
        if is_spread:
            mesh.copy_from_model_parallel_rank_0(filled)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        offers = mesh.gather_on_model_parallel_rank_0(
            offer(buffer, views) if hosts_worker else None
        )
        deliver([rank_offer for rank_offer in offers if rank_offer is not None])


def fill_buckets(
    lm: CausalLM,
    buckets: Sequence[list[Row]],
    buffers: Sequence[Tensor],
    values: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Gather the model bucket by bucket into `buffers` in turn; a collective call of the block.

    Yields the used part of the buffer, and its tensors by name. Only model-parallel rank 0 fills
    them. For `values` see `hf_tensors`.
    """
    mesh = lm.mesh
    rows = [row for bucket in buckets for row in bucket]
    # The other context-parallel ranks hold the same weights.
    tensors = iter(())
    if mesh.cp_rank == 0:
        tensors = hf_tensors(
            lm, values, rows=rows, dtype=lm.config.params_dtype, device=mesh.device
        )
    for bucket, buffer in zip(buckets, itertools.cycle(buffers), strict=False):
        views = views_of(buffer, bucket)
        for name, tensor in itertools.islice(tensors, len(bucket)):
            if tensor is not None:
                views[name].copy_(tensor)
        yield buffer[: elements_of(bucket)], views
    next(tensors, None)


def plan_buckets(rows: Sequence[Row], max_elements: int) -> list[list[Row]]:
    """Pack rows into buckets in order.

    Rows of one parameter stay together, because an engine fuses them.
    """
    buckets: list[list[Row]] = []
    for _, group in itertools.groupby(rows, lambda row: row.megatron):
        together = list(group)
        if buckets and elements_of([*buckets[-1], *together]) <= max_elements:
            buckets[-1] += together
        else:
            buckets.append(together)
    return buckets


def _room(row: Row) -> int:
    return -(-math.prod(row.shape) // _ALIGNED) * _ALIGNED


def elements_of(rows: Sequence[Row]) -> int:
    return sum(map(_room, rows))


def views_of(buffer: Tensor, rows: Sequence[Row]) -> dict[str, Tensor]:
    starts = itertools.accumulate(map(_room, rows), initial=0)
    whole = {row.hf: (start, row.shape) for row, start in zip(rows, starts, strict=False)}
    return {
        name: buffer[start : start + math.prod(shape)].view(shape)
        for name, (start, shape) in whole.items()
    }
