"""Main program of `slurm/submit.py`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, ConfigError
from reinforce_rl.launch.slurm.commands import SlurmCallError, call
from reinforce_rl.launch.slurm.history import HISTORY_FILE, History, finished
from reinforce_rl.launch.slurm.submission.cluster import SUBMIT_SECONDS, Start, ask_cluster, record_submitted
from reinforce_rl.launch.slurm.submission.options import PLANNED, parse_options
from reinforce_rl.launch.slurm.submission.plan import Component, JobPlan
from reinforce_rl.launch.slurm.submission.request import make_request
from reinforce_rl.preflight.report import print_warnings
from reinforce_rl.preflight.run import wide_console

REPOSITORY = Path(__file__).resolve().parents[4]
# All others may belong to an enclosing allocation; the job would take them for its own.
KEPT_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Plan, check, print and submit `[options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]`.

    Returns:
        0 if the jobs were submitted (or would be, in a dry run) or the run has finished; else 1.
    """
    errors = console or Console(stderr=True, highlight=False, soft_wrap=True)
    console = console or wide_console()
    options = parse_options(argv, os.environ)
    request = make_request(options, os.environ, REPOSITORY, console)
    plan = request.plan
    environment = {} if plan is None else job_environment(plan, os.environ)
    cluster = ask_cluster(request.run_dir, plan, request.actor_megabytes, environment)
    if plan is not None:
        print_job(console, plan, cluster.starts)
    print_warnings(console, [*request.warnings, *cluster.warnings])
    faults = [*request.faults, *cluster.faults]
    if not options.dry_run:
        faults += cluster.unchecked
    elif cluster.unchecked:
        console.print("\nNot checked:", *(f"  {reason}" for reason in cluster.unchecked), sep="\n", markup=False)
    if faults or plan is None:
        errors.print(f"error: {ConfigError(faults)}\nNothing was submitted.", style="red", markup=False)
        return EXIT_ERROR
    print_command(console, plan)
    attempts = History(plan.folder / HISTORY_FILE).attempts()
    if text := finished(plan.run_dir, attempts, (plan.actor_args, plan.server_args)):
        console.print(f"\n{text}. Nothing was submitted.", markup=False)
        return EXIT_FINISHED
    if options.dry_run:
        console.print("\nNo fault was found. Nothing was submitted.")
        return EXIT_FINISHED
    return _submit(plan, environment, console, errors)


def job_environment(plan: JobPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without variables of an enclosing allocation, plus those of the plan."""
    foreign = ("SLURM_", "PMI_", "PMIX_")
    kept = {k: v for k, v in environment.items() if not k.startswith(foreign) or k in KEPT_SLURM_VARIABLES}
    return {**kept, **dict(plan.variables)}


def _submit(plan: JobPlan, environment: Mapping[str, str], console: Console, errors: Console) -> int:
    """Submit the chain, each job after the previous one; return the exit code."""
    jobs: list[str] = []
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(plan.chain):
            command = plan.command(after=jobs[-1] if jobs else None)
            out = call(command, seconds=SUBMIT_SECONDS, base=environment)
            jobs.append(out.strip().split(";")[0])  # ID;CLUSTER with several clusters
            record_submitted(plan.folder, jobs[-1], plan.server.job_name)
    except OSError as error:
        errors.print(f"error: exp_manager.explicit_log_dir is {plan.run_dir}: {error}", style="red", markup=False)
    except SlurmCallError as error:
        errors.print(
            f"error: sbatch did not take job {len(jobs) + 1} of {plan.chain}: {error.said}", style="red", markup=False
        )
    if not jobs:
        errors.print("Nothing was submitted.")
        return EXIT_ERROR
    console.print(f"\nSubmitted: {' then '.join(jobs)}")
    console.print(
        f"  look      squeue -j {','.join(jobs)}\n"
        f"  output    tail -F {plan.folder}/{jobs[0]}.out\n"
        f"  state     {plan.run_dir}/status.json\n"
        f"  cancel    scancel {' '.join(jobs)}",
        markup=False,
    )
    return EXIT_FINISHED if len(jobs) == plan.chain else EXIT_ERROR


def print_job(console: Console, plan: JobPlan, starts: Sequence[Start | None]) -> None:
    """Print components, times and folders; `starts` are Slurm's estimates, None if unknown."""
    console.print(Text("\nJob", style="bold"))
    columns = [
        ["", "name", "partition", "nodes", "ranks", "tasks a node", "CPUs a node", "GPUs a node", "could start"]
    ]
    for number, (component, start) in enumerate(zip((plan.server, plan.actor), starts, strict=True)):
        columns.append(_column(number, component, start))
    _print_rows(console, list(zip(*columns, strict=True)))
    limited = plan.seconds is not None
    rows = [
        ("time", f"{plan.time} = {plan.seconds} s" if limited else plan.time),
        ("signal to save", f"{plan.lead} s before the limit" if limited else "none: there is no limit"),
        ("jobs", "1" if plan.chain == 1 else f"{plan.chain}, each after the end of the one before"),
        ("run", str(plan.run_dir)),
        ("output", f"{plan.folder}/JOBID.out, of tasks {plan.folder}/JOBID-RESTART/"),
        *((name, value) for name, value in plan.variables if name not in PLANNED),
    ]
    console.print()
    _print_rows(console, rows)


def print_command(console: Console, plan: JobPlan) -> None:
    """Print the command for pasting: a line each for the variables, each component, and the program."""
    lines = [["env", *(f"{name}={value}" for name, value in plan.variables)], []]
    for argument in plan.command():
        if argument in (":", str(plan.batch_file)):
            lines.append([])
        lines[-1].append(argument)
    console.print(Text("\nCommand", style="bold"))
    console.print(Text(" \\\n    ".join(shlex.join(line) for line in lines)))


def _column(number: int, component: Component, start: Start | None) -> list[str]:
    ranks = component.nodes * component.ranks_per_node
    return [
        f"{number}: {component.name}",
        component.job_name,
        component.options.partition or "the default one",
        str(component.nodes),
        f"{component.nodes} x {component.ranks_per_node} = {ranks}",
        str(component.tasks_per_node),
        str(component.cpus_per_node),
        component.gpus or "none",
        f"{start.time} on {start.nodes}" if start else "not known",
    ]


def _print_rows(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; rich's tables would cut paths at the terminal's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        console.print(Text(f"  {'  '.join(cells)}".rstrip()))
