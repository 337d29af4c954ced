"""`preflight=deep`: measure the run's ranks on fake GPUs, predict its step, and try what might be better."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console

from reinforce_rl.build_actor import DTYPES, model_options
from reinforce_rl.config import TrainConfig
from reinforce_rl.errors import ConfigError
from reinforce_rl.files import write_atomically
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.transformer_config import layers_of_stages
from reinforce_rl.preflight.deep.alternatives import Change, alternatives, fits
from reinforce_rl.preflight.deep.engine import Lengths
from reinforce_rl.preflight.deep.machine import Machine, load_machine
from reinforce_rl.preflight.deep.report import Tried, as_json, print_alternatives, print_step
from reinforce_rl.preflight.deep.step import Job, StepTime, predict
from reinforce_rl.preflight.deep.worker import DeepFault, Worker
from reinforce_rl.preflight.inputs import Inputs, layout_of
from reinforce_rl.preflight.plan import plan_batches

MOST_TRIED, MOST_TOLD = 4, 3
BETTER = 0.97  # of the seconds of a step, from which on a change is worth telling


def deep(cfg: TrainConfig, inputs: Inputs, console: Console) -> list[str]:
    """Print what a step costs and what to change, and write it to `preflight.json` in the run's folder.

    Args:
        cfg: of the run, without faults.
        inputs: its model and prompts.
        console: where to.

    Returns:
        what would end the run, one sentence each.

    Raises:
        ConfigError: of `preflight_machine`.
    """
    machine = load_machine(cfg.preflight_machine)
    job = job_of(cfg, inputs, machine)
    if job is None:
        return []
    with (
        console.status("fake GPU: starting") as status,
        Worker(lambda text: status.update(f"fake GPU: {text}")) as worker,
    ):
        try:
            step = predict(job, worker.measure(job))
        except DeepFault as error:
            return [str(error)]
        print_step(console, job, step)
        tried = _try(worker, job, inputs, step)
    better = [one for one in tried if one.fits and (not fits(step, job) or one.step.seconds < BETTER * step.seconds)]
    better = sorted(better, key=lambda one: one.step.seconds)[:MOST_TOLD]
    print_alternatives(console, step, better, len(tried))
    folder = Path(cfg.exp_manager.explicit_log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "preflight.json", json.dumps(as_json(job, step, better), indent=1))
    console.print(f"\nThe same as JSON: {folder / 'preflight.json'}")
    if not fits(step, job):
        room, phase = machine.memory - machine.reserved, max(step.peaks, key=lambda name: step.peaks[name])
        return [
            f"a rank needs {step.peak / 1e9:.1f} GB in {phase}, and a {machine.name} has {room / 1e9:.1f} GB for "
            "tensors; see the changes that fit"
        ]
    return []


def job_of(cfg: TrainConfig, inputs: Inputs, machine: Machine) -> Job | None:
    """What is to be predicted; None where the model or its layout cannot be read, which `inputs` says."""
    layout = layout_of(cfg)
    if inputs.architecture is None or layout is None:
        return None
    layers = _layers(cfg, inputs.architecture)
    if layers is None:
        return None
    lengths = Lengths(cfg.model.reinforce.length_params.max_length, cfg.preflight_response_tokens)
    batches = plan_batches(cfg, layout, inputs.datasets)
    machine = dataclasses.replace(machine, gpus_per_node=min(machine.gpus_per_node, cfg.trainer.devices))
    return Job(cfg, inputs.architecture, layout, layers, batches, machine, lengths)


def _layers(cfg: TrainConfig, architecture: Architecture) -> tuple[int, ...] | None:
    layout = layout_of(cfg)
    if layout is None:
        return None
    try:
        dtype = getattr(torch, DTYPES[cfg.trainer.precision])
        return tuple(layers_of_stages(architecture, layout, dtype, model_options(cfg)))
    except ConfigError:
        return None


def _try(worker: Worker, job: Job, inputs: Inputs, step: StepTime) -> list[Tried]:
    tried: list[Tried] = []
    for change, cfg in alternatives(job, step):
        if len(tried) == MOST_TRIED:
            break
        other = job_of(cfg, inputs, job.machine)
        if other is None:
            continue
        try:
            found = predict(other, worker.measure(other))
        except DeepFault:
            continue
        tried.append(Tried(change, found, fits(found, other)))
    return tried


__all__ = ["Change", "deep", "job_of"]
