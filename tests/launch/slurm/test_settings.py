"""A job's settings: all faults in one message, the documented defaults, Slurm's variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.errors import check_fault

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import (
    VARIABLES,
    Settings,
    component_faults,
    read_settings,
    split_arguments,
    unread_variables,
)

REPOSITORY = Path("/repo")
# Set by Slurm 22.05 for `-N2 --ntasks-per-node=1 : -N2 --ntasks-per-node=2 -c 2`.
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


def test_defaults_equal_the_table() -> None:
    settings = read_settings(["a=1", "--", "b=2"], {names.RUN_DIR: "/shared/run"}, REPOSITORY)
    assert settings == Settings(
        Path("/shared/run"), REPOSITORY, actor_args=("a=1",), server_args=("b=2",)
    )


def test_all_variables_are_read() -> None:
    given = {
        names.RUN_DIR: "/shared/run",
        "REINFORCE_PYTHON": "/opt/python",
        "REINFORCE_GENERATOR_DEVICES": "6",
        "REINFORCE_GENERATOR_RESTARTS": "3",
        "REINFORCE_SERVERS": "2",
        "REINFORCE_READY_SECONDS": "30",
        "REINFORCE_GRACE_SECONDS": "7",
        "REINFORCE_MAX_RESTARTS": "0",
        "REINFORCE_RESTART_AFTER_CRASH": "true",
        "REINFORCE_MPI": "pmix",
        "REINFORCE_CONTAINER_IMAGE": "a.sqsh",
        "REINFORCE_CONTAINER_MOUNTS": "/data:/data, /models:/models",
        "REINFORCE_SRUN_ARGS": "--cpu-bind=none --gres='gpu:a b'",
        "REINFORCE_SETUP": "module load cuda",
    }
    assert {*given} == {variable.name for variable in VARIABLES}
    settings = read_settings([], given, REPOSITORY)
    assert settings == Settings(
        run_dir=Path("/shared/run"),
        repository=REPOSITORY,
        python="/opt/python",
        generator_devices=6,
        servers=2,
        ready_seconds=30,
        grace_seconds=7,
        max_restarts=0,
        generator_restarts=3,
        restart_after_crash=True,
        mpi="pmix",
        container_image="a.sqsh",
        container_mounts=("/data:/data", "/models:/models"),
        srun_args=("--cpu-bind=none", "--gres=gpu:a b"),
        setup="module load cuda",
    )
    assert settings.srun_options == [
        "--mpi=pmix",
        "--container-image=a.sqsh",
        "--container-mounts=/repo:/repo,/shared/run:/shared/run,/data:/data,/models:/models",
        "--cpu-bind=none",
        "--gres=gpu:a b",
    ]


def test_all_faults_are_reported_at_once() -> None:
    faults = faults_of(
        ["nonsense", "remote_rm.reward_model.port=1", "--", "inference.port=2"],
        REINFORCE_RUN_DIR="relative",
        REINFORCE_SERVERS="0",
        REINFORCE_GENERATOR_DEVICES="many",
        REINFORCE_READY_SECONDS="-1",
        REINFORCE_GRACE_SECONDS="nan",
        REINFORCE_MAX_RESTARTS="1.5",
        REINFORCE_RESTART_AFTER_CRASH="yes",
        REINFORCE_SRUN_ARGS="'open",
        REINFORCE_CONTAINER_MOUNTS="data",
    )
    expected = [
        ("slurm.variable.invalid", "REINFORCE_RUN_DIR", "'relative'"),
        ("slurm.variable.invalid", "REINFORCE_GENERATOR_DEVICES", "'many'", "1"),
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
    for fault, (key, *values) in zip(faults, expected, strict=True):
        check_fault([fault], key, *values)


def test_run_dir_is_needed_and_may_be_given_twice() -> None:
    (fault,) = faults_of([])
    check_fault([fault], "slurm.run_dir.not_set", "REINFORCE_RUN_DIR")
    args = ["exp_manager.explicit_log_dir=/run/"]
    assert read_settings(args, {names.RUN_DIR: "/run"}, REPOSITORY).run_dir == Path("/run")
    (fault,) = faults_of(["exp_manager.explicit_log_dir=/elsewhere"], REINFORCE_RUN_DIR="/run")
    values = ("exp_manager.explicit_log_dir is /elsewhere", "REINFORCE_RUN_DIR is /run")
    check_fault([fault], "slurm.run_dir.set_twice", *values)


def test_mounts_need_a_container() -> None:
    (fault,) = faults_of([], REINFORCE_RUN_DIR="/run", REINFORCE_CONTAINER_MOUNTS="/data")
    values = ("REINFORCE_CONTAINER_MOUNTS", "REINFORCE_CONTAINER_IMAGE")
    check_fault([fault], "slurm.container.no_image", *values)


def test_a_file_is_not_a_shell_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "the env.sh"
    file.write_text("export A=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (str(file), "the env.sh", "~/the env.sh"):
        (fault,) = faults_of([], REINFORCE_RUN_DIR="/run", REINFORCE_SETUP=given)
        check_fault([fault], "slurm.variable.invalid", "REINFORCE_SETUP", f". '{file}'")
    for line in (f". '{file}'", "module load cuda", str(tmp_path)):
        given = {names.RUN_DIR: "/run", "REINFORCE_SETUP": line}
        assert read_settings([], given, REPOSITORY).setup == line


def test_variables_that_a_job_does_not_read() -> None:
    read = {name: "1" for name in (*names.OF_JOB, *names.OF_PROGRAMS)}
    empty = {"REINFORCE_MPI": " "}
    assert list(unread_variables({**read, **empty, "PATH": "/bin"})) == []
    faults = list(unread_variables({**read, "REINFORCE_SERVERS": "2", "REINFORCE_REPO": "/r"}))
    assert [fault.key for fault in faults] == ["slurm.variable.not_read"] * 2
    check_fault(faults[:1], "slurm.variable.not_read", "REINFORCE_REPO", "REINFORCE_RUN_DIR")
    check_fault(faults[1:], "slurm.variable.not_read", "REINFORCE_SERVERS")


def test_arguments_are_split_at_the_first_separator() -> None:
    assert split_arguments(["a", "--", "b", "c"]) == (("a",), ("b", "c"))
    assert split_arguments(["a"]) == (("a",), ())
    assert split_arguments(["--", "b"]) == ((), ("b",))


def test_the_page_has_a_row_for_every_variable():
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    for variable in VARIABLES:
        assert f"| `{variable.name}` | {variable.default} | {variable.meaning} |" in page


def faults_with(
    environment: dict[str, str],
    actor_args: tuple[str, ...] = (),
    server_args: tuple[str, ...] = (),
    servers: int = 1,
    generator_ranks: int = 1,
) -> list[Fault]:
    sizes = (servers, generator_ranks)
    return list(component_faults(*sizes, actor_args, server_args, environment))


def test_two_components() -> None:
    assert faults_with(ENVIRONMENT) == []
    sizes = ("trainer.num_nodes=2", "trainer.devices=2")
    assert faults_with(ENVIRONMENT, sizes, ("num_nodes=2", "devices=1")) == []


def test_a_job_of_another_shape_is_refused() -> None:
    key = "slurm.components.wrong_number"
    check_fault(faults_with({}), key, "no heterogeneous job")
    check_fault(faults_with({"SLURM_HET_SIZE": "4"}), key, "4 components")


WITH_GENERATORS = {
    **ENVIRONMENT,
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NUM_NODES_HET_GROUP_2": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_2": "2",
}
EXTERNAL = ("placement=disaggregated", "generation_ranks=0")


@pytest.mark.parametrize("args", [(), EXTERNAL[:1], EXTERNAL])
def test_component_2_has_the_generators(args: tuple[str, ...]) -> None:
    assert faults_with(WITH_GENERATORS, args) == []
    size = ("generation_tensor_parallel_size=2",)
    assert faults_with(WITH_GENERATORS, (*args, *size), generator_ranks=2) == []


@pytest.mark.parametrize("arg", ["placement=colocated", "generation_ranks=1"])
def test_component_2_is_of_generators_that_register(arg: str) -> None:
    key, value = arg.split("=")
    faults = faults_with(WITH_GENERATORS, (arg,))
    check_fault(faults, "slurm.generators.not_external", f"{key} is {value}")


def test_generators_that_register_need_component_2() -> None:
    faults = faults_with(ENVIRONMENT, EXTERNAL)
    check_fault(faults, "slurm.components.wrong_number", "2 components", "expected three")


def test_all_ranks_of_a_generator_are_on_one_node() -> None:
    size = ("generation_tensor_parallel_size=4",)
    faults = faults_with(WITH_GENERATORS, size, generator_ranks=4)
    check_fault(faults, "slurm.generators.not_a_multiple", 4, "2 tasks a node")
    faults = faults_with(WITH_GENERATORS, size)
    check_fault(faults, "slurm.generators.other_size", "is 4", "script is 1")


def test_numbers_that_do_not_go_together() -> None:
    faults = faults_with(
        {**ENVIRONMENT, "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4"},
        ("trainer.num_nodes=1", "trainer.devices=2"),
        ("devices=2", "reward_function.name=a.b"),
        servers=3,
    )
    assert [fault.key for fault in faults] == [
        "slurm.servers.no_divisor",
        "slurm.argument.not_the_jobs_size",
        "slurm.argument.not_the_jobs_size",
    ]
    first_words = [fault.partition(" ")[0] for fault in faults]
    assert first_words == ["servers", "trainer.num_nodes", "devices"]
    check_fault(faults[:1], "slurm.servers.no_divisor", 3, "component 0 has 4 nodes")


def test_nodes_are_counted_for_each_server() -> None:
    environment = {**ENVIRONMENT, "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4"}
    assert faults_with(environment, (), ("num_nodes=2",), servers=2) == []
    faults = faults_with(environment, (), ("num_nodes=4",), servers=2)
    check_fault(faults, "slurm.argument.not_the_jobs_size", "num_nodes is 4", "2 nodes")


def test_a_reward_function_is_one_process() -> None:
    args = ("reward_function.name=a.b",)
    faults = faults_with(ENVIRONMENT, (), args)
    check_fault(faults, "slurm.servers.function_on_ranks", "a.b", "2 ranks")
    assert faults_with(ENVIRONMENT, (), args, servers=2) == []
