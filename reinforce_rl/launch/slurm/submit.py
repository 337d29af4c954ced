"""The command `submit`: checks a job with Slurm, prints and submits it.

`sbatch --test-only` considers one component at a time, and accepts partitions that are down and
times above their limit; such a job waits for ever. So does one whose component 0 gets nodes that
component 1 needs, which Slurm (22.05) does not look at: hence each component is also tested without
the nodes that the other would get.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from reinforce_rl.errors import EXIT_ERROR, EXIT_FINISHED, ConfigError, Fault, ReinforceError
from reinforce_rl.launch.slurm.options import (
    OPTION_VARIABLES,
    PLANNED,
    parse_memory,
    parse_options,
    parse_time,
)
from reinforce_rl.launch.slurm.outcome import finished, read_attempts
from reinforce_rl.launch.slurm.plan import Component, JobPlan, make_request
from reinforce_rl.launch.slurm.settings import unread_variables
from reinforce_rl.preflight.report import print_rows, print_warnings
from reinforce_rl.preflight.run import wide_console
from reinforce_rl.utils.console import Console
from reinforce_rl.utils.files import read_json_lines, write_atomically
from reinforce_rl.utils.slurm_commands import SlurmCallError, call

REPOSITORY = Path(__file__).resolve().parents[3]
# All others may belong to an enclosing allocation; the job would take them for its own.
KEPT_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
SUBMIT_SECONDS = 120.0
PARTITIONS = ("sinfo", "--noheader", "--format=%P|%a|%l")
NODES_HINT = "sinfo --Node --format='%N %P %T %c %m %G %f'"
SUBMITTED_FILE = "submitted.jsonl"
LAST_JOBS = 100  # queried; more than any chain, and keeps the command line short


def main(argv: Sequence[str], console: Console | None = None) -> int:
    """Plan, check, print and submit `[options] ACTOR_OVERRIDE... [-- SERVER_OVERRIDE...]`.

    Returns 0 if the jobs were submitted (or would be, in a dry run) or the run has finished; else
    1.
    """
    errors = console or Console(stderr=True, highlight=False, soft_wrap=True)
    console = console or wide_console()
    options = parse_options(argv, os.environ)
    request = make_request(options, os.environ, REPOSITORY, console)
    plan = request.plan
    foreign = ("SLURM_", "PMI_", "PMIX_")
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in OPTION_VARIABLES and (not k.startswith(foreign) or k in KEPT_SLURM_VARIABLES)
    }
    environment = {} if plan is None else {**kept, **plan.variables}
    cluster = ask_cluster(request.run_dir, plan, request.actor_megabytes, environment)
    if plan is not None:
        print_job(console, plan, cluster.starts)
    replaced = [] if plan is None else _replaced_script(plan)
    print_warnings(console, [*request.warnings, *cluster.warnings, *replaced])
    faults = [*request.faults, *unread_variables(kept), *cluster.faults]
    if not options.dry_run:
        faults += cluster.unchecked
    elif cluster.unchecked:
        console.print("\nNot checked:", *(f"  {reason}" for reason in cluster.unchecked), sep="\n")
    if faults or plan is None:
        text = ConfigError(faults).with_keys()
        errors.print(f"error: {text}\nNothing was submitted.", style="red")
        return EXIT_ERROR
    print_command(console, plan, os.environ)
    settings = plan.settings
    attempts = read_attempts(settings.slurm_folder)
    if text := finished(settings.run_dir, attempts, (settings.actor_args, settings.server_args)):
        console.print(f"\n{text}. Nothing was submitted.")
        return EXIT_FINISHED
    if options.dry_run:
        console.print(f"\nThe job's submission writes {plan.batch_file}, which the command reads.")
        console.print("\nNo fault was found. Nothing was submitted.")
        return EXIT_FINISHED
    return _submit(plan, environment, console, errors)


@dataclass(frozen=True)
class Start:
    """Slurm's estimate of when and where a component could start as a job of its own."""

    time: str
    nodes: str


@dataclass
class Answer:
    starts: tuple[Start | None, ...] = (None, None, None)  # of the components; None if unknown
    faults: list[str] = field(default_factory=list)  # one sentence each, as the warnings
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # what could not be checked, and why


