"""`preflight=deep`: measure the run's ranks on fake GPUs, predict its step, and try alternatives."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.text import Text

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import rank_at
from reinforce_rl.config.rules import find_faults
from reinforce_rl.errors import ConfigError, Fault, ReinforceError
from reinforce_rl.preflight.plan import BatchPlan, Inputs, layout_of, plan_batches, stage_layers
from reinforce_rl.preflight.rank import Case, Phases, total
from reinforce_rl.preflight.report import Tried, as_json, print_alternatives, print_step
from reinforce_rl.preflight.step import Hardware, Lengths, PredictedJob, Role, StepTime, load_machine, predict
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.process import ModuleChild

MOST_TRIED, MOST_TOLD = 4, 3
BETTER = 0.97  # report a change if the step takes at most this share of the time
SMALLEST_DEPTH = 2  # layers per stage; twice it is measured as well
TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
_GRANULARITY, _METHOD, _NUMBER = (f"model.activations_checkpoint_{n}" for n in ("granularity", "method", "num_layers"))
_RECOMPUTE = {_GRANULARITY: "full", _METHOD: "uniform", _NUMBER: 1}
Change = dict[str, Any]  # values by key


class DeepFault(ReinforceError):
    """The run would fail. The message names the rank, the phase and the lines."""


def deep(cfg: TrainConfig, inputs: Inputs, console: Console) -> list[str]:
    """Print the predicted step and what to change, also to `preflight.json`; return faults that would end the run.

    Raises ConfigError: `preflight_machine` is wrong.
    """
    job = job_of(cfg, inputs, load_machine(cfg.preflight_machine))
    status = console.status("fake GPU")

    def tell(text: str) -> None:
        status.update(Text(f"fake GPU, {text}"))

    with status, Worker(tell) as worker:
        try:
            step = predict(job, worker.measure(job))
        except DeepFault as error:
            return [Fault(str(error), key=error.key)]
        print_step(console, job, step)
        tried = _try(worker, job, inputs, step)
    better = [one for one in tried if one[1].fits and (not step.fits or one[1].seconds < BETTER * step.seconds)]
    better = sorted(better, key=lambda one: one[1].seconds)[:MOST_TOLD]
    print_alternatives(console, step, better, len(tried))
    path = Path(cfg.exp_manager.explicit_log_dir) / "preflight.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(as_json(job, step, better), indent=1))
    console.print(f"The same as JSON: {path}")
    if step.fits:
        return []
    needed, there = step.peaks[step.worst] / 1e9, (job.machine.memory - job.machine.reserved) / 1e9
    sentence = (
        f"a rank needs {needed:.1f} GB in {step.worst}, but a {job.machine.name} has only {there:.1f} GB for tensors"
    )
    return [Fault(sentence, key="preflight.memory.too_little")]


def job_of(cfg: TrainConfig, inputs: Inputs, machine: Hardware) -> PredictedJob:
    """Build the job to predict; model and layout can be read. Raises ConfigError: the layers do not divide."""
    layout, architecture = layout_of(cfg), inputs.architecture
    assert layout is not None and architecture is not None
    layers = stage_layers(cfg, architecture, layout)
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


class Worker:
    """The process that runs single ranks on fake GPUs; `tell` gets a line per measurement. Context manager."""

    def __init__(self, tell: Callable[[str], object]):
        self._tell = tell

    def __enter__(self) -> Worker:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._child = ModuleChild("reinforce_rl.preflight.rank", stdout=self._said, stderr=self._said)
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.kill()
        self._said.close()

    def measure(self, job: PredictedJob) -> list[Role]:
        """Return the costs of the representative ranks at full depth. Raises DeepFault: one of them failed."""
        longest = job.lengths.longest
        average = min(math.ceil(job.lengths.average), longest)
        runs = {
            (response, stage): [self._run(job, stage, d, response) for d in depths_of(job.cfg, job.layers[stage])]
            for response in dict.fromkeys((longest, average))
            for stage, _ in _roles(job)
        }
        return [_at_depth(job, *role, runs[longest, role[0]], runs[average, role[0]]) for role in _roles(job)]

    def _run(self, job: PredictedJob, stage: int, depth: int, response: int) -> Phases:
        plan, layout, layers, model = job.batches, job.layout, job.layers[stage], job.cfg.model
        # Uneven stages are measured one by one, as if all had the same size.
        overrides = {k: v for k, v in model.megatron_overrides.items() if "pipeline_stage" not in k}
        change = {"generation": "native", "preflight": False, "model.megatron_overrides": overrides}
        if model.activations_checkpoint_method == "block":
            change[_NUMBER] = max(1, min(model.activations_checkpoint_num_layers or 1, layers) * depth // layers)
        case = Case(
            with_keys(job.cfg, change),
            rank_at(0, 0, 0, stage, (layout.tensor, layout.context, layout.data, layout.pipeline)),
            depth,
            min(layout.pipeline - stage, plan.micro_batches),
            *job.rows(response),
            prompts=0 if job.has_engine else job.prompts_of_call,
            samples=plan.samples,
            prompt_tokens=plan.longest_prompt,
            response_tokens=response,
            rates=job.machine.rates,
        )
        role = f"rank {case.rank} (stage {stage} of {layout.pipeline})"
        self._tell(f"{role}: {depth} of {layers} layers, {plan.longest_prompt + response} tokens")
        try:
            self._child.connection.send(case)
            found = self._child.connection.recv()
        except (EOFError, OSError) as error:
            self._said.seek(0)
            said = " | ".join(self._said.read().strip().splitlines()[-3:]) or "it said nothing"
            raise DeepFault(
                f"the process with the fake GPU ended: {said}",
                key="preflight.deep.process_ended",
            ) from error
        if isinstance(found, str):
            raise DeepFault(f"{role} fails in {found}", key="preflight.deep.rank_fails")
        return found


def _at_depth(job: PredictedJob, stage: int, stages: int, full: Sequence[Phases], usual: Sequence[Phases]) -> Role:
    # Extrapolate linearly in depth: costs at the average length, peaks at the longest.
    layers, depths = job.layers[stage], depths_of(job.cfg, job.layers[stage])
    share = 0.0 if len(depths) == 1 else (layers - depths[0]) / (depths[1] - depths[0])
    costs = {name: total([(1 - share, cost), (share, usual[-1][name][0])]) for name, (cost, _) in usual[0].items()}
    peaks = {"resident": 0.0, "away": 0.0}
    for name, (_, peak) in full[0].items():
        if not name.endswith(" each"):  # measured with one more micro-batch than there may be
            title = "generation" if name in ("prefill", "decode") else name.removesuffix(" once")
            peaks[title] = max(peaks.get(title, 0.0), (1 - share) * peak + share * full[-1][name][1])
    return Role(stage, stages, costs, peaks)


def _roles(job: PredictedJob) -> list[tuple[int, int]]:
    # Return (stage, number of stages like it) of the first, the last, and the middle stage with most layers.
    last = job.layout.pipeline - 1
    between = range(1, last)
    middle = [(max(between, key=lambda stage: job.layers[stage]), len(between))] if between else []
    return [(0, 1), *middle, *([(last, 1)] if last else [])]


def depths_of(cfg: TrainConfig, layers: int) -> tuple[int, ...]:
    """Return the layers per stage to measure: two depths for a linear fit, or all if they are few."""
    # Recomputed layers keep their share of a stage.
    number, unit = cfg.model.activations_checkpoint_num_layers or 1, 1
    if cfg.model.activations_checkpoint_method == "uniform":
        unit = number
    elif cfg.model.activations_checkpoint_method == "block" and number < layers:
        unit = layers // math.gcd(layers, number)
    least = unit * -(-SMALLEST_DEPTH // unit)
    return (least, 2 * least) if 2 * least < layers else (layers,)


def _try(worker: Worker, job: PredictedJob, inputs: Inputs, step: StepTime) -> list[Tried]:
    # Measure changes without a fault, likeliest to help first.
    tried: list[Tried] = []
    for applies, change in _faster(job, step) if step.fits else _smaller(job):
        if len(tried) == MOST_TRIED:
            break
        if applies and not any(find_faults(cfg := with_keys(job.cfg, change))):
            with contextlib.suppress(ConfigError, DeepFault):
                other = job_of(cfg, inputs, job.machine)
                tried.append((change, predict(other, worker.measure(other))))
    return tried


def with_keys(cfg: TrainConfig, change: Change) -> TrainConfig:
    changed = copy.deepcopy(cfg)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(changed) if section else changed, name, value)
    return changed


def _smaller(job: PredictedJob) -> list[tuple[bool, Change]]:
    model, layout = job.cfg.model, job.layout
    twice = {TP: 2 * layout.tensor, "model.sequence_parallel": True}
    recomputes = model.activations_checkpoint_granularity == "full"
    return [
        (job.cfg.trainer.precision != "bf16", {"trainer.precision": "bf16"}),
        (layout.data * layout.context > 1 and not model.optim.distributed, {"model.optim.distributed": True}),
        (not recomputes, _RECOMPUTE),
        (not recomputes, {**_RECOMPUTE, **twice}),
        (model.micro_batch_size > 1 and model.tokens_per_micro_batch is None, {"model.micro_batch_size": 1}),
        (layout.tensor < job.machine.gpus_per_node, twice),
        (True, {PP: 2 * layout.pipeline}),
    ]


def _faster(job: PredictedJob, step: StepTime) -> list[tuple[bool, Change]]:
    model, layout, slowest = job.cfg.model, job.layout, step.slowest
    generates, size = slowest.name == "generation", model.reinforce.rollout_micro_batch_size
    splits = generates and size < job.batches.prompts_of_rank.most
    sums = layout.data > 1 and slowest.parts.get("once", 0.0) > slowest.seconds / 10
    half = {TP: layout.tensor // 2, "model.sequence_parallel": model.sequence_parallel and layout.tensor > 2}
    waits = model.tokens_per_micro_batch is None and job.batches.micro_batches > layout.pipeline
    return [
        (job.cfg.trainer.precision != "bf16", {"trainer.precision": "bf16"}),
        (splits, {"model.reinforce.rollout_micro_batch_size": 2 * size}),
        (generates and not job.has_engine, {"generation": "tensorrt_llm"}),
        (sums, {"model.optim.overlap_grad_sync": True}),
        (model.activations_checkpoint_granularity == "full", dict.fromkeys(_RECOMPUTE)),
        (layout.tensor > 1, half),
        (layout.pipeline > 1, {PP: layout.pipeline // 2}),
        (layout.tensor > 1, {**half, PP: 2 * layout.pipeline}),
        (waits, {"model.micro_batch_size": 2 * model.micro_batch_size}),
    ]
