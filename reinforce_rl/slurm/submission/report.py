"""The plan of a job as people read it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reinforce_rl.slurm.submission.cluster import Fit
from reinforce_rl.slurm.submission.plan import Component, JobPlan


def print_job(console: Console, plan: JobPlan, fit: Fit | None) -> None:
    """Components, times, folders and the command.

    Args:
        console: where to.
        plan: of the job.
        fit: what the cluster has; None where it was not asked.
    """
    console.print(Text("\nJob", style="bold"))
    table = Table(box=None, padding=(0, 2), header_style="italic")
    for name in ("  component", "name", "nodes", "tasks a node", "ranks", "CPUs a node", "GPUs a node", "partition"):
        table.add_column(name, no_wrap=True)
    if fit is not None:
        table.add_column("free now", no_wrap=True)
    for number, component in enumerate((plan.server, plan.actor)):
        free = [] if fit is None else [f"{fit.free[number]} nodes"]
        table.add_row(*_row(number, component), *free)
    console.print(table)
    rows = [
        ("time", f"{plan.time}{'' if plan.seconds is None else f' = {plan.seconds} s'}"),
        ("signal", f"{plan.lead} s before the limit" if plan.seconds is not None else "none: there is no limit"),
        ("jobs", "1" if plan.chain == 1 else f"{plan.chain}, each after the end of the one before"),
        ("run", str(plan.run_dir)),
        ("output", f"{plan.folder}/JOBID.out, logs of tasks in {plan.folder}/JOBID-RESTART/"),
        *plan.variables,
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    for name, value in rows:
        grid.add_row(Text(f"  {name}"), Text(value))
    console.print(grid)
    console.print(Text("\nCommand", style="bold"))
    console.print(Text(_shell(plan)))


def print_notes(console: Console, label: str, notes: Sequence[str]) -> None:
    """Lines that end nothing.

    Args:
        console: where to.
        label: before each.
        notes: the lines.
    """
    for note in notes:
        console.print(Text.assemble((f"{label}: ", "yellow"), note))


def _row(number: int, component: Component) -> list[str]:
    ranks = component.nodes * component.ranks_per_node
    return [
        f"  {number} {component.name}",
        component.job_name,
        str(component.nodes),
        str(component.tasks_per_node),
        f"{component.nodes} x {component.ranks_per_node} = {ranks}",
        str(component.cpus_per_node),
        str(component.gpus or "none"),
        component.options.partition or "default",
    ]


def _shell(plan: JobPlan) -> str:
    """The command as it can be pasted, a line an argument group."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in plan.variables]
    lines: list[list[str]] = [["env", *variables], []]
    for argument in plan.command():
        if argument == ":" or argument == str(plan.batch_file):
            lines.append([])
        lines[-1].append(shlex.quote(argument))
    return " \\\n    ".join(" ".join(line) for line in lines)