def ask_cluster(
    run_dir: Path, plan: JobPlan | None, actor_megabytes: int, environment: Mapping[str, str]
) -> Answer:
    """Check a job against the queue and the cluster; without a plan, the queue only.

    `actor_megabytes` of host memory is what an actor node needs, 0 if unknown; `environment` is
    sbatch's.
    """
    if shutil.which("sbatch") is None:
        missing = Fault(
            "sbatch is not on the PATH, so nodes and queue could not be asked; submit from a "
            "machine that has Slurm's commands",
            key="slurm.command.missing",
        )
        return Answer(unchecked=[missing])
    answer = Answer()
    try:
        answer.faults += queue_faults(run_dir)
    except SlurmCallError as error:
        answer.unchecked.append(
            Fault(
                f"cannot check whether this run is already in the queue: {error}",
                key="slurm.queue.not_known",
            )
        )
    if plan is None:
        return answer
    try:
        answer.faults += partition_faults(plan, call(PARTITIONS))
    except SlurmCallError as error:
        answer.unchecked.append(
            Fault(
                f"cannot check whether the partitions accept this job: {error}",
                key="slurm.partition.not_known",
            )
        )
    if not answer.faults:
        _test(plan, environment, answer)
    actor = answer.starts[1]
    if actor is not None and actor_megabytes and plan.actor.options.mem is None:
        answer.warnings += _memory_warnings(actor.nodes, actor_megabytes)
    return answer


def queue_faults(run_dir: Path) -> Iterator[str]:
    """Yield a fault if jobs of this run are pending, running or ending."""
    path = run_dir / "slurm" / SUBMITTED_FILE
    names = {line["job"]: line["name"] for line in read_json_lines(path)} if path.is_file() else {}
    for attempt in read_attempts(path.parent):
        if attempt.end is None or attempt.requeued:
            names.setdefault(attempt.job, None)  # submitted without this program
    if not names:
        return
    try:
        text = call(
            [
                "squeue",
                "--noheader",
                f"--jobs={','.join(list(names)[-LAST_JOBS:])}",
                "--format=%i|%A|%T|%j",
            ]
        )
    except SlurmCallError as error:
        if "Invalid job id" in error.said:  # a single job that ended long ago
            return
        raise
    queued: dict[str, str] = {}
    for line in text.splitlines():
        shown, job, state, name = line.strip().split("|", 3)
        if job in names and names[job] in (None, name):  # job ids wrap around
            queued[job] = f"{shown.split('+')[0]} ({name}, {state.lower()})"
    if queued:
        jobs = ", ".join(queued[job] for job in sorted(queued, key=int))
        yield Fault(
            f"the run in {run_dir} is in the queue already: {jobs}; wait for it, cancel it "
            f"(scancel {' '.join(queued)}), or set exp_manager.explicit_log_dir to another folder",
            key="slurm.queue.same_run",
        )


def partition_faults(plan: JobPlan, sinfo: str) -> Iterator[str]:
    """Check that each component has a partition that is up and allows the job's time."""
    reasons: dict[str, str] = {}  # why a partition cannot be used; empty if it can
    default = ""
    for line in filter(str.strip, sinfo.splitlines()):
        try:
            name, available, limit = line.strip().split("|")
            most = parse_time("UNLIMITED" if limit == "n/a" else limit)
        except ValueError as error:
            raise SlurmCallError(
                PARTITIONS, f"printed {line!r}; expected NAME|STATE|LIMIT"
            ) from error
        if name.endswith("*"):
            name = default = name[:-1]
        reasons[name] = ""
        if available != "up":
            reasons[name] = f"partition {name} is not up"
        elif most is not None and (plan.options.seconds is None or plan.options.seconds > most):
            reasons[name] = (
                f"partition {name} allows {most} s, the job asks for "
                f"{plan.options.seconds or 'no limit'}"
            )
    for component in plan.components:
        wanted = (component.options.partition or default).split(",")
        unknown = [name for name in wanted if name not in reasons]
        names = ", ".join(sorted(reasons))
        if unknown and unknown[0]:
            yield Fault(
                f"the {component.name}: partition {unknown[0]} is unknown; expected --partition "
                f"to be one of {names}",
                key="slurm.partition.unknown",
            )
        elif unknown:
            yield Fault(
                f"the {component.name}: the cluster has no default partition; expected "
                f"--partition to be one of {names}",
                key="slurm.partition.no_default",
            )
        elif all(reasons[name] for name in wanted):
            why = "; ".join(reasons[name] for name in wanted)
            yield Fault(
                f"the {component.name}: {why}; use another one",
                key="slurm.partition.unusable",
            )


