"""Print the plan and the predicted step, or return them as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from reinforce_rl.config.parallelism import Layout
from reinforce_rl.preflight.deep.step import PredictedJob, StepTime
from reinforce_rl.preflight.memory import ModelSize, RankMemory
from reinforce_rl.preflight.plan import BatchPlan, DiskNeed, Share, gigabytes

_UNKNOWN = "not known: the prompts cannot be read"
LEAST_SHARE, LEAST_BYTES = 0.02, 1e6  # below these, parts and collectives of a phase are not printed


def print_plan(
    console: Console,
    layout: Layout,
    size: ModelSize,
    batches: BatchPlan,
    memory: Sequence[RankMemory],
    disk: DiskNeed | None,
    *,
    gpu: bool,
) -> None:
    console.print(Text("\nRanks", style="bold"), Text(layout.grid()), sep="\n")
    console.print(_batches(batches))
    console.print(*_memory(memory, layout, size, gpu=gpu), sep="\n")
    if disk is not None:
        console.print(_disk(disk))


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))


def _lines(title: str, rows: Sequence[tuple[str, str]]) -> Group:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(value))
    return Group(Text(f"\n{title}", style="bold"), table)


def _batches(plan: BatchPlan) -> Group:
    g = plan.samples
    of_rank, of_update = plan.prompts_of_rank, plan.prompts_of_update
    rows = [
        ("a step", f"{plan.prompts} prompts x {g} samples = {plan.prompts * g} sequences, all ranks together"),
        ("a data-parallel rank", f"{_range(of_rank)} prompts = {_range(of_rank, g)} sequences of a step"),
        ("longest sequence", f"{plan.longest} tokens: prompt {plan.longest_prompt}, response the rest"),
        ("generation", f"{_count(plan.generation_calls, 'call')} a rank and step"),
        ("log-probs", f"{_count(plan.forward_micro_batches, 'micro-batch')} a rank and step at full length"),
        (
            "an optimizer step",
            f"{of_update.least} prompts = {of_update.least * g} sequences, "
            f"{_count(plan.micro_batches, 'micro-batch')} a rank at full length",
        ),
        ("optimizer steps", f"{plan.updates} a step"),
        (
            "validation",
            "none"
            if plan.validation is None
            else f"{plan.validation} prompts x 1 sample, {_count(plan.validation_calls, 'generation call')} a rank",
        ),
        (
            "an epoch",
            _UNKNOWN
            if plan.steps_per_epoch is None
            else f"{plan.train_prompts} prompts = {_count(plan.steps_per_epoch, 'step')}, "
            f"the last of {_count(plan.last_batch or 0, 'prompt')}",
        ),
        (
            "the run",
            _UNKNOWN if plan.steps is None else f"{_count(plan.steps, 'step')} = {plan.total_updates} optimizer steps",
        ),
    ]
    return _lines("Batches", rows)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 'es' if name.endswith('ch') else 's'}"


def _range(share: Share, times: int = 1) -> str:
    least, most = share.least * times, share.most * times
    return f"{most}" if least == most else f"{least} to {most}"


def _memory(memory: Sequence[RankMemory], layout: Layout, size: ModelSize, *, gpu: bool) -> list[Group | Text | Table]:
    largest = max(memory, key=lambda rank: rank.peak)
    of_stage = layout.ranks // layout.pipeline
    total = sum(rank.peak * of_stage for rank in memory)
    fixed, shape = largest.states, largest.shape
    where = "on the GPU" if gpu else "in host memory"
    which = f", the largest: those of stage {largest.stage}" if layout.pipeline > 1 else ""
    trained = "" if size.trained == size.parameters else f", {size.trained:,} trained"
    rows = [
        ("model", f"{size.parameters:,} parameters{trained}"),
        ("a rank", f"{shape.parameters:,} parameters on {shape.layers} layers"),
        ("weights", gigabytes(fixed.weights)),
        ("gradients", f"{gigabytes(fixed.gradients)} (fp32)"),
        ("optimizer", gigabytes(fixed.optimizer)),
        ("reference", _reference(largest, gpu=gpu)),
        ("there all the time", gigabytes(resident(largest, gpu=gpu))),
    ]
    table = Table(box=None, padding=(0, 2), header_style="italic")
    for name in ("  besides, in", "activations", "logits", "KV cache", "moved", "with the rest"):
        table.add_column(name, justify="left" if name.startswith("  ") else "right", no_wrap=True)
    for phase in largest.phases:
        name = Text(f"  {phase.name}", style="bold" if phase is largest.peak_phase else "")
        parts = [gigabytes(count) if count else "-" for count in (phase.activations, phase.logits, phase.cache)]
        moved = "-" if not phase.moved else f"{'-' if phase.moved < 0 else ''}{gigabytes(abs(phase.moved))}"
        table.add_row(name, *parts, moved, gigabytes(phase.total + resident(largest, gpu=gpu)))
    peak = largest.peak_phase.total + resident(largest, gpu=gpu)
    end = f"  peak: {gigabytes(peak)} in {largest.peak_phase.name}"
    if gpu and largest.on_host:
        end += f", and {gigabytes(largest.on_host)} of host memory a rank"
    if layout.ranks > 1:
        shared = sum(rank.states.reference_on_host * of_stage for rank in memory) if not gpu else 0
        end += f"; all {layout.ranks} ranks together {gigabytes(total + shared)}"
    title = f"Memory of a rank{which}, {where}, every sequence at full length"
    return [_lines(title, rows), table, Text(end)]


def resident(rank: RankMemory, *, gpu: bool) -> int:
    """Return the bytes held throughout in the planned memory, which on a CPU includes the host's."""
    return rank.states.on_device + (0 if gpu else rank.states.reference_on_host)


