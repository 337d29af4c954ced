"""`preflight=deep`: measure the run's ranks on fake GPUs, predict its step, and try alternatives."""

from __future__ import annotations

import copy
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.rules import find_faults
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.model.model import layers_of_stages
from reinforce_rl.preflight.deep.machine import Hardware, load_machine
from reinforce_rl.preflight.deep.step import Lengths, PredictedJob, StepTime, predict
from reinforce_rl.preflight.deep.worker import DeepFault, Worker
from reinforce_rl.preflight.inputs import Inputs, layout_of
from reinforce_rl.preflight.plan import BatchPlan, plan_batches
from reinforce_rl.preflight.report import Tried, as_json, print_alternatives, print_step
from reinforce_rl.trainer.build import DTYPES, model_options
from reinforce_rl.utils.files import write_atomically

MOST_TRIED, MOST_TOLD = 4, 3
BETTER = 0.97  # report a change if the step takes at most this share of the time
TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
_GRANULARITY, _METHOD, _NUMBER = (f"model.activations_checkpoint_{n}" for n in ("granularity", "method", "num_layers"))
_RECOMPUTE = {_GRANULARITY: "full", _METHOD: "uniform", _NUMBER: 1}
Change = dict[str, Any]


def deep(cfg: TrainConfig, inputs: Inputs, console: Console) -> list[str]:
    """Print the predicted step and what to change, and write both to `preflight.json` in the run's folder.

    Returns:
        faults that would end the run, one sentence each.

    Raises:
        ConfigError: `preflight_machine` is wrong.
    """
    job = job_of(cfg, inputs, load_machine(cfg.preflight_machine))
    with console.status("fake GPU") as status, Worker(lambda text: status.update(f"fake GPU, {text}")) as worker:
        try:
            step = predict(job, worker.measure(job))
        except DeepFault as error:
            return [str(error)]
        print_step(console, job, step)
        tried = _try(worker, job, inputs, step)
    better = [one for one in tried if one.step.fits and (not step.fits or one.step.seconds < BETTER * step.seconds)]
    better = sorted(better, key=lambda one: one.step.seconds)[:MOST_TOLD]
    print_alternatives(console, step, better, len(tried))
    path = Path(cfg.exp_manager.explicit_log_dir) / "preflight.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(as_json(job, step, better), indent=1))
    console.print(f"The same as JSON: {path}")
    if step.fits:
        return []
    machine = job.machine
    return [
        f"a rank needs {step.peaks[step.worst] / 1e9:.1f} GB in {step.worst}, and a {machine.name} has "
        f"{(machine.memory - machine.reserved) / 1e9:.1f} GB for tensors"
    ]


def job_of(cfg: TrainConfig, inputs: Inputs, machine: Hardware) -> PredictedJob:
    """Build the job to predict from a configuration whose model and layout can be read.

    Raises:
        ConfigError: the layers do not divide.
    """
    layout, architecture = layout_of(cfg), inputs.architecture
    assert layout is not None and architecture is not None
    dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
    layers = layers_of_stages(architecture, layout, dtype, model_options(cfg))
    lengths = Lengths(cfg.model.reinforce.length_params.max_length, cfg.preflight_response_tokens)
    batches = plan_batches(cfg, layout, inputs.datasets)
    machine = machine.model_copy(update={"gpus_per_node": min(machine.gpus_per_node, cfg.trainer.devices)})
    most = _most_of_update(batches, layout.data) * batches.samples
    return PredictedJob(cfg, architecture, layout, tuple(layers), batches, machine, lengths, most)


def _most_of_update(batches: BatchPlan, ranks: int) -> float:
    # Average prompts of an optimizer step on the busiest rank; they are drawn from all ranks at random.
    size = batches.prompts_of_update.least
    if size >= batches.prompts:
        return batches.prompts_of_rank.most
    owners, draw, most = [prompt % ranks for prompt in range(batches.prompts)], random.Random(0), []
    for _ in range(64):
        draw.shuffle(owners)
        parts = [owners[start : start + size] for start in range(0, len(owners), size)]
        most += [max(Counter(part).values()) for part in parts]
    return statistics.fmean(most)


def _try(worker: Worker, job: PredictedJob, inputs: Inputs, step: StepTime) -> list[Tried]:
    tried: list[Tried] = []
    for change, cfg in alternatives(job, step):
        if len(tried) == MOST_TRIED:
            break
        try:
            other = job_of(cfg, inputs, job.machine)
            tried.append(Tried(change, predict(other, worker.measure(other))))
        except (ConfigError, DeepFault):
            continue
    return tried


def alternatives(job: PredictedJob, step: StepTime) -> Iterator[tuple[Change, TrainConfig]]:
    """Yield changes without a fault, likeliest to help first, with the changed configuration."""
    for change in _faster(job, step) if step.fits else _smaller(job):
        changed = with_keys(job.cfg, change)
        if not any(find_faults(changed)):
            yield change, changed


def with_keys(cfg: TrainConfig, change: Change) -> TrainConfig:
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
