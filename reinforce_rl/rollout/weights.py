"""New weights for remote generators: broadcast by the trainers in buckets, by Hugging Face names.

A bucket is gathered over the trainers' tensor-parallel ranks and stages on their first rank while
the one before it is on its way, and each generator takes its own slices, so the two need not have
the same layout. With LoRA the updates alone are sent. Besides its own weights neither side ever has
more than two buckets, and a generator what it has received and does not use yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from reinforce_rl.generation.engine.weights import elements_of, fill_buckets, plan_buckets, views_of
from reinforce_rl.megatron.hf_weights import parameters_of
from reinforce_rl.megatron.lora import adapter_rows
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_map import Row, weight_map
from reinforce_rl.rollout.weight_group import ElasticWeightGroup
from reinforce_rl.runtime.phases import wait_for_ranks

# larger ones were slower with gloo, and are memory that a trainer has twice
BUCKET_BYTES = 64 * 2**20


def _plan(lm: CausalLM, max_bytes: int) -> list[list[Row]]:
    rows = adapter_rows(lm) or weight_map(lm.architecture, lm.mesh.tp_size)
    return plan_buckets(rows, max_bytes // lm.config.params_dtype.itemsize)


def _buffers(lm: CausalLM, buckets: list[list[Row]], count: int) -> list[Tensor]:
    size = max(map(elements_of, buckets))
    return [
        torch.empty(size, dtype=lm.config.params_dtype, device=lm.mesh.device) for _ in range(count)
    ]


def send_weights(
    lm: CausalLM, group: ElasticWeightGroup | None, max_bytes: int = BUCKET_BYTES
) -> int:
    """Send the weights that are trained; return the number of bytes.

    A collective call of the first block of trainers. `group` is None on all but its first rank.
    `receive_weights` on each generator has the same `max_bytes`.
    """
    buckets = _plan(lm, max_bytes)
    buffers = _buffers(lm, buckets, 2)
    sent = 0
    before = None
    for filled, _ in fill_buckets(lm, buckets, buffers):
        sent += filled.nbytes
        if group is not None:
            work = group.broadcast(filled)
            if before is not None:
                wait_for_ranks(before)
            before = work
    if before is not None:
        wait_for_ranks(before)
    return sent


@torch.no_grad()
def receive_weights(
    lm: CausalLM, group: ElasticWeightGroup, max_bytes: int = BUCKET_BYTES
) -> dict[str, Tensor]:
    """Receive one `send_weights`; return this rank's slices, for `load_weights`.

    May run beside generation.
    """
    parameters = parameters_of(lm)
    rank = lm.mesh.tp_rank
    buckets = _plan(lm, max_bytes)
    received = dict[str, Tensor]()
    with _beside_generation(lm.mesh.device):
        (buffer,) = _buffers(lm, buckets, 1)
        for bucket in buckets:
            wait_for_ranks(group.broadcast(buffer[: elements_of(bucket)]))
            tensors = views_of(buffer, bucket)
            for row in bucket:
                if row.megatron not in received:
                    # padding stays zero
                    received[row.megatron] = torch.zeros_like(parameters[row.megatron])
                start, end = row.part(rank)
                if start < end:
                    place = row.place(received[row.megatron], rank)
                    place.copy_(row.part_in(tensors[row.hf], rank))
    return received


@contextlib.contextmanager
def _beside_generation(device: torch.device) -> Iterator[None]:
    """On a GPU, a stream of its own, for which generation need not wait.

    At the end of the block its work is done.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@torch.no_grad()
def load_weights(lm: CausalLM, received: Mapping[str, Tensor]) -> None:
    """Use what `receive_weights` returned, between two calls of the generator."""
    parameters = parameters_of(lm)
    for name, tensor in received.items():
        parameters[name].copy_(tensor)  # in place: a CUDA graph holds the addresses
    _wait_for_copies(lm)


@torch.no_grad()
def exchange_weights(lm: CausalLM, received: Mapping[str, Tensor]) -> None:
    """Use what `receive_weights` returned, and leave the weights so far in its place."""
    parameters = parameters_of(lm)
    for name, tensor in received.items():
        before = parameters[name].clone()
        parameters[name].copy_(tensor)
        tensor.copy_(before)
    _wait_for_copies(lm)


def _wait_for_copies(lm: CausalLM) -> None:
    if lm.mesh.device.type == "cuda":
        # what came is of another stream, which reuses what is freed
        torch.cuda.current_stream().synchronize()
