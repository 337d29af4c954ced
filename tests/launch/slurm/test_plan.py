"""The command line for sbatch, and the lead of the signal."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.errors import check_fault

from reinforce_rl.launch.slurm.options import ComponentOptions, parse_options
from reinforce_rl.launch.slurm.plan import Component, JobPlan, default_lead, lead_faults
from reinforce_rl.launch.slurm.settings import Settings


def job(*words: str, server: Component | None = None, actor: Component | None = None) -> JobPlan:
    options = parse_options(["--time=30", *words, "a=1", "b='x y'", "--", "c=2"], {})
    settings = Settings(
        Path("/shared/100%"),
        Path("/repo"),
        actor_args=options.actor_args,
        server_args=options.server_args,
    )
    server = server or Component("reward server", "x-rm", 1, 1)
    return JobPlan(
        server,
        actor or Component("actor", "x-actor", 2, 8),
        options,
        settings,
        300,
        {},
    )


def components_of(command: list[str]) -> tuple[list[str], list[str]]:
    colon = command.index(":")
    batch_file = command.index("/shared/100%/slurm/train_hetjob.sbatch")
    return command[1:colon], command[colon + 1 : batch_file]


def test_the_whole_line():
    both = [
        "--time=30",
        "--output=/shared/100%%/slurm/%j.out",
        "--open-mode=append",
        "--requeue",
        "--export=ALL",
    ]
    assert job().command() == [
        *("sbatch", "--parsable", "--signal=B:USR1@300"),
        *(*both, "--job-name=x-rm", "--nodes=1", "--ntasks-per-node=1", ":"),
        *(*both, "--job-name=x-actor", "--nodes=2", "--ntasks-per-node=8"),
        *("/shared/100%/slurm/train_hetjob.sbatch", "a=1", "b='x y'", "--", "c=2"),
    ]


def test_signal_and_dependency_stand_in_component_0():
    server, actor = components_of(job().command(after="17"))
    assert {"--signal=B:USR1@300", "--dependency=afterany:17"} <= set(server)
    assert not [word for word in actor if word.startswith(("--signal", "--dependency"))]


def test_components_have_options_of_their_own():
    options = ComponentOptions(
        partition="gpu",
        account="a",
        qos="q",
        constraint="ib",
        nodelist="n[1-2]",
        exclude="n3",
        sbatch_args=("-x",),
    )
    actor = Component(
        "actor",
        "x-actor",
        2,
        8,
        96,
        "h100:8",
        options,
    )
    server, mine = components_of(job(actor=actor).command())
    expected = "--job-name=x-actor --partition=gpu --account=a --qos=q --constraint=ib"
    expected += " --nodelist=n[1-2] --exclude=n3 --nodes=2 --ntasks-per-node=8"
    expected += " --cpus-per-task=96 --gpus-per-node=h100:8 -x"
    assert mine[-12:] == expected.split()
    assert not [word for word in server if "gpu" in word]


def test_the_actor_does_not_inherit_the_exclusion_of_the_server():
    server = Component("reward server", "x-rm", 1, 1, options=ComponentOptions(exclude="n1"))
    mine = components_of(job(server=server).command())[1]
    assert mine[0] == "--exclude="
    actor = Component("actor", "x-actor", 2, 8, options=ComponentOptions(exclude="n2"))
    mine = components_of(job(server=server, actor=actor).command())[1]
    assert [word for word in mine if word.startswith("--exclude")] == ["--exclude=n2"]


def test_without_a_limit_there_is_no_signal():
    assert "--signal" not in " ".join(job("--time=UNLIMITED").command())


def test_test_only_submits_nothing():
    plan = job()
    assert "--parsable" not in plan.command(test_only=True)
    assert plan.command(test_only=True)[1] == plan.test_command(plan.actor)[1] == "--test-only"
    assert plan.test_command(plan.actor)[-1] == "--wrap=true"
    assert plan.test_command(plan.actor, exclude="n[1-2]")[-2] == "--exclude=n[1-2]"


@pytest.mark.parametrize(
    ("settings", "of_tasks", "of_script"),
    [
        ({}, sys.executable, sys.executable),
        ({"python": "/opt/python"}, "/opt/python", "/opt/python"),
        ({"container_image": "a.sqsh"}, "python3", sys.executable),
        ({"container_image": "a.sqsh", "python": "/opt/python"}, "/opt/python", sys.executable),
    ],
)
def test_the_interpreters(settings: dict[str, str], of_tasks: str, of_script: str) -> None:
    plan = job()
    plan = replace(plan, settings=replace(plan.settings, **settings))
    filled = plan.script_settings
    assert (filled["python"], filled["batch_python"]) == (of_tasks, of_script)


def test_the_lead_follows_the_last_save():
    assert default_lead(None) == 300
    assert default_lead(5.0) == 120
    assert default_lead(400.2) == 861


@pytest.mark.parametrize(
    ("lead", "seconds", "save", "key", "values"),
    [
        (300, 14400, 200.0, "", []),
        (300, None, None, "", []),
        (300, 300, None, "slurm.signal_lead.no_time_to_train", ["300 s", "--time"]),
        (300, 360, None, "slurm.signal_lead.no_time_to_train", ["300 s", "--time above 360 s"]),
        (120, 3600, 90.5, "slurm.signal_lead.shorter_than_save", ["120 s", "90 s", "151 s"]),
        (70000, 100000, None, "slurm.signal_lead.too_long", [70000, 65535]),
    ],
)
def test_leads_that_do_not_fit(lead, seconds, save, key, values):
    faults = list(lead_faults(lead, seconds, save))
    assert [fault.key for fault in faults] == ([key] if key else [])
    if key:
        check_fault(faults, key, *values)
