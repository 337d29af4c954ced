"""Whether a cluster's nodes suffice for both components at once, from what sinfo prints.

`sbatch --test-only` looks at one component after the other: it says yes to two that fit singly and not together, to a
partition that is down, and to a time above the partition's limit. Such a job would wait for ever. So does one whose
component 0 may be put on nodes that component 1 cannot do without: Slurm places one after the other, and never anew
(seen with 22.05: one CPU node beside two GPU nodes of a cluster of four waited on four idle nodes).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reinforce_rl.launch.slurm.calls import SlurmCallError
from reinforce_rl.launch.slurm.submission.plan import Component
from reinforce_rl.launch.slurm.submission.values import Gpus, parse_time

SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%P|%T|%c|%m|%G|%a|%l|%f")
UNUSABLE = ("down", "drained", "draining", "drain", "fail", "failing", "error", "future", "inval", "unknown")
NOT_RESPONDING = "*"
SHOWN_NODES = 6


@dataclass(frozen=True)
class Node:
    """A node in one of its partitions.

    Attributes:
        name: of the node.
        partition: of this entry.
        default: that partition is the one of jobs that name none.
        up: that partition starts jobs.
        state: as sinfo writes it, such as idle, mixed or down*.
        cpus: of the node.
        megabytes: of memory that jobs may have.
        gpus: of the node, one entry a type.
        seconds: the partition's time limit; None for none.
        features: of the node.
    """

    name: str
    partition: str
    default: bool
    up: bool
    state: str
    cpus: int
    megabytes: int
    gpus: tuple[Gpus, ...]
    seconds: int | None
    features: frozenset[str]

    @property
    def usable(self) -> bool:
        """Whether a job may start there, sooner or later."""
        return not self.state.endswith(NOT_RESPONDING) and self.state.rstrip("*~#!%$@^-+") not in UNUSABLE

    @property
    def free(self) -> bool:
        return self.usable and self.state.startswith("idle")

    def gpus_of(self, type: str | None) -> int:
        """GPUs of a type, or of all."""
        return sum(gpus.count for gpus in self.gpus if type is None or gpus.type == type)


def parse_sinfo(text: str) -> list[Node]:
    """The nodes of `SINFO`'s output.

    Raises:
        SlurmCallError: naming a line that is none of it.
    """
    nodes = []
    for line in filter(str.strip, text.splitlines()):
        try:
            name, partition, state, cpus, memory, gres, available, limit, features = line.strip().split("|")
            nodes.append(
                Node(
                    name=name,
                    partition=partition.rstrip("*"),
                    default=partition.endswith("*"),
                    up=available == "up",
                    state=state,
                    cpus=int(cpus.rstrip("+")),
                    megabytes=int(memory.rstrip("+")),
                    gpus=tuple(_gpus(gres)),
                    seconds=parse_time("UNLIMITED" if limit == "n/a" else limit),
                    features=frozenset(features.split(",")),
                )
            )
        except ValueError as error:
            raise SlurmCallError(SINFO, f"printed {line!r}; expected the 9 fields of a node") from error
    return nodes


def _gpus(gres: str) -> Iterator[Gpus]:
    """Of gpu:h100:8(S:0-1),gpu:2,craynetwork:1."""
    for entry in re.split(r",(?![^(]*\))", gres):
        if found := re.match(r"gpu(?::([^:(]*[A-Za-z][^:(]*))?(?::(\d+))?(?:\(|$)", entry):
            yield Gpus(int(found.group(2) or 1), found.group(1))


@dataclass(frozen=True)
class Fit:
    """How a cluster serves a job.

    Attributes:
        faults: why it never can; one sentence each.
        free: how many nodes that would do are idle now, of the server's component and of the actor's.
        actor_megabytes: of the actor's nodes that would do, the least memory.
    """

    faults: tuple[str, ...]
    free: tuple[int, int] = (0, 0)
    actor_megabytes: int | None = None


def check_totals(
    server: Component,
    actor: Component,
    nodes: Sequence[Node],
    seconds: int | None,
    hosts: Mapping[str, frozenset[str]],
) -> Fit:
    """Whether each component fits, and both together: Slurm gives no node to two components of a job.

    Args:
        server, actor: the components.
        nodes: of the cluster.
        seconds: the job's time limit.
        hosts: the names in each list of nodes that an option has.
    """
    components = (server, actor)
    options = [_of_component(component, nodes) for component in components]
    faults = [
        fault
        for component, own in zip(components, options, strict=True)
        for fault in _singly(component, own, nodes, seconds, hosts)
    ]
    if faults:
        return Fit(tuple(faults))
    wanted = [_listed(component, hosts) for component in components]
    if twice := wanted[0] & wanted[1]:
        both = ", ".join(sorted(twice))
        return Fit((f"--server-nodelist and --actor-nodelist both have {both}; expected nodes of their own",))
    best: tuple[list[Node], list[Node]] = ([], [])
    fit_together = False
    for ours, theirs in itertools.product(*options):
        one, two = _suitable(server, ours, seconds, hosts), _suitable(actor, theirs, seconds, hosts)
        two = [node for node in two if node.name not in wanted[0]]
        left = [node for node in one if node.name not in wanted[1]]
        enough = _either(left, two) >= server.nodes + actor.nodes
        if enough and len(left) >= server.nodes and len(two) >= actor.nodes:
            fit_together, best = True, (one, two)
            if _leaves_enough(server, one, wanted[0], actor, two, wanted[1]):
                free = (sum(node.free for node in one), sum(node.free for node in two))
                return Fit((), free, min(node.megabytes for node in two))
        elif not fit_together:
            best = max(best, (left, two), key=lambda pair: _either(*pair))
    one, two = best
    if fit_together:
        shared = {node.name for node in two}
        return Fit(
            (
                f"the {server.name} may be put on nodes that the {actor.name} cannot do without "
                f"({_names([node for node in one if node.name in shared])}), and the job would wait for ever, since "
                "Slurm chooses the nodes of component 0 without a look at component 1; keep them apart with "
                "--server-partition, --server-constraint, --server-exclude or --server-nodelist",
            )
        )
    return Fit(
        (
            f"the components fit singly, but not together: the {server.name} needs {server.nodes} of {_names(one)}, "
            f"the {actor.name} {actor.nodes} of {_names(two)}, and Slurm gives no node to both; expected "
            f"{server.nodes + actor.nodes} nodes, found {_either(one, two)}. The job would wait for ever: use fewer "
            "nodes or another partition",
        )
    )


def _leaves_enough(
    server: Component,
    one: Sequence[Node],
    fixed: frozenset[str],
    actor: Component,
    two: Sequence[Node],
    needed: frozenset[str],
) -> bool:
    """Whether the actor has enough nodes left, whichever the server gets.

    Args:
        server, actor: the components.
        one, two: the nodes that each can use.
        fixed: of the server's nodes, those that must be among them, none of which is in `two`.
        needed: of the actor's nodes, those that must be.
    """
    chosen = {node.name for node in one} - fixed
    shared = chosen & {node.name for node in two}
    taken = min(server.nodes - len(fixed), len(shared))
    return len(two) - taken >= actor.nodes and not (taken and shared & needed)


def _either(one: Sequence[Node], two: Sequence[Node]) -> int:
    return len({node.name for node in (*one, *two)})


def _of_component(component: Component, nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes of each partition that a component may run in; the default one's where none is given."""
    if component.options.partition is None:
        return [[node for node in nodes if node.default]]
    wanted = component.options.partition.split(",")
    return [[node for node in nodes if node.partition == name] for name in wanted]


