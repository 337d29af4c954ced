"""`preflight=deep`: run single ranks on fake GPUs.

It finds crashes, peaks of memory, and a lower bound of a step's time.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.text import Text

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import rank_at
from reinforce_rl.config.rules import find_faults
from reinforce_rl.errors import ConfigError, Fault, ReinforceError
from reinforce_rl.preflight.hardware import Hardware, load_machine
from reinforce_rl.preflight.lower_bound import Job, Lengths, Role, StepBound, lower_bound
from reinforce_rl.preflight.plan import plan_batches
from reinforce_rl.preflight.rank import Case, Phases, total
from reinforce_rl.preflight.report import Tried, as_json, print_alternatives, print_bound
from reinforce_rl.trainer.inputs import Inputs, layout_of, stage_layers
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.process import ModuleChild

MOST_TRIED = 4
MOST_PRINTED = 3
BETTER = 0.97  # report a change if the bound is at most this share of the present one
SMALLEST_DEPTH = 2  # layers per stage; twice it is measured as well
TP = "model.tensor_model_parallel_size"
PP = "model.pipeline_model_parallel_size"
_GRANULARITY = "model.activations_checkpoint_granularity"
_METHOD = "model.activations_checkpoint_method"
_NUMBER = "model.activations_checkpoint_num_layers"
_RECOMPUTE = {_GRANULARITY: "full", _METHOD: "uniform", _NUMBER: 1}
Change = dict[str, Any]  # values by key


class DeepFault(ReinforceError):
    """The run would fail. The message names the rank, the phase and the lines."""


def deep(cfg: TrainConfig, inputs: Inputs, console: Console) -> list[str]:
    """Print the lower bound of a step and useful changes; write both to `preflight.json`.

    Returns the faults that would end the run. Raises ConfigError if `preflight_machine` is wrong.
    """
    job = job_of(cfg, inputs, load_machine(cfg.preflight_machine))
    status = console.status("fake GPU")

    def tell(text: str) -> None:
        status.update(Text(f"fake GPU, {text}"))

    with status, Worker(tell) as worker:
        try:
            step = lower_bound(job, worker.measure(job))
        except DeepFault as error:
            return [Fault(str(error), key=error.key)]
        print_bound(console, job, step)
        tried = _try(worker, job, inputs, step)
    better = [(change, other) for change, other in tried if other.fits]
    if step.fits:
        better = [pair for pair in better if pair[1].seconds < BETTER * step.seconds]
    better = sorted(better, key=lambda pair: pair[1].seconds)[:MOST_PRINTED]
    print_alternatives(console, step, better, len(tried))
    path = Path(cfg.exp_manager.explicit_log_dir) / "preflight.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(as_json(job, step, better), indent=1))
    console.print(f"The same as JSON: {path}")
    if step.fits:
        return []
    worst = step.worst
    gpu = job.machine.name
    needed = f"{step.peaks[worst] / 1e9:.1f} GB"
    there = f"{(job.machine.memory - job.machine.reserved) / 1e9:.1f} GB"
    sentence = f"a rank needs {needed} in {worst}, but a {gpu} has only {there} for tensors"
    return [Fault(sentence, key="preflight.memory.too_little")]


def job_of(cfg: TrainConfig, inputs: Inputs, machine: Hardware) -> Job:
    """Build the job from inputs with a model and a layout.

    Raises ConfigError if the layers do not divide.
    """
    layout = layout_of(cfg)
    architecture = inputs.architecture
    assert layout is not None and architecture is not None
    layers = stage_layers(cfg, architecture, layout)
    batches = plan_batches(cfg, layout, inputs.datasets)
    gpus_per_node = min(machine.gpus_per_node, cfg.trainer.devices)
    machine = machine.model_copy(update={"gpus_per_node": gpus_per_node})
    longest = cfg.max_response_tokens
    response = min(cfg.preflight_response_tokens or longest, longest)
    prompt = batches.longest_prompt
    if inputs.datasets is not None:
        prompts = inputs.datasets.train
        prompt = int(statistics.fmean(len(prompts[i].tokens) for i in range(len(prompts))))
    # A bound must not count the padding of a pass's positions to a multiple.
    prompt = max(1, prompt - (prompt + response - 1) % layout.sequence_multiple)
    return Job(
        cfg=cfg,
        architecture=architecture,
        layout=layout,
        layers=tuple(layers),
        batches=batches,
        machine=machine,
        full=Lengths(batches.longest_prompt, longest),
        mean=Lengths(prompt, response),
    )


class Worker:
    """The process that runs single ranks on fake GPUs, as a context manager.

    `tell` is called with a line per measurement.
    """

    def __init__(self, tell: Callable[[str], object]):
        self._tell = tell

    def __enter__(self) -> Worker:
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._child = ModuleChild(
            "reinforce_rl.preflight.rank",
            stdout=self._output,
            stderr=self._output,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.kill()
        self._output.close()

    def measure(self, job: Job) -> list[Role]:
        """Return the costs of the representative ranks at full depth.

        Raises DeepFault if one of them failed.
        """
        roles = []
        for stage in _stages(job):
            depths = depths_of(job.cfg, job.layers[stage])
            full = [self._run(job, stage, depth, job.full) for depth in depths]
            mean = full
            if job.mean != job.full:
                mean = [self._run(job, stage, depth, job.mean) for depth in depths]
            roles.append(_at_depth(job, stage, full, mean))
        return roles

    def _run(self, job: Job, stage: int, depth: int, lengths: Lengths) -> Phases:
        case = case_of(job, stage, depth, lengths)
        role = f"rank {case.rank} (stage {stage} of {job.layout.pipeline})"
        self._tell(f"{role}: {depth} of {job.layers[stage]} layers, {lengths.whole} tokens")
        answer = self.ask(case)
        if isinstance(answer, str):
            raise DeepFault(f"{role} fails in {answer}", key="preflight.deep.rank_fails")
        return answer

    def ask(self, case: Case) -> Phases | str:
        """Return the phases of a case, or the phase and source lines of an error.

        Raises DeepFault if the process ended.
        """
        try:
            self._child.connection.send(case)
            return self._child.connection.recv()
        except (EOFError, OSError) as error:
            self._output.seek(0)
            lines = self._output.read().strip().splitlines()[-3:]
            last_lines = " | ".join(lines) or "it wrote nothing"
            raise DeepFault(
                f"the process with the fake GPU ended: {last_lines}",
                key="preflight.deep.process_ended",
            ) from error


def case_of(job: Job, stage: int, depth: int, lengths: Lengths) -> Case:
    """Return the first rank of a stage, with `depth` layers a stage, at these lengths."""
    plan = job.batches
    layout = job.layout
    layers = job.layers[stage]
    model = job.cfg.model
    # Uneven stages are measured one by one, as if all had the same size.
    overrides = {k: v for k, v in model.megatron_overrides.items() if "pipeline_stage" not in k}
    change: Change = {
        "generation": "native",
        "preflight": False,
        "model.megatron_overrides": overrides,
        # Calls of the model count decode steps. A replayed graph makes none.
        "model.reinforce.cuda_graphs": False,
    }
    if model.activations_checkpoint_method == "block":
        number = min(model.activations_checkpoint_num_layers or 1, layers)
        change[_NUMBER] = max(1, number * depth // layers)
    grid = (layout.tensor, layout.context, layout.data, layout.pipeline)
    train_rows, forward_rows = job.rows(lengths)
    return Case(
        config=with_keys(job.cfg, change),
        rank=rank_at(0, 0, 0, stage, grid),
        layers=depth,
        in_flight=min(layout.pipeline - stage, plan.micro_batches),
        train_rows=train_rows,
        forward_rows=forward_rows,
        prompts=0 if job.has_engine else job.prompts_of_call,
        samples=plan.samples,
        prompt_tokens=lengths.prompt,
        response_tokens=lengths.response,
    )


def _at_depth(job: Job, stage: int, full: Sequence[Phases], mean: Sequence[Phases]) -> Role:
    # Extrapolate linearly in depth: costs at the mean lengths, peaks at full length.
    layers = job.layers[stage]
    depths = depths_of(job.cfg, layers)
    share = 0.0
    if len(depths) > 1:
        share = (layers - depths[0]) / (depths[1] - depths[0])
    costs = {}
    for name, (cost, _) in mean[0].items():
        costs[name] = total([(1 - share, cost), (share, mean[-1][name][0])])
    peaks = {"resident": 0.0, "away": 0.0}
    for name, (_, peak) in full[0].items():
        # The peak of "each" may be of more micro-batches than the run has.
        if not name.endswith(" each"):
            title = "generation" if name in ("prefill", "decode") else name.removesuffix(" once")
            peaks[title] = max(
                peaks.get(title, 0.0),
                (1 - share) * peak + share * full[-1][name][1],
            )
    return Role(stage, costs, peaks)


def _stages(job: Job) -> list[int]:
    # Return the first stage, the last, and the one between them with most layers.
    last = job.layout.pipeline - 1
    stages = [0]
    if last > 1:
        stages.append(max(range(1, last), key=lambda stage: job.layers[stage]))
    if last > 0:
        stages.append(last)
    return stages


def depths_of(cfg: TrainConfig, layers: int) -> tuple[int, ...]:
    """Return the layers per stage to measure: two depths for a linear fit, or all of a few."""
    # Recomputed layers keep their share of a stage.
    number = cfg.model.activations_checkpoint_num_layers or 1
    unit = 1
    if cfg.model.activations_checkpoint_method == "uniform":
        unit = number
    elif cfg.model.activations_checkpoint_method == "block" and number < layers:
        unit = layers // math.gcd(layers, number)
    least = unit * -(-SMALLEST_DEPTH // unit)
    return (least, 2 * least) if 2 * least < layers else (layers,)


def _try(worker: Worker, job: Job, inputs: Inputs, step: StepBound) -> list[Tried]:
    # Measure changes without a fault, the most promising first.
    tried: list[Tried] = []
    for applies, change in _faster(job, step) if step.fits else _smaller(job):
        if len(tried) == MOST_TRIED:
            break
        if applies and not any(find_faults(cfg := with_keys(job.cfg, change))):
            with contextlib.suppress(ConfigError, DeepFault):
                other = job_of(cfg, inputs, job.machine)
                tried.append((change, lower_bound(other, worker.measure(other))))
    return tried


def with_keys(cfg: TrainConfig, change: Change) -> TrainConfig:
    changed = copy.deepcopy(cfg)
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(changed) if section else changed, name, value)
    return changed


def _smaller(job: Job) -> list[tuple[bool, Change]]:
    model = job.cfg.model
    layout = job.layout
    twice = {TP: 2 * layout.tensor, "model.sequence_parallel": True}
    recomputes = model.activations_checkpoint_granularity == "full"
    return [
        (job.cfg.trainer.precision != "bf16", {"trainer.precision": "bf16"}),
        (
            layout.data * layout.context > 1 and not model.optim.distributed,
            {"model.optim.distributed": True},
        ),
        (not recomputes, _RECOMPUTE),
        (not recomputes, {**_RECOMPUTE, **twice}),
        (
            model.micro_batch_size > 1 and model.tokens_per_micro_batch is None,
            {"model.micro_batch_size": 1},
        ),
        (layout.tensor < job.machine.gpus_per_node, twice),
        (True, {PP: 2 * layout.pipeline}),
    ]


def _faster(job: Job, step: StepBound) -> list[tuple[bool, Change]]:
    # Changes of FLOPs or bytes. A bound does not see changes that hide or group them.
    model = job.cfg.model
    layout = job.layout
    size = model.reinforce.rollout_micro_batch_size
    is_generation = step.longest.name == "generation"
    splits = is_generation and not job.has_engine and size < job.batches.prompts_of_rank.most
    half = {
        TP: layout.tensor // 2,
        "model.sequence_parallel": model.sequence_parallel and layout.tensor > 2,
    }
    return [
        (job.cfg.trainer.precision != "bf16", {"trainer.precision": "bf16"}),
        (splits, {"model.reinforce.rollout_micro_batch_size": 2 * size}),
        (model.activations_checkpoint_granularity == "full", dict.fromkeys(_RECOMPUTE)),
        (layout.tensor > 1, half),
        (layout.pipeline > 1, {PP: layout.pipeline // 2}),
    ]