def _test(plan: JobPlan, environment: Mapping[str, str], answer: Answer) -> None:
    """Run `sbatch --test-only` for each component, the job, and each component without the others'
    nodes.
    """
    tested = {
        component.name: _test_only(plan.test_command(component), environment)
        for component in plan.components
    }
    refused = {
        f"the component of the {component.name} ({' '.join(component.requirements())})": tested[
            component.name
        ][1]
        for component in plan.components
    }
    if not any(refused.values()):
        refused["the job"] = _test_only(plan.command(test_only=True), environment)[1]
    for subject, refusal in refused.items():
        if "node configuration is not available" in refusal:
            refusal += (
                "; use fewer nodes or ranks a node, or another partition. What the nodes have: "
                f"{NODES_HINT}"
            )
        if refusal:
            answer.faults.append(
                Fault(
                    f"sbatch --test-only refuses {subject}: {refusal}",
                    key="slurm.sbatch.refuses",
                )
            )
    if answer.faults:
        return
    answer.starts = tuple(start for start, _ in tested.values())
    starts = [start for start in answer.starts if start is not None]
    if len(starts) < len(answer.starts):
        answer.warnings.append(
            "cannot check whether the components fit together: sbatch --test-only names no nodes"
        )
        return
    for place, (first, second) in enumerate(itertools.pairwise(plan.components)):
        before = ",".join(start.nodes for start in starts[: place + 1])
        _, refusal = _test_only(plan.test_command(second, exclude=before), environment)
        if refusal:
            answer.faults.append(
                _do_not_fit(
                    plan, first, second, before, starts[place + 1].nodes, refusal, environment
                )
            )
            return


def _do_not_fit(
    plan: JobPlan,
    first: Component,
    second: Component,
    before: str,
    after: str,
    refusal: str,
    env: Mapping[str, str],
) -> Fault:
    """Say why `second` cannot be there with what is before it, of which `first` is the last."""
    alone = f"alone, the {first.name} would get {before} and the {second.name} {after}"
    alone += f"; without {before}, sbatch says of the {second.name}: {refusal}"
    if _test_only(plan.test_command(first, exclude=after), env)[1]:
        return Fault(
            f"each component fits by itself, but not both together ({alone}), so the job would "
            f"wait forever; expected {first.nodes} + {second.nodes} different nodes: use fewer, or "
            "another partition or nodelist",
            key="slurm.components.do_not_fit",
        )
    option = plan.option_name(first)
    return Fault(
        f"the {first.name} may be placed on nodes that the {second.name} needs ({alone}), so the "
        f"job would wait forever; use --{option}-partition, --{option}-constraint, "
        f"--{option}-exclude or --{option}-nodelist",
        key="slurm.components.take_nodes",
    )


def _test_only(command: Sequence[str], environment: Mapping[str, str]) -> tuple[Start | None, str]:
    """Run `sbatch --test-only`; return when and where the job could start, None if unknown, and why
    it is refused.
    """
    try:
        said = call(command, seconds=SUBMIT_SECONDS, env=environment, stderr=True)
    except SlurmCallError as error:
        return None, " ".join(error.said.split())
    start = re.search(r"to start at (\S+) using \d+ processors on nodes (\S+)", said)
    return Start(*start.groups()) if start else None, ""


def _memory_warnings(nodes: str, megabytes: int) -> list[str]:
    try:
        sizes = call(["sinfo", "--noheader", f"--nodes={nodes}", "--format=%m"]).split()
        there = min((parse_memory(size.rstrip("+")) for size in sizes), default=megabytes)
    except (SlurmCallError, ValueError) as error:
        return [f"the memory of {nodes} is not known: {error}"]
    needed = f"the actor's ranks need up to {megabytes} MB of host memory a node"
    return (
        [f"{needed}, and of {nodes} there are nodes with {there} MB"] if megabytes > there else []
    )


def _replaced_script(plan: JobPlan) -> Iterator[str]:
    """Yield a warning if the run's folder has another script, which may have been edited."""
    path = Path(plan.batch_file)
    with contextlib.suppress(OSError):  # `_submit` says what cannot be written
        if path.is_file() and path.read_bytes() != plan.script.encode():
            yield (
                f"{path} differs from this job's script, which replaces it; to use the lines of "
                "that file, submit a copy of it with sbatch"
            )


