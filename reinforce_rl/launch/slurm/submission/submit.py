"""The program behind `slurm/submit.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, ConfigError
from reinforce_rl.launch.slurm.calls import SlurmCallError, call, node_names
from reinforce_rl.launch.slurm.history import HISTORY_FILE, History, finished
from reinforce_rl.launch.slurm.submission import run_state
from reinforce_rl.launch.slurm.submission.cluster import SINFO, Fit, check_totals, parse_sinfo
from reinforce_rl.launch.slurm.submission.options import parse_options
from reinforce_rl.launch.slurm.submission.plan import JobPlan
from reinforce_rl.launch.slurm.submission.report import print_command, print_job
from reinforce_rl.launch.slurm.submission.request import Request, make_request
from reinforce_rl.preflight.report import print_warnings
from reinforce_rl.preflight.run import wide_console

REPOSITORY = Path(__file__).resolve().parents[4]
SUBMIT_SECONDS = 120.0
# Of an allocation that this process may be part of: the job would take them for its own.
KEPT_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Plan, check, print and submit.

    Args:
        argv: [options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]
        console: where to; None for the standard output, and errors to the other.

    Returns:
        the exit code: 0 where the jobs were submitted, or would be, or the run has finished; else 1.
    """
    errors = console or Console(stderr=True, highlight=False, soft_wrap=True)
    console = console or wide_console()
    options = parse_options(argv, os.environ)
    request = make_request(options, os.environ, REPOSITORY, console)
    cluster = _ask_cluster(request)
    plan = request.plan
    if plan is not None:
        print_job(console, plan, cluster.fit)
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
    return _submit(plan, console, errors)


@dataclass
class _Cluster:
    """What Slurm said about a request.

    Attributes:
        fit: None where it was not asked.
        faults, warnings: one sentence each.
        unchecked: what could not be, and why.
    """

    fit: Fit | None = None
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def _ask_cluster(request: Request) -> _Cluster:
    found = _Cluster()
    if shutil.which("sbatch") is None:
        found.unchecked.append(
            "sbatch is not on the PATH, so nodes, queue and sbatch --test-only could not be asked; submit from a "
            "machine that has Slurm's commands"
        )
        return found
    try:
        queued = run_state.still_queued(request.run_dir)
    except SlurmCallError as error:
        found.unchecked.append(f"whether this run is in the queue already: {error}")
    else:
        found.faults += [queued] if queued else []
    plan = request.plan
    if plan is None:
        return found
    try:
        found.fit = _fit(plan)
    except SlurmCallError as error:
        found.unchecked.append(f"whether the cluster's nodes suffice: {error}")
    else:
        found.faults += found.fit.faults
        there = found.fit.actor_megabytes
        if request.actor_megabytes and there and request.actor_megabytes > there and not plan.actor.megabytes:
            found.warnings.append(
                f"the actor's ranks need up to {request.actor_megabytes} MB of host memory a node, and there are "
                f"nodes with {there} MB"
            )
    if not found.faults:  # else it would say the same again, in other words
        found.faults += _test(plan, job_environment(plan, os.environ))
    return found


def _fit(plan: JobPlan) -> Fit:
    components = (plan.server, plan.actor)
    lists = {hosts for own in components for hosts in (own.options.nodelist, own.options.exclude) if hosts}
    hosts = {text: frozenset(node_names(text)) for text in sorted(lists)}
    return check_totals(*components, parse_sinfo(call(SINFO)), plan.seconds, hosts)


def _test(plan: JobPlan, environment: Mapping[str, str]) -> list[str]:
    """What sbatch has against the job; where it is one component, which one."""
    try:
        call(plan.command(test_only=True), seconds=SUBMIT_SECONDS, base=environment)
        return []
    except SlurmCallError as error:
        whole = error
    faults = []
    for component in (plan.server, plan.actor):
        try:
            call(plan.test_command(component), seconds=SUBMIT_SECONDS, base=environment)
        except SlurmCallError as error:
            said = " ".join(error.said.split())
            faults.append(f"sbatch --test-only refuses the component of the {component.name}: {said}")
    return faults or [f"sbatch --test-only refuses the job: {' '.join(whole.said.split())}"]


def job_environment(plan: JobPlan, environment: Mapping[str, str]) -> dict[str, str]:
    """What sbatch hands to the job.

    Args:
        plan: of the job.
        environment: of this process.
    """
    foreign = ("SLURM_", "PMI_", "PMIX_")
    kept = {k: v for k, v in environment.items() if not k.startswith(foreign) or k in KEPT_SLURM_VARIABLES}
    return {**kept, **dict(plan.variables)}


def _submit(plan: JobPlan, console: Console, errors: Console) -> int:
    """Hand the links of the chain to Slurm, each after the one before."""
    jobs: list[str] = []
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(plan.chain):
            command = plan.command(after=jobs[-1] if jobs else None)
            out = call(command, seconds=SUBMIT_SECONDS, base=job_environment(plan, os.environ))
            jobs.append(out.strip().split(";")[0])  # ID;CLUSTER where there are several clusters
            run_state.record(plan.folder, jobs[-1], plan.server.job_name)
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
