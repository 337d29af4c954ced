"""Checks a job with Slurm before submission: the queue, the partitions, and `sbatch --test-only`.

`sbatch --test-only` considers one component at a time. It accepts components that fit singly but not together,
partitions that are down, and times above the partition's limit; such a job waits for ever. So does one whose
component 0 gets nodes that component 1 needs: Slurm chooses component 0's nodes without regard to component 1, the
same each time (seen with 22.05). Hence each component is also tested without the nodes that the other would get.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from reinforce_rl.launch.slurm.commands import SlurmCallError, call
from reinforce_rl.launch.slurm.history import HISTORY_FILE, History
from reinforce_rl.launch.slurm.submission.options import parse_memory, parse_time
from reinforce_rl.launch.slurm.submission.plan import Component, JobPlan
from reinforce_rl.utils.files import read_json_lines

SUBMIT_SECONDS = 120.0
PARTITIONS = ("sinfo", "--noheader", "--format=%P|%a|%l")
NODES_HINT = "sinfo --Node --format='%N %P %T %c %m %G %f'"
SUBMITTED_FILE = "submitted.jsonl"
LAST_JOBS = 100  # queried; more than any chain, and keeps the command line short


@dataclass(frozen=True)
class Start:
    """Slurm's estimate of when and where a component could start as a job of its own."""

    time: str
    nodes: str


@dataclass
class Answer:
    starts: tuple[Start | None, Start | None] = (None, None)  # of server and actor; None if unknown
    faults: list[str] = field(default_factory=list)  # one sentence each, as the warnings
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # what could not be checked, and why


def ask_cluster(
    run_dir: Path, plan: JobPlan | None, actor_megabytes: int | None, environment: Mapping[str, str]
) -> Answer:
    """Check a job against the queue and the cluster; without a plan, the queue only.

    `actor_megabytes` is the host memory needed by the ranks of one actor node, `environment` is sbatch's.
    """
    answer = Answer()
    if shutil.which("sbatch") is None:
        answer.unchecked.append(
            "sbatch is not on the PATH, so nodes, queue and sbatch --test-only could not be asked; submit from a "
            "machine that has Slurm's commands"
        )
        return answer
    try:
        answer.faults += queue_faults(run_dir)
    except SlurmCallError as error:
        answer.unchecked.append(f"whether this run is in the queue already: {error}")
    if plan is None:
        return answer
    try:
        answer.faults += partition_faults(plan, call(PARTITIONS))
    except SlurmCallError as error:
        answer.unchecked.append(f"whether the partitions run such a job: {error}")
    if not answer.faults:
        _test(plan, environment, answer)
    actor = answer.starts[1]
    if actor is not None and actor_megabytes and plan.actor.options.mem is None:
        answer.warnings += _memory_warnings(actor.nodes, actor_megabytes)
    return answer


def partition_faults(plan: JobPlan, sinfo: str) -> list[str]:
    """Check that each component has a partition that is up and allows the job's time.

    Raises:
        SlurmCallError: `sinfo` is not the output of `PARTITIONS`.
    """
    reasons: dict[str, str] = {}  # why a partition cannot be used; empty if it can
    default = ""
    for line in filter(str.strip, sinfo.splitlines()):
        try:
            name, available, limit = line.strip().split("|")
            most = parse_time("UNLIMITED" if limit == "n/a" else limit)
        except ValueError as error:
            raise SlurmCallError(PARTITIONS, f"printed {line!r}; expected NAME|STATE|LIMIT") from error
        if name.endswith("*"):
            name = default = name[:-1]
        if available != "up":
            reasons[name] = f"partition {name} is not up"
        elif most is not None and (plan.seconds is None or plan.seconds > most):
            reasons[name] = f"partition {name} allows {most} s, the job asks for {plan.seconds or 'no limit'}"
        else:
            reasons[name] = ""
    faults = []
    for component in (plan.server, plan.actor):
        wanted = (component.options.partition or default).split(",")
        unknown = [name for name in wanted if name not in reasons]
        if unknown:
            what = f"partition {unknown[0]} is unknown" if unknown[0] else "the cluster has no default partition"
            faults.append(f"the {component.name}: {what}; expected --partition to be of {', '.join(sorted(reasons))}")
        elif all(reasons[name] for name in wanted):
            faults.append(f"the {component.name}: {'; '.join(reasons[name] for name in wanted)}; use another one")
    return faults