def _submit(
    plan: JobPlan, environment: Mapping[str, str], console: Console, errors: Console
) -> int:
    jobs: list[str] = []
    fault = None
    run_dir = plan.settings.run_dir
    folder = plan.settings.slurm_folder
    chain = plan.options.chain
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(plan.batch_file), plan.script, mode=0o777)
        for _ in range(chain):
            out = call(
                plan.command(after=jobs[-1] if jobs else None),
                seconds=SUBMIT_SECONDS,
                env=environment,
            )
            jobs.append(out.strip().split(";")[0])  # ID;CLUSTER with several clusters
            line = {"job": jobs[-1], "name": plan.server.job_name, "time": time.time()}
            with (folder / SUBMITTED_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    except OSError as error:
        fault = ReinforceError(
            f"exp_manager.explicit_log_dir is {run_dir}, which cannot be written: {error}",
            key="slurm.run_dir.unusable",
        )
    except SlurmCallError as error:
        fault = ReinforceError(
            f"sbatch did not accept job {len(jobs) + 1} of {chain}: {error.said}",
            key="slurm.sbatch.failed",
        )
    if fault:
        errors.print(f"error: {fault.with_keys()}", style="red")
    if not jobs:
        errors.print("Nothing was submitted.")
        return EXIT_ERROR
    rows = [("look", f"squeue -j {','.join(jobs)}"), ("output", f"tail -F {folder}/{jobs[0]}.out")]
    rows += [("state", f"{run_dir}/status.json"), ("cancel", f"scancel {' '.join(jobs)}")]
    print_rows(console, f"Submitted: {' then '.join(jobs)}", rows)
    return EXIT_FINISHED if len(jobs) == chain else EXIT_ERROR


def print_job(console: Console, plan: JobPlan, starts: Sequence[Start | None]) -> None:
    """Print components, times and folders; `starts` are Slurm's estimates, None if unknown."""
    all_of_them = plan.components
    options = plan.options
    settings = plan.settings
    places = [
        f"{start.time} on {start.nodes}" if start else "not known"
        for start in starts[: len(all_of_them)]
    ]
    components = [
        ("", *(f"{number}: {c.name}" for number, c in enumerate(all_of_them))),
        ("name", *(c.job_name for c in all_of_them)),
        ("partition", *(c.options.partition or "the default one" for c in all_of_them)),
        ("nodes", *(str(c.nodes) for c in all_of_them)),
        (
            "ranks",
            *(
                f"{c.nodes} x {c.ranks_per_node} = {c.nodes * c.ranks_per_node}"
                for c in all_of_them
            ),
        ),
        ("CPUs a node", *(str(c.ranks_per_node * (c.cpus_per_task or 1)) for c in all_of_them)),
        ("GPUs a node", *(c.gpus or "none" for c in all_of_them)),
        ("could start", *places),
    ]
    is_limited = options.seconds is not None
    rows = [
        ("time", f"{options.time} = {options.seconds} s" if is_limited else options.time),
        (
            "signal to save",
            f"{plan.lead} s before the limit" if is_limited else "none: there is no limit",
        ),
        (
            "jobs",
            "1"
            if options.chain == 1
            else f"{options.chain}, each starting after the previous one ends",
        ),
        ("run", str(settings.run_dir)),
        (
            "output",
            f"{settings.slurm_folder}/JOBID.out, of tasks {settings.slurm_folder}/JOBID-RESTART/",
        ),
        *((name, value) for name, value in plan.variables.items() if name not in PLANNED),
        *((name, str(value)) for name, value in plan.script_settings.items()),
    ]
    print_rows(console, "Components", components)
    print_rows(console, "Job", rows)


def print_command(console: Console, plan: JobPlan, environment: Mapping[str, str]) -> None:
    """Print the command for pasting into a shell with this environment: a line each for the
    variables, each component, and the program.
    """
    unset = [f"--unset={name}" for name in sorted(OPTION_VARIABLES & environment.keys())]
    variables = [f"{name}={value}" for name, value in plan.variables.items()]
    lines = [["env", *unset, *variables], []]
    for argument in plan.command():
        if argument in (":", plan.batch_file):
            lines.append([])
        lines[-1].append(argument)
    console.print(Text("\nCommand", style="bold"))
    console.print(Text(" \\\n    ".join(shlex.join(line) for line in lines)))
