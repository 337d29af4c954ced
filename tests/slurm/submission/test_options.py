"""Command line and environment of submit.py."""

from __future__ import annotations

import pytest

from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.submission.options import COMPONENT_OPTIONS, ComponentOptions, parse_options


def test_options_and_overrides_in_any_order():
    words = ["a=1", "--partition", "gpu", "+algorithm=grpo", "--chain=3", "--dry-run", "b=2", "--", "devices=2", "c=3"]
    options = parse_options(words, {})
    assert (options.actor_args, options.server_args) == (("a=1", "+algorithm=grpo", "b=2"), ("devices=2", "c=3"))
    assert (options.actor.partition, options.server.partition) == ("gpu", "gpu")
    assert (options.chain, options.dry_run, options.time) == ("3", True, "04:00:00")
    assert options.signal_lead is options.job_name is None
    assert options.variables == ()


def test_what_counts_first():
    """The component's own option, that of both, then the same two of the environment, then sbatch's own."""
    environment = {
        "SBATCH_PARTITION": "e",
        "REINFORCE_PARTITION": "d",
        "REINFORCE_ACTOR_PARTITION": "c",
    }
    words = ["--partition=b", "--actor-partition=a"]
    assert parse_options(words, environment).actor.partition == "a"
    assert parse_options(words[:1], environment).actor.partition == "b"
    assert parse_options([], environment).actor.partition == "c"
    assert parse_options([], environment).server.partition == "d"
    assert parse_options([], {"SBATCH_PARTITION": "e", "REINFORCE_PARTITION": " "}).server.partition == "e"


def test_every_option_of_a_component():
    words = [f"{option.option('actor')}=x-{option.name}" for option in COMPONENT_OPTIONS]
    words += ["--sbatch-arg=--reservation=r", "--server-sbatch-arg=--switches=1", "--server-gpus", "h100:2"]
    options = parse_options(words, {"REINFORCE_GPUS_PER_NODE": "8"})
    assert options.actor == ComponentOptions(
        partition="x-partition",
        account="x-account",
        qos="x-qos",
        constraint="x-constraint",
        nodelist="x-nodelist",
        exclude="x-exclude",
        gpus="x-gpus",
        cpus_per_task="x-cpus-per-task",
        mem="x-mem",
        sbatch_args=("--reservation=r",),
    )
    assert options.server == ComponentOptions(gpus="h100:2", sbatch_args=("--reservation=r", "--switches=1"))
    assert parse_options([], {"REINFORCE_GPUS_PER_NODE": "8"}).actor.gpus == "8"


def test_variables_of_the_job_are_options_too():
    environment = {names.MPI: "pmix", names.LAUNCHER: "srun", names.RUN_DIR: "/elsewhere", names.READY_SECONDS: ""}
    words = ["--launcher", "torchrun", "--servers=2", "--container-image", "image.sqsh"]
    assert dict(parse_options(words, environment).variables) == {
        names.MPI: "pmix",
        names.LAUNCHER: "torchrun",
        names.SERVERS: "2",
        names.CONTAINER_IMAGE: "image.sqsh",
    }


@pytest.mark.parametrize("word", ["--partitoin=x", "--nodelist=x", "--run-dir=/x"])
def test_unknown_options_end_it(word, capsys):
    with pytest.raises(SystemExit):
        parse_options([word], {})
    assert word.partition("=")[0] in capsys.readouterr().err