def _singly(
    component: Component,
    options: Sequence[Sequence[Node]],
    nodes: Sequence[Node],
    seconds: int | None,
    hosts: Mapping[str, frozenset[str]],
) -> Iterator[str]:
    """Why no partition of a component suffices for it alone."""
    known = ", ".join(sorted({node.partition for node in nodes}))
    asked = component.options.partition
    if any(not own for own in options):
        what = f"partition {asked} has no nodes" if asked else "the cluster has no default partition with nodes"
        yield f"the {component.name}: {what}; expected --partition to be of {known}"
        return
    if len(listed := _listed(component, hosts)) > component.nodes:
        yield f"the nodelist of the {component.name} has {len(listed)} nodes, and it gets {component.nodes}"
        return
    fits = [_suitable(component, own, seconds, hosts) for own in options]
    if any(len(fit) >= component.nodes and listed <= {node.name for node in fit} for fit in fits):
        return
    fit, own = max(zip(fits, options, strict=True), key=lambda pair: len(pair[0]))
    reasons: dict[str, list[Node]] = {}
    for node in own:
        if reason := _unsuitable(component, node, seconds, hosts):
            reasons.setdefault(reason, []).append(node)
    told = "; ".join(f"{_names(unfit)}: {reason}" for reason, unfit in reasons.items())
    need = f"{component.nodes} node{'s' if component.nodes > 1 else ''} with {component.cpus_per_node} CPUs"
    gpus = f" and GPUs {component.gpus}" if component.gpus else ""
    must = f", {component.options.nodelist} among them" if listed else ""
    yield (
        f"the {component.name} needs {need}{gpus}{must}, and {len(fit)} of the {len(own)} of partition "
        f"{own[0].partition} will do{f' ({told})' if told else ''}; use fewer nodes or ranks a node, or another "
        "partition"
    )


def _suitable(
    component: Component, nodes: Sequence[Node], seconds: int | None, hosts: Mapping[str, frozenset[str]]
) -> list[Node]:
    return [node for node in nodes if _unsuitable(component, node, seconds, hosts) is None]


def _unsuitable(
    component: Component, node: Node, seconds: int | None, hosts: Mapping[str, frozenset[str]]
) -> str | None:
    """Why a component cannot have a node."""
    own, gpus = component.options, component.gpus
    listed = _listed(component, hosts)
    if not node.up:
        return f"partition {node.partition} is not up"
    if node.seconds is not None and (seconds is None or seconds > node.seconds):
        return f"partition {node.partition} allows {node.seconds} s, the job asks for {seconds or 'no limit'}"
    if not node.usable:
        return f"state {node.state}"
    if own.exclude and node.name in hosts[own.exclude]:
        return "excluded"
    if len(listed) >= component.nodes and node.name not in listed:
        return "not in the nodelist"
    if own.constraint and not _has_features(own.constraint, node.features):
        return f"not {own.constraint}"
    if node.cpus < component.cpus_per_node:
        return f"{node.cpus} CPUs"
    if component.megabytes and node.megabytes < component.megabytes:
        return f"{node.megabytes} MB of memory"
    if gpus is not None and node.gpus_of(gpus.type) < gpus.count:
        return f"GPUs {', '.join(map(str, node.gpus)) or 'none'}"
    return None


def _listed(component: Component, hosts: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The nodes that must be among a component's."""
    return hosts[component.options.nodelist] if component.options.nodelist else frozenset()


def _has_features(constraint: str, features: frozenset[str]) -> bool:
    """Of a&b and a|b; other forms are left to sbatch."""
    if re.search(r"[^\w.&|,-]", constraint):
        return True
    return any(set(re.split("[&,]", choice)) <= features for choice in constraint.split("|"))


def _names(nodes: Sequence[Node]) -> str:
    ordered = sorted(node.name for node in nodes)
    more = len(ordered) - SHOWN_NODES
    return (", ".join(ordered[:SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")) or "no node"
