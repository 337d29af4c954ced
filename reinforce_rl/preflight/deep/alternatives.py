"""What might make a step faster or let it fit, by the keys that would change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from reinforce_rl.config import TrainConfig
from reinforce_rl.config_checks import find_faults
from reinforce_rl.preflight.deep.step import Job, StepTime

TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
RECOMPUTE = "model.activations_checkpoint_"
Change = dict[str, Any]


def with_keys(cfg: TrainConfig, change: Change) -> TrainConfig:
    """A copy with other values of some keys."""
    changed = copy.deepcopy(cfg)
    for key, value in change.items():
        *groups, name = key.split(".")
        node: Any = changed
        for group in groups:
            node = getattr(node, group)
        setattr(node, name, value)
    return changed


def fits(step: StepTime, job: Job) -> bool:
    """Whether a GPU's memory holds the worst phase."""
    return step.peak <= job.machine.memory - job.machine.reserved


def alternatives(job: Job, step: StepTime) -> Iterator[tuple[Change, TrainConfig]]:
    """Changes that have no fault, the likeliest first."""
    changes = _smaller(job) if not fits(step, job) else _faster(job, step)
    for change in changes:
        changed = with_keys(job.cfg, change)
        if not find_faults(changed):
            yield change, changed


def _smaller(job: Job) -> Iterator[Change]:
    cfg, model, layout = job.cfg, job.cfg.model, job.layout
    if cfg.trainer.precision != "bf16":
        yield {"trainer.precision": "bf16"}
    if layout.data * layout.context > 1 and not model.optim.distributed:
        yield {"model.optim.distributed": True}
    if model.activations_checkpoint_granularity != "full":
        yield _recompute()
    if model.micro_batch_size > 1 and model.tokens_per_micro_batch is None:
        yield {"model.micro_batch_size": 1}
    if layout.tensor < job.machine.gpus_per_node:
        yield {TP: 2 * layout.tensor, "model.sequence_parallel": True}
    if 2 * layout.pipeline <= job.architecture.num_layers:
        yield {PP: 2 * layout.pipeline}


def _faster(job: Job, step: StepTime) -> Iterator[Change]:
    cfg, model, layout, slowest = job.cfg, job.cfg.model, job.layout, step.slowest
    if cfg.trainer.precision != "bf16":
        yield {"trainer.precision": "bf16"}
    if slowest.name == "generation":
        size = model.reinforce.rollout_micro_batch_size
        if size < job.batches.prompts_of_rank.most:
            yield {"model.reinforce.rollout_micro_batch_size": 2 * size}
        if cfg.generation == "native":
            yield {"generation": "tensorrt_llm"}
    if layout.data > 1 and slowest.parts.get("once", 0.0) > slowest.seconds / 10:
        yield {"model.optim.overlap_grad_sync": True}
    if model.activations_checkpoint_granularity == "full":
        yield {f"{RECOMPUTE}{name}": None for name in ("granularity", "method", "num_layers")}
    smaller = {TP: layout.tensor // 2, "model.sequence_parallel": model.sequence_parallel and layout.tensor > 2}
    if layout.tensor > 1:
        yield smaller
    if layout.pipeline > 1:
        yield {PP: layout.pipeline // 2}
    if layout.tensor > 1:
        yield {**smaller, PP: 2 * layout.pipeline}
    if model.tokens_per_micro_batch is None and job.batches.micro_batches > layout.pipeline:
        yield {"model.micro_batch_size": 2 * model.micro_batch_size}


def _recompute() -> Change:
    return {f"{RECOMPUTE}granularity": "full", f"{RECOMPUTE}method": "uniform", f"{RECOMPUTE}num_layers": 1}
