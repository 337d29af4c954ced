"""What the batch step's variables say of the job's components."""

from __future__ import annotations

from pathlib import Path

import pytest

from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.slurm.allocation import Allocation, Component, read_allocation
from reinforce_rl.launch.slurm.settings import Settings

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


def settings_with(**values: object) -> Settings:
    return Settings(Path("/run"), Path("/repo"), **values)  # type: ignore[arg-type]


def test_two_components() -> None:
    expected = Allocation("7", 0, Component(0, "7", 2, 1, 1, None), Component(1, "8", 2, 2, 2, 2))
    assert read_allocation(settings_with(), ENVIRONMENT) == expected
    assert expected.label == "7-0"
    assert expected.actor.ranks == 4


def test_a_requeued_job_has_another_label() -> None:
    assert read_allocation(settings_with(), {**ENVIRONMENT, "SLURM_RESTART_COUNT": "3"}).label == "7-3"


def test_devices_are_the_tasks_a_node_unless_they_are_set() -> None:
    without = {key: value for key, value in ENVIRONMENT.items() if "NTASKS_PER_NODE" not in key}
    assert read_allocation(settings_with(), without).actor.devices == 2  # of 2(x2)
    found = read_allocation(settings_with(actor_devices=8, server_devices=4), ENVIRONMENT)
    assert (found.actor.devices, found.actor.tasks_per_node, found.server.devices) == (8, 2, 4)


def test_a_job_of_another_shape_is_refused() -> None:
    for environment, found in (({}, "no heterogeneous job"), ({"SLURM_HET_SIZE": "3"}, "of 3 components")):
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
