"""Command line and environment of submit.py; times, memory and GPUs in Slurm's notation."""

from __future__ import annotations

import pytest
from helpers.errors import check_fault

from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.options import (
    COMPONENT_OPTIONS,
    OPTION_VARIABLES,
    ComponentOptions,
    _parser,
    parse_gpus,
    parse_memory,
    parse_options,
    parse_time,
    variable_of,
)


def test_options_and_overrides_in_any_order():
    words = [
        "a=1",
        "--partition",
        "gpu",
        "+algorithm=grpo",
        "--chain=3",
        "--dry-run",
        "b=2",
        "--",
        "devices=2",
        "c=3",
    ]
    options = parse_options(words, {})
    assert (options.actor_args, options.server_args) == (
        ("a=1", "+algorithm=grpo", "b=2"),
        ("devices=2", "c=3"),
    )
    assert (options.actor.partition, options.server.partition) == ("gpu", "gpu")
    assert (options.chain, options.dry_run, options.time, options.seconds) == (
        3,
        True,
        "04:00:00",
        14400,
    )
    assert options.lead is options.job_name is None
    assert options.variables == {}


def test_the_variables_of_options_are_known():
    """They are removed from a job's environment."""
    parser = _parser()
    options = [word[2:] for action in parser._actions for word in action.option_strings]
    alone = {"", "help", "dry-run", "chain", *(word for word in options if "sbatch-arg" in word)}
    expected = {variable_of(option) for option in {*options} - alone} | {names.RUN_DIR}
    assert expected == OPTION_VARIABLES


def test_what_counts_first():
    """The component's option precedes the common one, then the environment, then sbatch's."""
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
    assert (
        parse_options([], {"SBATCH_PARTITION": "e", "REINFORCE_PARTITION": " "}).server.partition
        == "e"
    )


def test_every_option_of_a_component():
    values = {"gpus": "h100:4", "cpus-per-task": "7", "mem": "64G"}
    words = [f"--actor-{name}={values.get(name, f'x-{name}')}" for name in COMPONENT_OPTIONS]
    words += [
        "--sbatch-arg=--reservation=r",
        "--server-sbatch-arg=--switches=1",
        "--server-gpus",
        "h100:2",
    ]
    options = parse_options(words, {"REINFORCE_GPUS_PER_NODE": "8"})
    plain = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
    expected = {
        **{name: f"x-{name}" for name in plain},
        "gpus": "h100:4",
        "cpus_per_task": "7",
        "mem": "64G",
    }
    assert options.actor == ComponentOptions(**expected, sbatch_args=("--reservation=r",))
    assert options.server == ComponentOptions(
        gpus="h100:2", sbatch_args=("--reservation=r", "--switches=1")
    )
    assert parse_options([], {"REINFORCE_GPUS_PER_NODE": "8"}).actor.gpus == "8"


def test_variables_of_the_job_are_options_too():
    environment = {
        "REINFORCE_MPI": "pmix",
        "REINFORCE_PYTHON": "python3",
        names.RUN_DIR: "/elsewhere",
        "REINFORCE_READY_SECONDS": "",
    }
    words = ["--python", "/opt/python", "--servers=2", "--container-image", "image.sqsh"]
    assert parse_options(words, environment).variables == {
        "REINFORCE_MPI": "pmix",
        "REINFORCE_PYTHON": "/opt/python",
        "REINFORCE_SERVERS": "2",
        "REINFORCE_CONTAINER_IMAGE": "image.sqsh",
    }


@pytest.mark.parametrize("word", ["--partitoin=x", "--nodelist=x", "--run-dir=/x"])
def test_unknown_options_end_it(word, capsys):
    with pytest.raises(SystemExit):
        parse_options([word], {})
    assert word.partition("=")[0] in capsys.readouterr().err


def test_values_of_the_wrong_kind():
    words = ["--time=soon", "--signal-lead=0", "--chain=few", "--mem=much", "--actor-gpus=many"]
    options = parse_options([*words, "--server-cpus-per-task=1.5"], {})
    expected = [
        ("--time", "'soon'", "HH:MM:SS"),
        ("--signal-lead", "'0'", "1"),
        ("--chain", "'few'", "1"),
        ("--actor-gpus", "'many'", "[TYPE:]COUNT"),
        ("--actor-mem", "'much'", "SIZE[K|M|G|T]"),
        ("--server-cpus-per-task", "'1.5'", " 1"),
        ("--server-mem", "'much'", "SIZE[K|M|G|T]"),
        ("--generator-mem", "'much'", "SIZE[K|M|G|T]"),
    ]
    for fault, values in zip(options.faults, expected, strict=True):
        check_fault([fault], "slurm.option.invalid", *values)
    assert (options.seconds, options.lead, options.chain) == (None, None, 1)
    assert options.actor == options.server == ComponentOptions()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("04:00:00", 14400),
        ("1-6", 108000),
        ("1-6:30", 109800),
        ("2-00:00:01", 172801),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_times(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "4h", "1:2:3:4", "-5", "1-2:3:4:5", "00:00"])
def test_invalid_times(text):
    with pytest.raises(ValueError, match="MINUTES, HH:MM:SS"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("0", 0),
        ("4000", 4000),
        ("64G", 65536),
        ("2t", 2097152),
        ("1025K", 2),
        ("16GB", 16384),
    ],
)
def test_memory(text, megabytes):
    assert parse_memory(text) == megabytes


@pytest.mark.parametrize("text", ["", "G", "1.5G", "12X"])
def test_invalid_memory(text):
    with pytest.raises(ValueError, match="such as 64G"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8", 8), ("h100:8", 8), ("1g.10gb:2", 2), ("nvidia_a100-80gb:4", 4), ("0", 0)],
)
def test_gpus(text, count):
    assert parse_gpus(text) == count


@pytest.mark.parametrize("text", ["h100", "h100:", ":8", "many", "8:h100"])
def test_invalid_gpus(text):
    with pytest.raises(ValueError, match="such as 8 or h100:8"):
        parse_gpus(text)
