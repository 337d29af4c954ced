"""Loads checkpoints that another tensor-parallel size padded differently: weights, and Adam's moments (0 there)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from reinforce_rl.megatron.lora import adapter_rows
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer_state import PREFIX
from reinforce_rl.megatron.weights.weight_map import Split, weight_map


def allow_other_padding(
    lm: CausalLM, model: dict[str, Any], folder: Path, optimizer: dict[str, Any] | None = None
) -> list[str]:
    """Let megatron cut or zero-pad what another tensor-parallel size padded differently; return other differences.

    Any sentence returned means the checkpoint is another model's.

    Args:
        model: sharded state about to be loaded.
        optimizer: optimizer's sharded state about to be loaded too.
    """
    stored: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(folder))
    splits = {row.megatron: row.split for row in (*weight_map(lm.architecture, lm.mesh.tp_size), *adapter_rows(lm))}
    faults, padded, dtypes = [], {}, {}
    for name, tensor in model.items():
        if not isinstance(tensor, ShardedTensor):
            continue
        # The last stage's copy of tied embeddings uses their key.
        expected, split = tuple(tensor.global_shape), splits[name if name in splits else tensor.key]
        if tensor.key not in stored:
            faults.append(f"{tensor.key} is missing; expected shape {expected}")
            continue
        dtypes[stored[tensor.key].dtype] = tensor.dtype
        found = tuple(stored[tensor.key].global_shape)
        if found != expected and not _differ_in_padding(found, expected, split, tensor):
            faults.append(f"{tensor.key} has shape {found}; expected {expected}")
        padded[tensor.key] = tensor.allow_shape_mismatch = found != expected
    if optimizer is not None:  # Adam updates fp32 weights: the model's or separate ones
        faults += [
            f"its weights are {there}, those of this run {here}; trainer.precision must be as it was"
            for there, here in dtypes.items()
            if there != here
        ]
    for tensor in _sharded_tensors(optimizer):
        _, _, parameter = tensor.key.removeprefix(PREFIX).partition(".")
        tensor.allow_shape_mismatch = padded.get(parameter, False)
    return list(dict.fromkeys(faults))  # megatron uses one key for all layers


def _sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict | list):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _sharded_tensors(item)


def _differ_in_padding(
    found: tuple[int, ...], expected: tuple[int, ...], split: Split | None, tensor: ShardedTensor
) -> bool:
    if split is None or len(found) != len(expected):
        return False
    axis = len(expected) - len(tensor.local_shape) + split.axis  # megatron prepends the layer axis
    rest = [size for i, size in enumerate(found) if i != axis] == [s for i, s in enumerate(expected) if i != axis]
    return rest and found[axis] >= split.units * split.width and found[axis] % split.width == 0
