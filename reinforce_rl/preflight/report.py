"""The plan as people read it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from reinforce_rl.config.parallelism import Layout
from reinforce_rl.preflight.disk import DiskNeed, gigabytes
from reinforce_rl.preflight.memory import RankMemory
from reinforce_rl.preflight.plan import BatchPlan, Share
from reinforce_rl.preflight.shapes import ModelSize

_UNKNOWN = "not known: the prompts cannot be read"


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
    """Everything of a plan but its faults and warnings."""
    console.print(Text("\nRanks", style="bold"), Text(layout.grid()), sep="\n")
    console.print(_batches(batches))
    console.print(*_memory(memory, layout, size, gpu=gpu), sep="\n")
    if disk is not None:
        console.print(_disk(disk))


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    """What may be wrong, and ends nothing."""
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
    """Bytes that are there all the time in the memory that the plan is about; on a CPU the host's is the same one."""
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