def _test(plan: JobPlan, environment: Mapping[str, str], answer: Answer) -> None:
    """Run `sbatch --test-only` for each component, the job, and each component without the other's nodes."""
    starts = []
    for component in (plan.server, plan.actor):
        try:
            starts.append(_test_component(plan, component, environment))
        except SlurmCallError as error:
            what = f"the component of the {component.name} ({' '.join(component.requirements())})"
            answer.faults.append(f"sbatch --test-only refuses {what}: {_said(error)}")
    if answer.faults:
        return
    try:
        call(plan.command(test_only=True), seconds=SUBMIT_SECONDS, base=environment)
    except SlurmCallError as error:
        answer.faults.append(f"sbatch --test-only refuses the job: {_said(error)}")
        return
    server, actor = answer.starts = starts[0], starts[1]
    if server is None or actor is None:
        answer.warnings.append("whether both components fit together is not known: sbatch --test-only names no nodes")
    else:
        answer.faults += _together_faults(plan, server, actor, environment)


def _test_component(
    plan: JobPlan, component: Component, environment: Mapping[str, str], exclude: str = ""
) -> Start | None:
    said = call(plan.test_command(component, exclude), seconds=SUBMIT_SECONDS, base=environment, with_stderr=True)
    found = re.search(r"to start at (\S+) using \d+ processors on nodes (\S+)", said)
    return Start(*found.groups()) if found else None


def _said(error: SlurmCallError) -> str:
    said = " ".join(error.said.split())
    if "node configuration is not available" in said:
        said += f"; use fewer nodes or ranks a node, or another partition. What the nodes have: {NODES_HINT}"
    return said


def _together_faults(plan: JobPlan, server: Start, actor: Start, environment: Mapping[str, str]) -> list[str]:
    alone = f"alone, the {plan.server.name} would get {server.nodes} and the {plan.actor.name} {actor.nodes}"
    try:
        _test_component(plan, plan.actor, environment, exclude=server.nodes)
        return []
    except SlurmCallError as error:
        alone += f"; without {server.nodes}, sbatch says of the {plan.actor.name}: {' '.join(error.said.split())}"
    try:
        _test_component(plan, plan.server, environment, exclude=actor.nodes)
    except SlurmCallError:
        return [
            f"the components fit singly, but not together ({alone}). Slurm gives no node to both, and the job would "
            f"wait for ever: expected {plan.server.nodes} + {plan.actor.nodes} different nodes; use fewer, or another "
            "partition or nodelist"
        ]
    return [
        f"the {plan.server.name} may be put on nodes that the {plan.actor.name} cannot do without ({alone}), and the "
        "job would wait for ever, since Slurm chooses the nodes of component 0 without a look at component 1; keep "
        "them apart with --server-partition, --server-constraint, --server-exclude or --server-nodelist"
    ]


def _memory_warnings(nodes: str, megabytes: int) -> list[str]:
    try:
        sizes = call(["sinfo", "--noheader", f"--nodes={nodes}", "--format=%m"]).split()
        there = min((parse_memory(size.rstrip("+")) for size in sizes), default=megabytes)
    except (SlurmCallError, ValueError) as error:
        return [f"the memory of {nodes} is not known: {error}"]
    if megabytes <= there:
        return []
    return [
        f"the actor's ranks need up to {megabytes} MB of host memory a node, and of {nodes} there are nodes with "
        f"{there} MB"
    ]


@dataclass(frozen=True)
class Submitted:
    job: str
    name: str  # of the first component
    time: float  # unix seconds


def record_submitted(folder: Path, job: str, name: str) -> None:
    with (folder / SUBMITTED_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(Submitted(job, name, time.time()))) + "\n")


def queue_faults(run_dir: Path) -> list[str]:
    """Return a fault if jobs of this run are pending, running or ending.

    Raises:
        SlurmCallError: squeue failed.
    """
    folder = run_dir / "slurm"
    path = folder / SUBMITTED_FILE
    submitted = [Submitted(**line) for line in read_json_lines(path)] if path.is_file() else []
    names: dict[str, str | None] = {job.job: job.name for job in submitted}
    for attempt in History(folder / HISTORY_FILE).attempts():
        if attempt.end is None or attempt.requeued:
            names.setdefault(attempt.job, None)  # submitted without this program
    if not names:
        return []
    ids = list(names)[-LAST_JOBS:]
    try:
        text = call(["squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%i|%A|%T|%j"])
    except SlurmCallError as error:
        if "Invalid job id" in error.said:  # a single job that ended long ago
            return []
        raise
    found: dict[str, str] = {}
    for line in text.splitlines():
        shown, job, state, name = line.strip().split("|", 3)
        if job in names and names[job] in (None, name):  # job ids wrap around
            found[job] = f"{shown.split('+')[0]} ({name}, {state.lower()})"
    if not found:
        return []
    jobs = ", ".join(found[job] for job in sorted(found, key=int))
    return [
        f"the run in {run_dir} is in the queue already: {jobs}; wait for it, cancel it (scancel {' '.join(found)}), "
        "or set exp_manager.explicit_log_dir to another folder"
    ]
