"""The variables of a job: all faults in one message, defaults as the table says; what Slurm gave the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.errors import check_error, check_fault, raises_error

from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import (
    VARIABLES,
    Allocation,
    Component,
    Settings,
    read_allocation,
    read_settings,
    split_arguments,
)

REPOSITORY = Path("/repo")
# As Slurm 22.05 sets them for `-N2 --ntasks-per-node=1 : -N2 --ntasks-per-node=2 -c 2`.
ENVIRONMENT = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "2",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
    "SLURM_CPUS_PER_TASK_HET_GROUP_1": "2",
}


def faults_of(argv: list[str], **environment: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_settings(argv, environment, REPOSITORY)
    return caught.value.faults


def test_defaults_are_those_of_the_table() -> None:
    found = read_settings(["a=1", "--", "b=2"], {names.RUN_DIR: "/shared/run"}, REPOSITORY)
    assert found == Settings(
        Path("/shared/run"), REPOSITORY, actor_args=("a=1",), server_args=("b=2",)
    )


def test_all_variables_are_read() -> None:
    given = {
        names.RUN_DIR: "/shared/run",
        names.PYTHON: "/opt/python",
        "REINFORCE_LAUNCHER": "torchrun",
        names.ACTOR_DEVICES: "8",
        names.SERVER_DEVICES: "4",
        names.GENERATOR_DEVICES: "6",
        "REINFORCE_GENERATOR_RESTARTS": "3",
        "REINFORCE_SERVERS": "2",
        "REINFORCE_READY_SECONDS": "30.5",
        "REINFORCE_GRACE_SECONDS": "7",
        "REINFORCE_MAX_RESTARTS": "0",
        "REINFORCE_RESTART_AFTER_CRASH": "true",
        "REINFORCE_MPI": "pmix",
        names.CONTAINER_IMAGE: "a.sqsh",
        names.SERVER_CONTAINER_IMAGE: "b.sqsh",
        "REINFORCE_CONTAINER_MOUNTS": "/data:/data, /models:/models",
        "REINFORCE_SRUN_ARGS": "--cpu-bind=none --gres='gpu:a b'",
        "REINFORCE_SETUP": "module load cuda",
    }
    assert {*given, names.REPOSITORY} == {variable.name for variable in VARIABLES}
    assert read_settings([], given, REPOSITORY) == Settings(
        *(
            Path("/shared/run"),
            REPOSITORY,
            "/opt/python",
            "torchrun",
            8,
            4,
            6,
            2,
            30.5,
            7.0,
            0,
            3,
            "true",
            "pmix",
        ),
        *(
            "a.sqsh",
            "b.sqsh",
            ("/data:/data", "/models:/models"),
            ("--cpu-bind=none", "--gres=gpu:a b"),
        ),
        setup="module load cuda",
    )


def test_all_faults_are_told_at_once() -> None:
    found = faults_of(
        ["nonsense", "remote_rm.reward_model.port=1", "--", "inference.port=2"],
        REINFORCE_RUN_DIR="relative",
        REINFORCE_LAUNCHER="mpirun",
        REINFORCE_SERVERS="0",
        REINFORCE_ACTOR_DEVICES="many",
        REINFORCE_READY_SECONDS="-1",
        REINFORCE_GRACE_SECONDS="nan",
        REINFORCE_MAX_RESTARTS="1.5",
        REINFORCE_RESTART_AFTER_CRASH="yes",
        REINFORCE_SRUN_ARGS="'open",
        REINFORCE_CONTAINER_MOUNTS="data",
    )
    expected = [
        ("slurm.variable.invalid", "REINFORCE_RUN_DIR", "'relative'"),
        ("slurm.variable.invalid", "REINFORCE_LAUNCHER", "'mpirun'", "srun", "torchrun"),
        ("slurm.variable.invalid", "REINFORCE_ACTOR_DEVICES", "'many'", "1"),
        ("slurm.variable.invalid", "REINFORCE_SERVERS", "'0'", "1"),
        ("slurm.variable.invalid", "REINFORCE_READY_SECONDS", "'-1'"),
        ("slurm.variable.invalid", "REINFORCE_GRACE_SECONDS", "'nan'"),
        ("slurm.variable.invalid", "REINFORCE_MAX_RESTARTS", "'1.5'", " 0"),
        ("slurm.variable.invalid", "REINFORCE_RESTART_AFTER_CRASH", "'yes'", "false", "true"),
        ("slurm.variable.invalid", "REINFORCE_CONTAINER_MOUNTS", "'data'", "HOST:CONTAINER"),
        ("slurm.variable.invalid", "REINFORCE_SRUN_ARGS", "''open'"),
        ("slurm.argument.no_override", "'nonsense'", "actor", "KEY=VALUE"),
        ("slurm.argument.set_by_job", "remote_rm.reward_model.port", "actor"),
        ("slurm.argument.set_by_job", "inference.port", "server"),
    ]
    for fault, (key, *values) in zip(found, expected, strict=True):
        check_fault([fault], key, *values)


def test_run_dir_is_needed_and_may_be_said_twice() -> None:
    (fault,) = faults_of([])
    check_fault([fault], "slurm.run_dir.not_set", "REINFORCE_RUN_DIR")
    args = ["exp_manager.explicit_log_dir=/run/"]
    assert read_settings(args, {names.RUN_DIR: "/run"}, REPOSITORY).run_dir == Path("/run")
    (fault,) = faults_of(["exp_manager.explicit_log_dir=/elsewhere"], REINFORCE_RUN_DIR="/run")
    values = ("exp_manager.explicit_log_dir is /elsewhere", "REINFORCE_RUN_DIR is /run")
    check_fault([fault], "slurm.run_dir.set_twice", *values)


def test_mounts_need_a_container() -> None:
    (fault,) = faults_of([], REINFORCE_RUN_DIR="/run", REINFORCE_CONTAINER_MOUNTS="/data")
    values = ("REINFORCE_CONTAINER_MOUNTS", names.CONTAINER_IMAGE)
    check_fault([fault], "slurm.container.no_image", *values)


def test_arguments_are_split_at_the_first_separator() -> None:
    assert split_arguments(["a", "--", "b", "c"]) == (("a",), ("b", "c"))
    assert split_arguments(["a"]) == (("a",), ())
    assert split_arguments(["--", "b"]) == ((), ("b",))


def test_interpreter(tmp_path: Path) -> None:
    settings = Settings(Path("/run"), tmp_path)
    assert settings.interpreter("") == "python3"
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert settings.interpreter("") == str(own)
    # the host's environment is of no use in a container
    assert settings.interpreter("image") == "python3"
    assert Settings(Path("/run"), tmp_path, "/opt/python").interpreter("image") == "/opt/python"


def test_the_page_has_a_row_for_every_variable():
    page = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text(encoding="utf-8")
    for variable in VARIABLES:
        assert f"| `{variable.name}` | {variable.default} | {variable.meaning} |" in page


def settings_with(**values: object) -> Settings:
    return Settings(Path("/run"), Path("/repo"), **values)  # type: ignore[arg-type]


def test_two_components() -> None:
    expected = Allocation("7", 0, Component(0, "7", 2, 1, 1, None), Component(1, "8", 2, 2, 2, 2))
    assert read_allocation(settings_with(), ENVIRONMENT) == expected


def test_restarts_are_counted() -> None:
    assert (
        read_allocation(settings_with(), {**ENVIRONMENT, "SLURM_RESTART_COUNT": "3"}).restart == 3
    )


def test_devices_are_the_tasks_a_node_unless_they_are_set() -> None:
    without = {key: value for key, value in ENVIRONMENT.items() if "NTASKS_PER_NODE" not in key}
    assert read_allocation(settings_with(), without).actor.devices == 2  # of 2(x2)
    found = read_allocation(settings_with(actor_devices=8, server_devices=4), ENVIRONMENT)
    assert (found.actor.devices, found.actor.tasks_per_node, found.server.devices) == (8, 2, 4)


def test_a_job_of_another_shape_is_refused() -> None:
    with raises_error("slurm.components.wrong_number", "no heterogeneous job"):
        read_allocation(settings_with(), {})
    with raises_error("slurm.components.wrong_number", "4 components"):
        read_allocation(settings_with(), {"SLURM_HET_SIZE": "4"})


WITH_GENERATORS = {
    **ENVIRONMENT,
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_ID_HET_GROUP_2": "9",
    "SLURM_JOB_NUM_NODES_HET_GROUP_2": "1",
    "SLURM_NTASKS_PER_NODE_HET_GROUP_2": "2",
}
EXTERNAL = ("placement=disaggregated", "generation_ranks=0")


@pytest.mark.parametrize("args", [(), EXTERNAL[:1], EXTERNAL])
def test_component_2_has_the_generators(args: tuple[str, ...]) -> None:
    allocation = read_allocation(settings_with(actor_args=args), WITH_GENERATORS)
    assert allocation.generator == Component(2, "9", 1, 2, 2, None)


@pytest.mark.parametrize("arg", ["placement=colocated", "generation_ranks=1"])
def test_component_2_is_of_generators_that_register(arg: str) -> None:
    key, value = arg.split("=")
    with raises_error("slurm.generators.not_external", f"{key} is {value}"):
        read_allocation(settings_with(actor_args=(arg,)), WITH_GENERATORS)


def test_generators_that_register_need_component_2() -> None:
    with raises_error("slurm.components.wrong_number", "2 components", "expected three"):
        read_allocation(settings_with(actor_args=EXTERNAL), ENVIRONMENT)


def test_numbers_that_do_not_go_together() -> None:
    settings = settings_with(
        servers=3,
        actor_args=("trainer.num_nodes=1", "trainer.devices=2"),
        server_args=("devices=2", "reward_function.name=a.b"),
    )
    with pytest.raises(ConfigError) as caught:
        read_allocation(settings, {**ENVIRONMENT, "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4"})
    assert caught.value.keys == [
        "slurm.servers.no_divisor",
        "slurm.argument.not_the_jobs_size",
        "slurm.argument.not_the_jobs_size",
    ]
    first_words = [fault.partition(" ")[0] for fault in caught.value.faults]
    assert first_words == ["REINFORCE_SERVERS", "trainer.num_nodes", "devices"]
    check_error(caught.value, "slurm.servers.no_divisor", 3, "component 0 has 4 nodes")


def test_nodes_are_counted_for_each_server() -> None:
    environment = {**ENVIRONMENT, "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4"}
    read_allocation(settings_with(servers=2, server_args=("num_nodes=2",)), environment)
    with raises_error("slurm.argument.not_the_jobs_size", "num_nodes is 4", "2 nodes"):
        read_allocation(settings_with(servers=2, server_args=("num_nodes=4",)), environment)


def test_a_reward_function_is_one_process() -> None:
    args = ("reward_function.name=a.b",)
    with raises_error("slurm.servers.function_on_ranks", "a.b", "2 ranks"):
        read_allocation(settings_with(server_args=args), ENVIRONMENT)
    read_allocation(settings_with(server_args=args, servers=2), ENVIRONMENT)