def _reference(rank: RankMemory, *, gpu: bool) -> str:
    fixed = rank.states
    if fixed.reference_on_host:
        return gigabytes(fixed.reference_on_host) + (" in host memory" if gpu else "")
    return gigabytes(fixed.reference_on_device) if fixed.reference_on_device else "no copy"


def _disk(disk: DiskNeed) -> Group:
    held = f", of which {gigabytes(disk.held)} are there already" if disk.held else ""
    rows = [
        ("checkpoints", f"at most {disk.checkpoints} x {gigabytes(disk.checkpoint)} at a time{held}"),
        ("export", gigabytes(disk.export) if disk.export else "none"),
        ("free", f"{gigabytes(disk.free)} in {disk.folder}, {gigabytes(disk.needed)} needed"),
    ]
    return _lines("Disk", rows)


@dataclass(frozen=True)
class Tried:
    change: dict[str, Any]  # values by key
    step: StepTime

    def __str__(self) -> str:
        return " ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.change.items()
        )


def print_step(console: Console, job: PredictedJob, step: StepTime) -> None:
    machine, gpus, average = job.machine, job.layout.ranks, job.lengths.average
    console.print(Text(f"\nA step on {gpus} x {machine.name}, predicted", style="bold"))
    hint = "; give preflight_response_tokens=MEAN where most are shorter" if job.lengths.mean is None else ""
    console.print(f"  responses of {average:.0f} tokens on average, {job.lengths.longest} at most{hint}")
    table = _table("  phase", "seconds", "bound by", "of it", "kernels", "TFLOP", "peak GB")
    table.columns[3].justify = table.columns[2].justify = "left"
    for phase in step.phases:
        least, counted, peak = LEAST_SHARE * phase.seconds, bool(phase.cost.counts), step.peaks.get(phase.name)
        parts = [f"{name} {_seconds(part)}" for name, part in phase.parts.items() if part > least]
        kernels, tflop = f"{phase.cost['kernels']:,.0f}", f"{phase.cost['flops'] / 1e12:,.1f}"
        cells = (kernels if counted else "-", tflop if counted else "-", f"{peak / 1e9:.1f}" if peak else "-")
        table.add_row(f"  {phase.name}", _seconds(phase.seconds), phase.bound, ", ".join(parts), *cells)
    console.print(table)
    console.print(
        f"  {_seconds(step.seconds)} s a step, {step.tokens / step.seconds / gpus:,.0f} tokens/s a GPU; "
        f"{step.peaks[step.worst] / 1e9:.1f} GB of tensors in {step.worst}, of {machine.memory / 1e9:.0f} a GPU"
        + ("" if step.fits else ": does not fit")
    )
    wires = _table("  collectives of a rank and step", "calls", "GB", "seconds")
    for phase in step.phases:
        for of, calls in phase.cost.calls.items():
            if calls >= 0.5 and (sent := phase.cost.sent[of]) > LEAST_BYTES:
                cells = (f"{calls:,.0f}", f"{sent / 1e9:,.2f}", _seconds(phase.cost.seconds_of(of, machine)))
                wires.add_row(f"  {phase.name}: {of}", *cells)
    if wires.row_count:
        console.print(wires)
    slowest = step.slowest
    share = slowest.seconds / step.seconds
    console.print(f"Bottleneck: {slowest.name} takes {share:.0%} of the step, most of it {slowest.bound}.")
    hidden = sum(phase.seconds for phase in step.phases if "log-probs" in phase.name)
    if job.cfg.reward == "server" and hidden:
        console.print(
            f"The reward server is not in it: it costs nothing while it scores {job.sequences} sequences within "
            f"{_seconds(hidden)} s, the log-prob passes, {step.tokens / hidden:,.0f} tokens/s."
        )


def print_alternatives(console: Console, step: StepTime, better: Sequence[Tried], tried: int) -> None:
    if not better:
        console.print(f"None of the {tried} changes that were tried is better.")
        return
    table = _table("What to change", "seconds a step", "against now", "peak GB")
    for one in better:
        now, peak = f"{one.step.seconds / step.seconds - 1:+.0%}", one.step.peaks[one.step.worst]
        table.add_row(str(one), _seconds(one.step.seconds), now, f"{peak / 1e9:.1f}")
    console.print(table)


def as_json(job: PredictedJob, step: StepTime, better: Sequence[Tried]) -> dict[str, Any]:
    """Return everything printed as plain values, in seconds, bytes and FLOPs."""
    return {
        "machine": job.machine.name,
        "ranks": job.layout.ranks,
        "response_tokens": {"average": job.lengths.average, "longest": job.lengths.longest},
        **_step(step),
        "phases": [
            {
                "name": phase.name,
                "seconds": phase.seconds,
                "bound": phase.bound,
                "parts": phase.parts,
                "counts": dict(phase.cost.counts),
                "collectives": [
                    {**of._asdict(), "calls": calls, "bytes": phase.cost.sent[of]}
                    for of, calls in phase.cost.calls.items()
                ],
            }
            for phase in step.phases
        ],
        "changes": [{"overrides": str(one), **_step(one.step)} for one in better],
    }


def _step(step: StepTime) -> dict[str, Any]:
    return {"seconds": step.seconds, "tokens": step.tokens, "peaks": step.peaks, "fits": step.fits}


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="italic")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
