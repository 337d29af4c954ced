"""sinfo's lines, and whether two components fit a cluster together: against trying every choice of nodes."""

from __future__ import annotations

import itertools
import random

import pytest

from reinforce_rl.launch.slurm.calls import SlurmCallError
from reinforce_rl.launch.slurm.submission.cluster import Node, check_totals, parse_sinfo
from reinforce_rl.launch.slurm.submission.options import ComponentOptions
from reinforce_rl.launch.slurm.submission.plan import Component
from reinforce_rl.launch.slurm.submission.values import Gpus

# Of a Slurm 22.05, with lines of larger clusters.
SINFO = """\
act0|batch*|idle|8|4000|gpu:h100:8|up|infinite|big,ib
act1|batch*|mixed|8|4000|gpu:h100:8|up|infinite|big,ib
act1|off|mixed|8|4000|gpu:h100:8|down|infinite|big,ib
rm0|batch*|idle~|8|4000|gpu:a100:2|up|infinite|small
rm0|small|idle~|8|4000|gpu:a100:2|up|1:00:00|small
rm1|batch*|down*|8|4000|(null)|up|infinite|(null)
big1|dgx|allocated|224+|2063937+|gpu:h100:8(S:0-1),gpu:1g.10gb:2(S:0),nvme:1|up|2-00:00:00|(null)
"""


def test_lines_of_sinfo():
    nodes = parse_sinfo(SINFO)
    assert nodes[0] == Node(
        "act0", "batch", True, True, "idle", 8, 4000, (Gpus(8, "h100"),), None, frozenset({"big", "ib"})
    )
    assert [node.usable for node in nodes] == [True, True, True, True, True, False, True]
    assert [node.free for node in nodes] == [True, False, False, True, True, False, False]
    assert [node.up for node in nodes] == [True, True, False, True, True, True, True]
    assert nodes[4].seconds == 3600
    assert nodes[5].gpus == ()
    big = nodes[6]
    assert (big.cpus, big.megabytes, big.seconds, big.default) == (224, 2063937, 172800, False)
    assert big.gpus == (Gpus(8, "h100"), Gpus(2, "1g.10gb"))
    assert (big.gpus_of("h100"), big.gpus_of(None), big.gpus_of("a100")) == (8, 10, 0)


@pytest.mark.parametrize(
    ("state", "usable"),
    [("idle", True), ("mixed-", True), ("maint", True), ("idle*", False), ("drained", False), ("draining@", False)],
)
def test_states(state, usable):
    (node,) = parse_sinfo(f"n0|p*|{state}|8|4000|(null)|up|infinite|(null)\n")
    assert node.usable is usable


def test_a_line_that_is_none_is_named():
    with pytest.raises(SlurmCallError, match=r"printed 'act0\|idle'"):
        parse_sinfo("act0|idle\n")


def component(nodes: int, *, name="actor", cpus=1, gpus=None, megabytes=None, **options) -> Component:
    return Component(name, name, nodes, cpus, cpus, None, gpus, megabytes, ComponentOptions(**options))


def faults(server: Component, actor: Component, seconds: int | None = 600, **hosts: str) -> str:
    lists = {name: frozenset(names.split()) for name, names in hosts.items()}
    return "\n".join(check_totals(server, actor, parse_sinfo(SINFO), seconds, lists).faults)


def test_what_fits():
    found = check_totals(component(1), component(2), parse_sinfo(SINFO), 600, {})
    assert (found.faults, found.free, found.actor_megabytes) == ((), (2, 2), 4000)


def test_a_server_that_may_take_the_actors_nodes():
    """As seen on a real Slurm, which leaves four idle nodes idle."""
    actor = component(2, gpus=Gpus(8, "h100"))
    found = faults(component(1, name="reward server"), actor)
    assert "the reward server may be put on nodes that the actor cannot do without (act0, act1)" in found
    assert faults(component(1, exclude="act"), actor, act="act0 act1") == ""
    assert faults(component(1, constraint="small"), actor) == ""
    assert faults(component(1, nodelist="rm0"), actor, rm0="rm0") == ""
    assert faults(component(1), component(1, gpus=Gpus(8, "h100"))) == ""
    assert "cannot do without" in faults(component(1), component(1, nodelist="act1"), act1="act1")


def test_components_that_fit_singly_but_not_together():
    found = faults(component(2, name="reward server"), component(2))
    assert "fit singly, but not together" in found
    assert "expected 4 nodes, found 3" in found
    assert "act0, act1, rm0" in found


