"""What might make a step faster or let it fit, by the keys that would change."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from reinforce_rl.config.checks import find_faults
from reinforce_rl.config.schema import TrainConfig
from reinforce_rl.preflight.deep.step import PredictedJob, StepTime

TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
_GRANULARITY, _METHOD, _NUMBER = (f"model.activations_checkpoint_{n}" for n in ("granularity", "method", "num_layers"))
_RECOMPUTE = {_GRANULARITY: "full", _METHOD: "uniform", _NUMBER: 1}
Change = dict[str, Any]


def alternatives(job: PredictedJob, step: StepTime) -> Iterator[tuple[Change, TrainConfig]]:
    """Changes without a fault, the likeliest to help first, and what they make of the configuration."""
    for change in _faster(job, step) if step.fits else _smaller(job):
        changed = with_keys(job.cfg, change)
        if not find_faults(changed):
            yield change, changed


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


def _smaller(job: PredictedJob) -> Iterator[Change]:
    model, layout = job.cfg.model, job.layout
    if job.cfg.trainer.precision != "bf16":
        yield {"trainer.precision": "bf16"}
    if layout.data * layout.context > 1 and not model.optim.distributed:
        yield {"model.optim.distributed": True}
    twice = {TP: 2 * layout.tensor, "model.sequence_parallel": True}
    if model.activations_checkpoint_granularity != "full":
        yield _RECOMPUTE
        yield {**_RECOMPUTE, **twice}
    if model.micro_batch_size > 1 and model.tokens_per_micro_batch is None:
        yield {"model.micro_batch_size": 1}
    if layout.tensor < job.machine.gpus_per_node:
        yield twice
    yield {PP: 2 * layout.pipeline}


def _faster(job: PredictedJob, step: StepTime) -> Iterator[Change]:
    model, layout, slowest = job.cfg.model, job.layout, step.slowest
    if job.cfg.trainer.precision != "bf16":
        yield {"trainer.precision": "bf16"}
    size = model.reinforce.rollout_micro_batch_size
    if slowest.name == "generation" and size < job.batches.prompts_of_rank.most:
        yield {"model.reinforce.rollout_micro_batch_size": 2 * size}
    if slowest.name == "generation" and not job.has_engine:
        yield {"generation": "tensorrt_llm"}
    if layout.data > 1 and slowest.parts.get("once", 0.0) > slowest.seconds / 10:
        yield {"model.optim.overlap_grad_sync": True}
    if model.activations_checkpoint_granularity == "full":
        yield dict.fromkeys(_RECOMPUTE)
    half = {TP: layout.tensor // 2, "model.sequence_parallel": model.sequence_parallel and layout.tensor > 2}
    if layout.tensor > 1:
        yield half
    if layout.pipeline > 1:
        yield {PP: layout.pipeline // 2}
    if layout.tensor > 1:
        yield {**half, PP: 2 * layout.pipeline}
    if model.tokens_per_micro_batch is None and job.batches.micro_batches > layout.pipeline:
        yield {"model.micro_batch_size": 2 * model.micro_batch_size}
