"""The variables of a job: all faults in one message, defaults as the table says; what Slurm gave the job."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    assert found == Settings(Path("/shared/run"), REPOSITORY, actor_args=("a=1",), server_args=("b=2",))


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
        *(Path("/shared/run"), REPOSITORY, "/opt/python", "torchrun", 8, 4, 6, 2, 30.5, 7.0, 0, 3, "true", "pmix"),
        *("a.sqsh", "b.sqsh", ("/data:/data", "/models:/models"), ("--cpu-bind=none", "--gres=gpu:a b")),
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
    starts = [
        "REINFORCE_RUN_DIR is 'relative'; expected an absolute path",
        "REINFORCE_LAUNCHER is 'mpirun'; expected srun or torchrun",
        "REINFORCE_ACTOR_DEVICES is 'many'; expected a whole number from 1",
        "REINFORCE_SERVERS is '0'; expected a whole number from 1",
        "REINFORCE_READY_SECONDS is '-1'",
        "REINFORCE_GRACE_SECONDS is 'nan'; expected seconds",
        "REINFORCE_MAX_RESTARTS is '1.5'; expected a whole number from 0",
        "REINFORCE_RESTART_AFTER_CRASH is 'yes'; expected false or true",
        "REINFORCE_CONTAINER_MOUNTS is 'data'; expected absolute paths",
        "REINFORCE_SRUN_ARGS is ''open'; expected arguments as in a shell",
        "'nonsense' among the actor's arguments",
        "remote_rm.reward_model.port is given among the actor's",
        "inference.port is given among the server's",
    ]
    for fault, start in zip(found, starts, strict=True):
        assert fault.startswith(start), (fault, start)


def test_run_dir_is_needed_and_may_be_said_twice() -> None:
    assert faults_of([]) == ["REINFORCE_RUN_DIR is not set; expected the run's folder, which all nodes share"]
    args = ["exp_manager.explicit_log_dir=/run/"]
    assert read_settings(args, {names.RUN_DIR: "/run"}, REPOSITORY).run_dir == Path("/run")
    (fault,) = faults_of(["exp_manager.explicit_log_dir=/elsewhere"], REINFORCE_RUN_DIR="/run")
    assert fault.startswith("exp_manager.explicit_log_dir is /elsewhere, but REINFORCE_RUN_DIR is /run")


def test_mounts_need_a_container() -> None:
    (fault,) = faults_of([], REINFORCE_RUN_DIR="/run", REINFORCE_CONTAINER_MOUNTS="/data")
    assert fault.startswith("REINFORCE_CONTAINER_MOUNTS is set, but neither")


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
    assert settings.interpreter("image") == "python3"  # the host's environment is of no use in a container
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
    assert read_allocation(settings_with(), {**ENVIRONMENT, "SLURM_RESTART_COUNT": "3"}).restart == 3


def test_devices_are_the_tasks_a_node_unless_they_are_set() -> None:
    without = {key: value for key, value in ENVIRONMENT.items() if "NTASKS_PER_NODE" not in key}
    assert read_allocation(settings_with(), without).actor.devices == 2  # of 2(x2)
    found = read_allocation(settings_with(actor_devices=8, server_devices=4), ENVIRONMENT)
    assert (found.actor.devices, found.actor.tasks_per_node, found.server.devices) == (8, 2, 4)


def test_a_job_of_another_shape_is_refused() -> None:
    for environment, found in (({}, "no heterogeneous job"), ({"SLURM_HET_SIZE": "4"}, "of 4 components")):
        with pytest.raises(ConfigError, match=found):
            read_allocation(settings_with(), environment)


def test_numbers_that_do_not_go_together() -> None:
    settings = settings_with(
        servers=3,
        actor_args=("trainer.num_nodes=1", "trainer.devices=2"),
        server_args=("devices=2", "reward_function.name=a.b"),
    )
    with pytest.raises(ConfigError) as caught:
        read_allocation(settings, {**ENVIRONMENT, "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4"})
    faults = caught.value.faults
    assert [fault.split(" ")[0] for fault in faults] == ["REINFORCE_SERVERS", "trainer.num_nodes", "devices"]
    assert "component 0 has 4 nodes" in faults[0]


def test_nodes_are_counted_for_each_server() -> None:
    environment = {**ENVIRONMENT, "SLURM_JOB_NUM_NODES_HET_GROUP_0": "4"}
    read_allocation(settings_with(servers=2, server_args=("num_nodes=2",)), environment)
    with pytest.raises(ConfigError, match="num_nodes is 4, but the job has 2 nodes of each reward server"):
        read_allocation(settings_with(servers=2, server_args=("num_nodes=4",)), environment)


def test_a_reward_function_is_one_process() -> None:
    args = ("reward_function.name=a.b",)
    with pytest.raises(ConfigError, match="each server has 2 ranks"):
        read_allocation(settings_with(server_args=args), ENVIRONMENT)
    read_allocation(settings_with(server_args=args, servers=2), ENVIRONMENT)
