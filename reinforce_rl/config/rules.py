"""Cross-field rules shared by the programs. Each yields one message per error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reinforce_rl.config.model import OptimConfig, ParallelConfig


def layout_faults(
    tensor: int,
    pipeline: int,
    context: int,
    sequence_parallel: bool,
    world_size: int,
    ranks: str,
    section: str = "model",
) -> list[str]:
    """Return the errors of a parallel layout.

    Args:
        tensor, pipeline, context: sizes, each at least 1.
        ranks: expression for `world_size` in messages.
        section: config section of the keys.
    """
    faults = []
    sizes = {
        f"{section}.tensor_model_parallel_size": tensor,
        f"{section}.pipeline_model_parallel_size": pipeline,
        f"{section}.context_parallel_size": context,
    }
    block = tensor * pipeline * context
    if world_size % block:
        used = {key: size for key, size in sizes.items() if size > 1}
        if len(used) == 1:
            key, size = next(iter(used.items()))
            faults.append(f"{key} is {size}, which does not divide the {world_size} ranks of {ranks}")
        else:
            factors = " x ".join(f"{key} ({size})" for key, size in used.items())
            faults.append(f"{factors} is {block}, which does not divide the {world_size} ranks of {ranks}")
    if sequence_parallel and tensor == 1:
        faults.append(
            f"{section}.sequence_parallel is true with {section}.tensor_model_parallel_size=1; it shares positions "
            "among tensor-parallel ranks, so set that above 1 or this to false"
        )
    return faults


def ranks_faults(model: ParallelConfig, num_nodes: int, devices: int) -> Iterator[str]:
    """Check a training job's layout, started ranks and recomputation."""
    world = num_nodes * devices
    ranks = f"trainer.num_nodes x trainer.devices = {num_nodes} x {devices}"
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    if min(*sizes, world) >= 1:
        yield from layout_faults(*sizes, model.sequence_parallel, world, ranks)
    started = os.environ.get("WORLD_SIZE")
    if started is not None and started != str(world):
        yield f"{started} ranks were started (WORLD_SIZE), but {ranks} = {world}"
    yield from _recomputation(model)


def _recomputation(model: ParallelConfig) -> Iterator[str]:
    key = "model.activations_checkpoint_"
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    num_layers = model.activations_checkpoint_num_layers
    if granularity == "full":
        if method is None:
            yield f"{key}method is None with granularity=full; expected uniform or block"
        if num_layers is None:
            yield f"{key}num_layers is null with granularity=full; expected a number of layers, such as 1"
    elif granularity in (None, "selective") and (method, num_layers) != (None, None):
        yield (
            f"{key}method is {method!r} and num_layers is {num_layers!r}, which only granularity=full reads; "
            f"it is {granularity!r}"
        )


def optimizer_faults(optim: OptimConfig) -> Iterator[str]:
    if optim.sched.min_lr > optim.lr > 0:
        yield f"model.optim.sched.min_lr is {optim.sched.min_lr}, above model.optim.lr, which is {optim.lr}"


def model_values(folder: str) -> tuple[Path, dict[str, Any]]:
    """Return path and content of a model's `config.json`; empty if unreadable, which the weights' rules report."""
    config_file = Path(folder) / "config.json"
    try:
        values = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return config_file, {}
    return config_file, values if isinstance(values, dict) else {}


def tensor_faults(values: dict[str, Any], config_file: Path, ranks: int, section: str = "model") -> Iterator[str]:
    """Check that the feed-forward size is divisible; heads, groups and vocabulary are padded."""
    size = values.get("intermediate_size")
    if isinstance(size, int) and ranks > 1 and size % ranks:
        yield (
            f"{section}.tensor_model_parallel_size is {ranks}, which does not divide the feed-forward size {size} "
            f"(intermediate_size) of {config_file}"
        )
