"""What Slurm's answers say of a job: partitions, `sbatch --test-only`, and both components together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.slurm_client import SlurmClient

from reinforce_rl.launch.slurm.commands import SlurmCallError
from reinforce_rl.launch.slurm.submission.cluster import Answer, Start, ask_cluster, partition_faults
from reinforce_rl.launch.slurm.submission.options import ComponentOptions
from reinforce_rl.launch.slurm.submission.plan import Component, JobPlan

# Of a Slurm 22.05.
SINFO = "batch*|up|infinite\nsmall|up|1:00:00\noff|down|infinite\ndgx|up|2-00:00:00\n"


def component(nodes: int, name: str = "actor", **options) -> Component:
    return Component(name, name, nodes, 1, 1, options=ComponentOptions(**options))


def job(server: Component, actor: Component, seconds: int | None = 600) -> JobPlan:
    return JobPlan(server, actor, "10", seconds, 300, 1, Path("/run"), Path("/repo/b.sbatch"), (), (), ())


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> SlurmClient:
    """Four nodes, n0 to n3; the first two have the feature gpu."""
    client = SlurmClient(tmp_path)
    client.answer("sinfo", SINFO)
    monkeypatch.setenv("PATH", client.path)
    return client


def ask(server: Component, actor: Component, megabytes: int | None = None) -> Answer:
    return ask_cluster(Path("/nowhere"), job(server, actor), megabytes, os.environ)


@pytest.mark.parametrize(
    ("partition", "seconds", "expected"),
    [
        (None, None, ""),
        ("dgx,small", 3600, ""),
        ("small", 3600, ""),
        ("dgx,small", 3660, ""),  # one of several is enough
        ("small", 3660, "partition small allows 3600 s, the job asks for 3660"),
        ("small", None, "the job asks for no limit"),
        ("off", 600, "the actor: partition off is not up"),
        ("off,small", 3660, "partition off is not up; partition small allows 3600 s"),
        ("nowhere", 600, "partition nowhere is unknown; expected --partition to be of batch, dgx, off, small"),
    ],
)
def test_partitions_that_sbatch_would_accept_and_never_start(partition, seconds, expected):
    faults = partition_faults(job(component(1), component(1, partition=partition), seconds), SINFO)
    assert bool(faults) == bool(expected)
    assert expected in "".join(faults)


def test_a_cluster_without_a_default_partition():
    (fault,) = partition_faults(job(component(1), component(1, partition="dgx")), SINFO.replace("*", ""))
    assert "the cluster has no default partition; expected --partition to be of batch" in fault
    assert partition_faults(job(component(1), component(1), 60), "batch*|up|n/a\n") == []


def test_a_line_of_sinfo_that_is_none_is_named():
    with pytest.raises(SlurmCallError, match=r"printed 'act0\|idle'"):
        partition_faults(job(component(1), component(1)), "act0|idle\n")


def test_what_fits(slurm):
    answer = ask(component(1, "server"), component(2))
    assert (answer.faults, answer.warnings, answer.unchecked) == ([], [], [])
    assert answer.starts == (Start("2026-01-02T03:04:05", "n0"), Start("2026-01-02T03:04:05", "n0,n1"))


def test_components_that_fit_singly_but_not_together(slurm):
    (fault,) = ask(component(2, "server"), component(3)).faults
    for words in ("fit singly, but not together", "server would get n0,n1 and the actor n0,n1,n2", "expected 2 + 3"):
        assert words in fault
    assert ask(component(1, "server"), component(3)).faults == []


def test_a_server_that_takes_nodes_which_the_actor_cannot_do_without(slurm):
    """As on a real Slurm, which leaves four idle nodes idle."""
    actor = component(2, constraint="gpu")
    (fault,) = ask(component(1, "server"), actor).faults
    assert "the server may be put on nodes that the actor cannot do without (alone, the server would get n0" in fault
    assert "--server-constraint" in fault
    assert ask(component(1, "server", exclude="n0,n1"), actor).faults == []
    assert ask(component(1, "server"), component(1, constraint="gpu")).faults == []


def test_an_exclusion_by_a_file(slurm, tmp_path):
    (tmp_path / "hosts").write_text("n1\nn2\n")
    assert ask(component(1, "server"), component(1, exclude=str(tmp_path / "hosts"))).faults == []
    assert "--exclude=n1,n2,n0" in slurm.calls("sbatch")[-1]


def test_nodes_with_too_little_memory(slurm):
    for there, warned in (("4000", False), ("4000\n2000+", True)):
        slurm.answer("sinfo-memory", there)
        answer = ask(component(1, "server"), component(2), 3000)
        assert answer.faults == []
        assert ("up to 3000 MB" in "".join(answer.warnings) and "nodes with 2000 MB" in answer.warnings[0]) is warned
    assert ask(component(1, "server"), component(2, mem="8G"), 3000).warnings == []


def test_an_sbatch_that_names_no_nodes(slurm):
    slurm.answer("test-actor", error="sbatch: something else")
    answer = ask(component(1, "server"), component(1))
    assert answer.faults == [] and "whether both components fit together is not known" in answer.warnings[0]
