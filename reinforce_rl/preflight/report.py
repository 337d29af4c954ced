"""Print the plan and the lower bound of a step, or return the bound as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.megatron.size import ModelSize
from reinforce_rl.policy.build import lora_settings
from reinforce_rl.preflight.hardware import Hardware
from reinforce_rl.preflight.lower_bound import Job, StepBound
from reinforce_rl.preflight.memory import RankMemory
from reinforce_rl.preflight.plan import BatchPlan, Share
from reinforce_rl.trainer.disk import DiskNeed, gigabytes
from reinforce_rl.trainer.inputs import Inputs, layout_of
from reinforce_rl.trainer.updates import total_steps, total_updates
from reinforce_rl.utils.console import Console

Tried = tuple[dict[str, Any], StepBound]  # a change as values by key, and the bound with it
LEAST_SHARE = 0.02  # of a phase's time; smaller parts are not printed
LEAST_BYTES = 1e6  # smaller collectives are not printed


def print_plan(
    console: Console,
    cfg: TrainConfig,
    inputs: Inputs,
    batches: BatchPlan,
    memory: list[RankMemory],
    *,
    gpu: bool,
) -> None:
    layout = layout_of(cfg)
    assert layout is not None and inputs.architecture is not None
    size = ModelSize.from_architecture(inputs.architecture, lora_settings(cfg))
    console.print(Text("\nRanks", style="bold"), Text(layout.grid()), sep="\n")
    if cfg.placement == "disaggregated":
        each = f"{cfg.generation_tensor_parallel_size} with each copy of the model"
        generators = f"{cfg.generation_ranks} more ranks"
        if cfg.uses_external_generators:
            generators = "Programs that register (reinforce-rl generate)"
        console.print(Text(f"{generators} generate, {each}; their memory is not in this plan"))
    print_rows(console, "Batches", _batches(cfg, batches))
    _print_memory(console, memory, layout, size, gpu=gpu)
    if inputs.disk is not None:
        print_rows(console, "Disk", _disk(inputs.disk))


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))


def print_rows(console: Console, title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; rich's tables would cut paths at the terminal's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console.print(Text(f"\n{title}", style="bold"))
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        console.print(Text(f"  {'  '.join(cells)}".rstrip()))


def _batches(cfg: TrainConfig, plan: BatchPlan) -> list[tuple[str, str]]:
    g = plan.samples
    of_rank = plan.prompts_of_rank
    of_update = plan.prompts_of_update.least
    sequences = f"{of_update} prompts = {of_update * g} sequences"
    calls = _count(plan.validation_calls, "generation call")
    epoch = "not known: the prompts cannot be read"
    run = "not known: the prompts cannot be read"
    validates = cfg.model.data.data_prefix.validation and cfg.trainer.reinforce.val_check_interval
    validation = epoch if validates and plan.epoch is None else "none"
    if plan.validation is not None:
        validation = f"{plan.validation} prompts x 1 sample, {calls} a rank"
    if plan.epoch is not None:
        steps = _count(len(plan.epoch), "step")
        last = _count(plan.epoch[-1], "prompt")
        epoch = f"{sum(plan.epoch)} prompts = {steps}, the last of {last}"
        updates = total_updates(cfg.trainer.reinforce, cfg.prompts_per_update, plan.epoch)
        run_steps = _count(total_steps(cfg.trainer.reinforce, len(plan.epoch)), "step")
        run = f"{run_steps} = {updates} optimizer steps"
    return [
        (
            "a step",
            f"{plan.prompts} prompts x {g} samples = {plan.prompts * g} sequences, all ranks "
            "together",
        ),
        (
            "a data-parallel rank",
            f"{_range(of_rank)} prompts = {_range(of_rank, g)} sequences of a step",
        ),
        (
            "longest sequence",
            f"{plan.longest} tokens: prompt {plan.longest_prompt}, response the rest",
        ),
        (
            "generation",
            f"{_count(plan.generation_calls, 'call')} a rank and step, by {cfg.generation}",
        ),
        ("rewards", _rewards(cfg)),
        ("advantages", cfg.trainer.reinforce.advantage_estimator),
        (
            "log-probs",
            f"{_count(plan.forward_micro_batches, 'micro-batch')} a rank and step at full length",
        ),
        (
            "an optimizer step",
            f"{sequences}, {_count(plan.micro_batches, 'micro-batch')} a rank at full length",
        ),
        ("optimizer steps", f"{plan.updates} a step"),
        ("validation", validation),
        ("an epoch", epoch),
        ("the run", run),
    ]


def _disk(disk: DiskNeed) -> list[tuple[str, str]]:
    checkpoints = f"at most {disk.checkpoints} x {gigabytes(disk.checkpoint)} at a time"
    if disk.held:
        checkpoints += f", of which {gigabytes(disk.held)} are there already"
    records = f"at most {gigabytes(disk.records)} for the samples of all further steps"
    free = f"{gigabytes(disk.free)} in {disk.folder}, {gigabytes(disk.needed)} needed"
    return [
        ("checkpoints", checkpoints),
        ("export", gigabytes(disk.export) if disk.export else "none"),
        ("records", records),
        ("free", free),
    ]


def _rewards(cfg: TrainConfig) -> str:
    sources = [f"class {cfg.reward_class}"] if cfg.reward_class is not None else []
    if cfg.takes_environment_rewards:
        sources.append(f"environment {cfg.environment.name}")
    for server in cfg.reward_servers.values():
        places = server.ready_files or [str(address) for address in server.addresses]
        sources.append(f"server {server.name} at {' and '.join(places)}")
    sources += [f"function {section.name}" for section in cfg.reward_functions.values()]
    return ", ".join(sources)


def _count(number: int, name: str) -> str:
    if number == 1:
        return f"1 {name}"
    plural = f"{name}es" if name.endswith("ch") else f"{name}s"
    return f"{number} {plural}"


def _range(share: Share, times: int = 1) -> str:
    least = share.least * times
    most = share.most * times
    return f"{most}" if least == most else f"{least} to {most}"


def _print_memory(
    console: Console, memory: list[RankMemory], layout: Layout, size: ModelSize, *, gpu: bool
) -> None:
    largest = max(memory, key=lambda rank: rank.peak)
    shape = largest.shape
    there = resident(largest, gpu=gpu)
    which = f", the largest: those of stage {largest.stage}" if layout.pipeline > 1 else ""
    trained = "" if size.trained == size.parameters else f", {size.trained:,} trained"
    copy = largest.reference_on_host or largest.reference_on_device
    on_host = " in host memory" if gpu and largest.reference_on_host else ""
    where = "on the GPU" if gpu else "in host memory"
    title = f"Memory of a rank{which}, {where}, every sequence at full length"
    rows = [
        ("model", f"{size.parameters:,} parameters{trained}"),
        ("a rank", f"{shape.parameters:,} parameters on {shape.layers} layers"),
        ("weights", gigabytes(largest.weights)),
        ("gradients", f"{gigabytes(largest.gradients)} (fp32)"),
        ("optimizer", gigabytes(largest.optimizer)),
        ("reference", f"{gigabytes(copy)}{on_host}" if copy else "no copy"),
        ("there all the time", gigabytes(there)),
    ]
    print_rows(console, title, rows)
    table = _table("  besides, in", "activations", "logits", "KV cache", "moved", "with the rest")
    for phase in largest.phases:
        name = Text(f"  {phase.name}", style="bold" if phase is largest.peak_phase else "")
        parts = (phase.activations, phase.logits, phase.cache, phase.moved)
        table.add_row(name, *map(_signed_gigabytes, parts), gigabytes(phase.total + there))
    console.print(table)
    end = f"  peak: {gigabytes(largest.peak_phase.total + there)} in {largest.peak_phase.name}"
    if gpu and largest.on_host:
        end += f", and {gigabytes(largest.on_host)} of host memory a rank"
    if layout.ranks > 1:
        every = sum(rank.peak_phase.total + resident(rank, gpu=gpu) for rank in memory)
        in_all = gigabytes(every * (layout.ranks // layout.pipeline))
        end += f"; all {layout.ranks} ranks together {in_all}"
    console.print(Text(end))


def _signed_gigabytes(count: int) -> str:
    if not count:
        return "-"
    sign = "-" if count < 0 else ""
    return f"{sign}{gigabytes(abs(count))}"


def resident(rank: RankMemory, *, gpu: bool) -> int:
    """Return the bytes held throughout in the planned memory.

    On a CPU they include the reference in host memory.
    """
    return rank.held + (0 if gpu else rank.reference_on_host)


def print_bound(console: Console, job: Job, step: StepBound) -> None:
    machine = job.machine
    gpus = job.layout.ranks
    title = f"A step on {gpus} x {machine.name}: lower bound by FLOPs and bytes"
    console.print(Text(f"\n{title}", style="bold"))
    lengths = (
        f"of prompts of {job.mean.prompt} tokens and responses of {job.mean.response} on average"
    )
    if job.cfg.preflight_response_tokens is None:
        lengths += "; give preflight_response_tokens=MEAN where most are shorter"
    console.print(f"  {lengths}")
    console.print(_phase_table(step))
    speed = f"at least {_seconds(step.seconds)} s a step"
    speed += f", at most {step.tokens / step.seconds / gpus:,.0f} tokens/s a GPU"
    peak = f"{_peak_gigabytes(step, step.worst)} GB of tensors in {step.worst}"
    peak += f", of {machine.memory / 1e9:.0f} a GPU"
    if not step.fits:
        peak += ": does not fit"
    console.print(f"  {speed}; {peak}")
    collectives = _collective_table(machine, step)
    if collectives.row_count:
        console.print(collectives)
    longest = step.longest
    share = longest.seconds / step.seconds
    limit = f"{share:.0%} of the bound, limited by {longest.bound}"
    console.print(f"Longest phase: {longest.name}, {limit}.")
    hidden = sum(phase.seconds for phase in step.phases if "log-probs" in phase.name)
    if job.cfg.reward_servers and hidden:
        sequences = job.batches.prompts * job.batches.samples
        within = f"{sequences} sequences within {_seconds(hidden)} s"
        console.print(
            f"The reward server is not included: it costs nothing if it scores {within}, "
            "which the log-prob passes take at least."
        )


def _phase_table(step: StepBound) -> Table:
    columns = ("seconds at least", "bound by", "of it", "kernels", "TFLOP", "peak GB")
    table = _table("  phase", *columns)
    table.columns[2].justify = "left"
    table.columns[3].justify = "left"
    for phase in step.phases:
        parts = []
        for resource, seconds in phase.parts.items():
            if seconds > LEAST_SHARE * phase.seconds:
                parts.append(f"{resource} {_seconds(seconds)}")
        kernels = "-"
        tflop = "-"
        if phase.cost.counts:
            kernels = f"{phase.cost['kernels']:,.0f}"
            tflop = f"{phase.cost['flops'] / 1e12:,.1f}"
        peak = "-"
        if step.peaks.get(phase.name):
            peak = _peak_gigabytes(step, phase.name)
        cells = (_seconds(phase.seconds), phase.bound, ", ".join(parts), kernels, tflop, peak)
        table.add_row(f"  {phase.name}", *cells)
    return table


def _collective_table(machine: Hardware, step: StepBound) -> Table:
    table = _table("  collectives of a rank and step", "calls", "GB", "seconds at least")
    for phase in step.phases:
        for traffic, calls in phase.cost.calls.items():
            sent = phase.cost.sent[traffic]
            if calls >= 0.5 and sent > LEAST_BYTES:
                name = f"  {phase.name}: {traffic}"
                seconds = _seconds(machine.traffic_seconds(phase.cost, traffic))
                table.add_row(name, f"{calls:,.0f}", f"{sent / 1e9:,.2f}", seconds)
    return table


def _peak_gigabytes(step: StepBound, phase: str) -> str:
    return f"{step.peaks[phase] / 1e9:.1f}"


def print_alternatives(
    console: Console,
    step: StepBound,
    better: Sequence[Tried],
    tried: int,
) -> None:
    if not better:
        result = "lowers the bound" if step.fits else "makes it fit"
        console.print(f"None of the {tried} changes that were tried {result}.")
        return
    table = _table("What to try", "lower bound, s", "against now", "peak GB")
    for change, other in better:
        against = f"{other.seconds / step.seconds - 1:+.0%}"
        peak = _peak_gigabytes(other, other.worst)
        table.add_row(_overrides(change), _seconds(other.seconds), against, peak)
    console.print(table)


def _overrides(change: dict[str, Any]) -> str:
    return " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in change.items()
    )


def as_json(job: Job, step: StepBound, better: Sequence[Tried]) -> dict[str, Any]:
    """Return all printed numbers, in seconds, bytes and FLOPs."""
    phases = []
    for phase in step.phases:
        collectives = []
        for traffic, calls in phase.cost.calls.items():
            sent = phase.cost.sent[traffic]
            collectives.append({**traffic._asdict(), "calls": calls, "bytes": sent})
        phases.append(
            {
                "name": phase.name,
                "lower_bound_seconds": phase.seconds,
                "bound": phase.bound,
                "parts": dict(phase.parts),
                "counts": dict(phase.cost.counts),
                "collectives": collectives,
            }
        )
    changes = [{"overrides": _overrides(change), **_step(other)} for change, other in better]
    return {
        "machine": job.machine.name,
        "ranks": job.layout.ranks,
        "prompt_tokens": {"mean": job.mean.prompt, "longest": job.full.prompt},
        "response_tokens": {"mean": job.mean.response, "longest": job.full.response},
        **_step(step),
        "phases": phases,
        "changes": changes,
    }


def _step(step: StepBound) -> dict[str, Any]:
    return {
        "lower_bound_seconds": step.seconds,
        "tokens": step.tokens,
        "peaks": dict(step.peaks),
        "fits": step.fits,
    }


def _table(first: str, *others: str) -> Table:
    columns = (Column(name, justify="right") for name in others)
    return Table(first, *columns, box=None, padding=(0, 2), header_style="italic")


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
