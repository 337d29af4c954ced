"""The deep preflight as people and programs read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reinforce_rl.preflight.deep.alternatives import Change
from reinforce_rl.preflight.deep.step import PredictedJob, StepTime

LEAST_SHARE, LEAST_BYTES = 0.02, 1e6  # of what is printed of a phase's parts and of its collectives


@dataclass(frozen=True)
class Tried:
    """A change and what it gives."""

    change: Change
    step: StepTime

    def __str__(self) -> str:
        return " ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.change.items()
        )


def print_step(console: Console, job: PredictedJob, step: StepTime) -> None:
    """Seconds, memory, collectives, and the bottleneck."""
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
    """Changes that help, the best first."""
    if not better:
        console.print(f"None of the {tried} changes that were tried is better.")
        return
    table = _table("What to change", "seconds a step", "against now", "peak GB")
    for one in better:
        now, peak = f"{one.step.seconds / step.seconds - 1:+.0%}", one.step.peaks[one.step.worst]
        table.add_row(str(one), _seconds(one.step.seconds), now, f"{peak / 1e9:.1f}")
    console.print(table)


def as_json(job: PredictedJob, step: StepTime, better: Sequence[Tried]) -> dict[str, Any]:
    """Everything that is printed, as plain values: seconds, bytes, FLOPs."""
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
