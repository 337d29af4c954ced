"""What Slurm gave the job: the nodes and tasks of its two components."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from reinforce_rl.config.keys import override_of
from reinforce_rl.errors import ConfigError
from reinforce_rl.launch.slurm import settings as names
from reinforce_rl.launch.slurm.settings import Settings

SERVER_GROUP, ACTOR_GROUP = 0, 1


@dataclass(frozen=True)
class Component:
    """One component of the heterogeneous job.

    Attributes:
        group: its number for srun.
        job_id: under which Slurm lists its steps.
        nodes: how many.
        devices: ranks on each.
        tasks_per_node: that were asked for.
        cpus_per_task: that were asked for; None where they were not.
    """

    group: int
    job_id: str
    nodes: int
    devices: int
    tasks_per_node: int
    cpus_per_task: int | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices


@dataclass(frozen=True)
class Allocation:
    """The job.

    Attributes:
        job_id: of the leader, by which people know it.
        restart: how often it was requeued.
        server, actor: the components.
    """

    job_id: str
    restart: int
    server: Component
    actor: Component

    @property
    def label(self) -> str:
        """Of this attempt, for the names of its files."""
        return f"{self.job_id}-{self.restart}"


def read_allocation(settings: Settings, environment: Mapping[str, str]) -> Allocation:
    """From the variables that Slurm sets for the batch step.

    Raises:
        ConfigError: it is no job of two components, or its numbers do not go together with the settings.
    """
    if environment.get("SLURM_HET_SIZE") != "2":
        found = environment.get("SLURM_HET_SIZE")
        what = f"a heterogeneous job of {found} components" if found else "no heterogeneous job"
        raise ConfigError(
            [
                f"this is {what}; expected two: sbatch [OPTIONS of the reward servers] : [OPTIONS of the actor] "
                "slurm/train_hetjob.sbatch ..."
            ]
        )
    server = _component(SERVER_GROUP, settings.server_devices, environment)
    actor = _component(ACTOR_GROUP, settings.actor_devices, environment)
    faults = _faults(settings, server, actor)
    if faults:
        raise ConfigError(faults)
    return Allocation(environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0")), server, actor)


def _component(group: int, devices: int | None, environment: Mapping[str, str]) -> Component:
    def of(name: str) -> str | None:
        return environment.get(f"{name}_HET_GROUP_{group}")

    # `--ntasks` without `--ntasks-per-node` gives only the second, such as 4(x2).
    first = re.match(r"\d+", of("SLURM_TASKS_PER_NODE") or "1")
    tasks = int(of("SLURM_NTASKS_PER_NODE") or (first.group() if first else 1))
    cpus = of("SLURM_CPUS_PER_TASK")
    return Component(
        group=group,
        job_id=of("SLURM_JOB_ID") or "",
        nodes=int(of("SLURM_JOB_NUM_NODES") or 1),
        devices=devices or tasks,
        tasks_per_node=tasks,
        cpus_per_task=int(cpus) if cpus else None,
    )


def _faults(settings: Settings, server: Component, actor: Component) -> list[str]:
    faults = []
    if server.nodes % settings.servers:
        faults.append(
            f"{names.SERVERS} is {settings.servers}, and component 0 has {server.nodes} nodes; expected a divisor, "
            "since each server has nodes of its own"
        )
    wanted = (
        ("trainer.num_nodes", settings.actor_args, actor.nodes, "nodes of component 1"),
        ("trainer.devices", settings.actor_args, actor.devices, f"ranks a node ({names.ACTOR_DEVICES})"),
        ("num_nodes", settings.server_args, server.nodes // settings.servers, "nodes of each reward server"),
        ("devices", settings.server_args, server.devices, f"ranks a node ({names.SERVER_DEVICES})"),
    )
    for key, args, number, what in wanted:
        found = override_of(args, key)
        if found is not None and found != str(number):
            faults.append(f"{key} is {found}, but the job has {number} {what}; leave the key out, or ask for as many")
    function = override_of(settings.server_args, "reward_function.name")
    ranks = server.nodes // settings.servers * server.devices
    if function not in (None, "null", "") and ranks > 1:
        faults.append(
            f"reward_function.name is {function}, which one process serves, but each server has {ranks} ranks; "
            f"expected one node a server and {names.SERVER_DEVICES}=1"
        )
    return faults