def test_together_in_partitions_that_share_nodes():
    server = component(1, partition="small")
    assert faults(server, component(2)) == ""
    assert "expected 4 nodes, found 3" in faults(server, component(3))


def test_one_of_several_partitions_is_enough():
    assert faults(component(1, partition="dgx,small"), component(3)) == ""


@pytest.mark.parametrize(
    ("actor", "words"),
    [
        (component(4), ["needs 4 nodes with 1 CPUs", "3 of the 4 of partition batch", "rm1: state down*"]),
        (component(1, cpus=9), ["act0, act1, rm0: 8 CPUs"]),
        (component(1, megabytes=4001), ["4000 MB of memory"]),
        (component(1, gpus=Gpus(9, "h100")), ["GPUs h100:9", "act0, act1: GPUs h100:8", "rm0: GPUs a100:2"]),
        (component(2, gpus=Gpus(1, "a100")), ["1 of the 4"]),
        (component(1, partition="off"), ["partition off is not up"]),
        (component(1, partition="nowhere"), ["partition nowhere has no nodes", "batch, dgx, off, small"]),
        (component(1, constraint="big&small"), ["act0, act1, rm0: not big&small"]),
        (component(3, constraint="big|small", exclude="act0"), ["act0: excluded"]),
        (component(1, nodelist="act0,act1"), ["nodelist of the actor has 2 nodes, and it gets 1"]),
        (component(2, nodelist="rm1"), ["2 nodes with 1 CPUs, rm1 among them, and 3 of the 4", "rm1: state down*"]),
        (component(1, nodelist="rm1"), ["not in the nodelist", "rm1: state down*"]),
    ],
)
def test_why_a_component_does_not_fit(actor, words):
    lists = {name: name.replace(",", " ") for name in ("act0", "rm1", "act0,act1")}
    found = faults(component(1, name="reward server", partition="small"), actor, 600, **lists)
    assert all(word in found for word in words), found


def test_a_time_above_the_limit_of_the_partition():
    server = component(1, partition="small")
    assert faults(server, component(1), 3600) == ""
    assert "partition small allows 3600 s, the job asks for 3660" in faults(server, component(1), 3660)
    assert "the job asks for no limit" in faults(server, component(1), None)


def test_nodes_that_both_want():
    server, actor = component(1, nodelist="act0"), component(1, nodelist="act0")
    assert "both have act0" in faults(server, actor, act0="act0")
    # A node that must be in one component is not there for the other.
    assert "the actor 3 of act0, act1, and" in faults(component(1, nodelist="rm0"), component(3), rm0="rm0")


def test_forms_of_a_constraint_that_only_sbatch_reads_are_left_to_it():
    assert faults(component(1), component(2, constraint="[rack1*2&rack2*2]")) == ""


def test_against_every_choice_of_nodes():
    random.seed(0)
    answers = set()
    for _ in range(400):
        names = [f"n{i}" for i in range(random.randint(1, 5))]
        text = "".join(
            f"{name}|p*|{random.choice(['idle', 'mixed', 'down'])}|{random.choice([2, 4])}|100|(null)|up|infinite|f\n"
            for name in names
        )
        lists = {"one": frozenset(random.sample(names, 1)), "two": frozenset(random.sample(names, 1))}
        server, actor = (
            component(random.randint(1, 3), cpus=random.choice([1, 3]), nodelist=random.choice([None, None, name]))
            for name in lists
        )
        nodes = parse_sinfo(text)
        choices = [
            [
                set(chosen)
                for chosen in itertools.combinations([n.name for n in nodes if n.cpus >= own.cpus_per_node], own.nodes)
                if not any(n.state == "down" and n.name in chosen for n in nodes)
                and (own.options.nodelist is None or lists[own.options.nodelist] <= set(chosen))
            ]
            for own in (server, actor)
        ]
        # Slurm chooses for component 0 first, so whatever it chooses must leave a choice for component 1.
        possible = all(any(not one & two for two in choices[1]) for one in choices[0]) and choices[0] != []
        found = check_totals(server, actor, nodes, 60, lists).faults
        assert (found == ()) == possible, (text, server, actor, lists, found)
        together = any(not one & two for one in choices[0] for two in choices[1])
        assert ("cannot do without" in " ".join(found)) == (together and not possible)
        answers.add((together, possible))
    assert answers == {(True, True), (True, False), (False, False)}
