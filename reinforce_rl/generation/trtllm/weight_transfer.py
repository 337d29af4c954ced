"""Send the policy's weights to an engine: whole tensors under Hugging Face names, in bounded buckets.

Each bucket is gathered over tensor-parallel ranks and stages on the block's leader, copied to every GPU of the block
and offered as CUDA IPC handles, so the engine needs no pipeline stages.
"""

from __future__ import annotations

import base64
import itertools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.hf_weights import hf_tensors
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_map import Row, weight_map

_ALIGNED = 64  # elements; a tensor begins at a multiple of them


def send_weights(
    lm: CausalLM,
    deliver: Callable[[dict[str, str]], None],
    *,
    max_bytes: int,
    hosts_worker: bool,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Send all weights bucket by bucket; a collective call of the block.

    Args:
        deliver: passes a bucket's handles, by device, to the engine. Called on all ranks; the leader gets the block's
            handles, the others an empty dict. The bucket's memory is reused after it returns.
        max_bytes: bucket size, exceeded only by a single larger parameter.
        hosts_worker: whether the engine has a worker on this rank's device.
        values: tensors to send instead of the weights, by the names of `parameters_of`.
    """
    mesh, dtype = lm.mesh, lm.config.params_dtype
    buckets = plan_buckets(weight_map(lm.architecture, mesh.tp_size), max_bytes // dtype.itemsize)
    buffer = torch.empty(max(map(_elements, buckets)), dtype=dtype, device=mesh.device)
    # The other context-parallel ranks hold the same weights.
    tensors = hf_tensors(lm, values, dtype=dtype, device=mesh.device) if mesh.cp_rank == 0 else iter(())
    for rows in buckets:
        views = _views(buffer, rows)
        for name, tensor in itertools.islice(tensors, len(rows)):
            if tensor is not None:
                views[name].copy_(tensor)
        mesh.copy_from_block_leader(buffer[: _elements(rows)])
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        own = {device_uuid(mesh.device): packed_handles(views)} if hosts_worker else {}
        parts = mesh.gather_on_block_leader(own)
        deliver({device: handles for part in parts for device, handles in part.items()})
    next(tensors, None)


def plan_buckets(rows: Sequence[Row], max_elements: int) -> list[list[Row]]:
    """Pack rows into buckets in order. Rows that share a parameter stay together, as an engine fuses them."""
    buckets: list[list[Row]] = []
    for _, group in itertools.groupby(rows, lambda row: row.megatron):
        together = list(group)
        if buckets and _elements([*buckets[-1], *together]) <= max_elements:
            buckets[-1] += together
        else:
            buckets.append(together)
    return buckets


def _room(row: Row) -> int:
    return -(-math.prod(row.shape) // _ALIGNED) * _ALIGNED


def _elements(rows: Sequence[Row]) -> int:
    return sum(map(_room, rows))


def _views(buffer: Tensor, rows: Sequence[Row]) -> dict[str, Tensor]:
    starts = itertools.accumulate(map(_room, rows), initial=0)
    return {
        row.hf: buffer[start : start + math.prod(row.shape)].view(row.shape)
        for row, start in zip(rows, starts, strict=False)
    }


def packed_handles(tensors: Mapping[str, Tensor]) -> str:
    """Pickle the (name, handle) pairs in the base64 form that the engine's workers read."""
    handles = [(name, handle_of(tensor)) for name, tensor in tensors.items()]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


def handle_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the function and arguments that rebuild the tensor in another process on the same device."""
    return reduce_tensor(tensor)


def device_uuid(device: torch.device) -> str:
    """Return the GPU's NVML id, by which the engine's workers look up weights.

    Raises:
        ConfigError: the device is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            [f"generation is tensorrt_llm, but the ranks compute on {device}; it needs CUDA: use native"]
        )
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
