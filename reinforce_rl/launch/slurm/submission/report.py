"""The plan of a job as people read it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from reinforce_rl.launch.slurm.submission.cluster import Fit
from reinforce_rl.launch.slurm.submission.options import PLANNED
from reinforce_rl.launch.slurm.submission.plan import Component, JobPlan


def print_job(console: Console, plan: JobPlan, fit: Fit | None) -> None:
    """Components, times and folders.

    Args:
        console: where to.
        plan: of the job.
        fit: what the cluster has; None where it was not asked.
    """
    console.print(Text("\nJob", style="bold"))
    free = ("not known", "not known") if fit is None or fit.faults else tuple(f"{count} nodes" for count in fit.free)
    components = [
        ["", "name", "partition", "nodes", "ranks", "tasks a node", "CPUs a node", "GPUs a node", "free now"]
    ]
    components += [_column(*pair) for pair in zip((0, 1), (plan.server, plan.actor), free, strict=True)]
    _print_rows(console, list(zip(*components, strict=True)))
    rows = [
        ("time", f"{plan.time}{'' if plan.seconds is None else f' = {plan.seconds} s'}"),
        (
            "signal to save",
            f"{plan.lead} s before the limit" if plan.seconds is not None else "none: there is no limit",
        ),
        ("jobs", "1" if plan.chain == 1 else f"{plan.chain}, each after the end of the one before"),
        ("run", str(plan.run_dir)),
        ("output", f"{plan.folder}/JOBID.out, of tasks {plan.folder}/JOBID-RESTART/"),
        *((name, value) for name, value in plan.variables if name not in PLANNED),
    ]
    console.print()
    _print_rows(console, rows)


def print_command(console: Console, plan: JobPlan) -> None:
    """What is handed to Slurm, as it can be pasted: a line for the variables, each component, and the program.

    Args:
        console: where to.
        plan: of the job.
    """
    lines = [["env", *(f"{name}={value}" for name, value in plan.variables)], []]
    for argument in plan.command():
        if argument in (":", str(plan.batch_file)):
            lines.append([])
        lines[-1].append(argument)
    console.print(Text("\nCommand", style="bold"))
    console.print(Text(" \\\n    ".join(shlex.join(line) for line in lines)))


def _column(number: int, component: Component, free: str) -> list[str]:
    ranks = component.nodes * component.ranks_per_node
    return [
        f"{number}: {component.name}",
        component.job_name,
        component.options.partition or "the default one",
        str(component.nodes),
        f"{component.nodes} x {component.ranks_per_node} = {ranks}",
        str(component.tasks_per_node),
        str(component.cpus_per_node),
        str(component.gpus or "none"),
        free,
    ]


def _print_rows(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """In columns. Not a table of rich's, which would cut paths where the terminal ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        console.print(Text(f"  {'  '.join(cells)}".rstrip()))
