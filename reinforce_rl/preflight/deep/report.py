"""The deep preflight as people and programs read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reinforce_rl.preflight.deep.alternatives import Change, fits
from reinforce_rl.preflight.deep.step import Job, StepTime


@dataclass(frozen=True)
class Tried:
    """A change and what it gives."""

    change: Change
    step: StepTime
    fits: bool

    def __str__(self) -> str:
        return " ".join(f"{key}={_plain(value)}" for key, value in self.change.items())


def print_step(console: Console, job: Job, step: StepTime) -> None:
    """Seconds, memory, collectives, and the bottleneck."""
    machine = job.machine
    console.print(Text(f"\nA step on {job.layout.ranks} x {machine.name}, predicted; nothing was run", style="bold"))
    known = job.lengths.average < job.lengths.longest
    console.print(
        f"  responses of {job.lengths.average:.0f} tokens on average, {job.lengths.longest} at most"
        + ("" if known else "; give preflight_response_tokens=MEAN where most are shorter")
    )
    table = _table("  phase", "seconds", "bound by", "of it", "kernels", "TFLOP", "peak GB")
    table.columns[3].justify = table.columns[2].justify = "left"
    for phase in step.phases:
        parts = ", ".join(f"{name} {_seconds(s)}" for name, s in phase.parts.items() if s > 0.02 * phase.seconds)
        peak = step.peaks.get(phase.name)
        table.add_row(
            f"  {phase.name}",
            _seconds(phase.seconds),
            phase.bound,
            parts,
            f"{phase.cost['kernels']:,.0f}" if phase.cost.counts else "-",
            f"{phase.cost['flops'] / 1e12:,.1f}" if phase.cost.counts else "-",
            f"{peak / 1e9:.1f}" if peak else "-",
        )
    console.print(table)
    gpus, worst = job.layout.ranks, max(step.peaks, key=lambda name: step.peaks[name])
    console.print(
        f"  {_seconds(step.seconds)} s a step, {step.tokens / step.seconds / gpus:,.0f} tokens/s a GPU, "
        f"{step.peak / 1e9:.1f} GB of {machine.memory / 1e9:.0f} a GPU in {worst}"
        + ("" if fits(step, job) else ": does not fit")
    )
    wires = _table("  collectives of a rank and step", "calls", "GB", "seconds")
    for phase in step.phases:
        for of, calls in phase.cost.calls.items():
            if calls >= 0.5 and phase.cost.sent[of] > 1e6:
                seconds = calls * machine.collective_seconds(of.kind, phase.cost.sent[of] / calls, of.ranks, of.nodes)
                row = (f"{calls:,.0f}", f"{phase.cost.sent[of] / 1e9:,.2f}", _seconds(seconds))
                wires.add_row(f"  {phase.name}: {of}", *row)
    if wires.row_count:
        console.print(wires)
    slowest = step.slowest
    console.print(
        f"Bottleneck: {slowest.name} takes {slowest.seconds / step.seconds:.0%} of the step, "
        f"most of it {slowest.bound}."
    )
    hidden = sum(phase.seconds for phase in step.phases if "log-probs" in phase.name)
    if job.cfg.reward == "server" and hidden:
        console.print(
            f"The reward server is not in it. It costs nothing while it scores {job.sequences} sequences within "
            f"{_seconds(hidden)} s, the log-prob passes: {step.tokens / hidden:,.0f} tokens/s."
        )


def print_alternatives(console: Console, step: StepTime, better: Sequence[Tried], tried: int) -> None:
    """Changes that help, the best first."""
    if not better:
        console.print(f"None of {tried} changes that were tried is better." if tried else "Nothing to try was found.")
        return
    table = _table("What to change", "seconds a step", "against now", "peak GB")
    for one in better:
        seconds = one.step.seconds
        table.add_row(str(one), _seconds(seconds), f"{seconds / step.seconds - 1:+.0%}", f"{one.step.peak / 1e9:.1f}")
    console.print(table)


def as_json(job: Job, step: StepTime, better: Sequence[Tried]) -> dict[str, Any]:
    """Everything that is printed, as plain values: seconds, bytes, FLOPs."""
    return {
        "machine": job.machine.name,
        "ranks": job.layout.ranks,
        "response_tokens": {"average": job.lengths.average, "longest": job.lengths.longest},
        **_step(step),
        "fits": fits(step, job),
        "phases": [
            {
                "name": phase.name,
                "seconds": phase.seconds,
                "bound": phase.bound,
                "parts": phase.parts,
                **phase.cost.counts,
                "collectives": [
                    {
                        "group": of.group,
                        "kind": of.kind,
                        "ranks": of.ranks,
                        "nodes": of.nodes,
                        "calls": calls,
                        "bytes": phase.cost.sent[of],
                    }
                    for of, calls in phase.cost.calls.items()
                ],
            }
            for phase in step.phases
        ],
        "changes": [{"overrides": str(one), **_step(one.step)} for one in better],
    }


def _step(step: StepTime) -> dict[str, Any]:
    return {"seconds": step.seconds, "tokens": step.tokens, "peak_bytes": step.peak, "peaks": step.peaks}


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="italic")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
