"""The command lines of `srun` for the steps of a job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reinforce_rl.config.keys import override_of
from reinforce_rl.launch.slurm.allocation import Allocation, Component
from reinforce_rl.launch.slurm.rendezvous import Place
from reinforce_rl.launch.slurm.settings import SRUN, Settings

# Not `python -m`: a container's image may have a PYTHONPATH of its own, which ours would not come through.
START_TASK = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from reinforce_rl.launch.slurm.task import main; sys.exit(main(sys.argv[2:]))"
)
ACTOR = "actor"
# srun takes these for options, and Slurm sets them to what component 0 was asked for, whichever component srun is of.
# Without them a step has all that its component has on its nodes, and a rank finds its GPU by LOCAL_RANK among them.
FOREIGN_OPTIONS = (
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
)


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        name: for `srun -J` and the names of files: actor, or rm-0, rm-1, ...
        component: of the job.
        nodes: names, where it gets only some of the component's; empty for all.
        tasks: how many.
        ranks: how many.
        program: a Python file of the repository and its arguments.
        serves: it is a reward server.
        image: of the container; empty for none.
        peers: a node of the other component.
    """

    name: str
    component: Component
    nodes: tuple[str, ...]
    tasks: int
    ranks: int
    program: tuple[str, ...]
    serves: bool
    image: str
    peers: tuple[str, ...]


def server_plan(
    settings: Settings, allocation: Allocation, number: int, nodes: Sequence[str], folder: Path, peers: Sequence[str]
) -> StepPlan:
    """Of one reward server.

    Args:
        settings, allocation: of the job.
        number: of the server, from 0.
        nodes: of component 0.
        folder: of the attempt.
        peers: a node of the other component.
    """
    each = len(nodes) // settings.servers
    mine = tuple(nodes[number * each : (number + 1) * each])
    name = f"rm-{number}"
    own = {
        "inference.token_file": settings.token_file,
        "inference.ready_file": folder / f"ready-{number}.json",
        "num_nodes": each,
        "devices": allocation.server.devices,
    }
    script = settings.repository / "examples" / "serve_reward_model.py"
    return StepPlan(
        name=name,
        component=allocation.server,
        nodes=mine if settings.servers > 1 else (),
        tasks=each * (allocation.server.devices if settings.launcher == SRUN else 1),
        ranks=each * allocation.server.devices,
        program=(str(script), *settings.server_args, *_missing(settings.server_args, own)),
        serves=True,
        image=settings.server_container_image or settings.container_image,
        peers=tuple(peers),
    )


def actor_plan(settings: Settings, allocation: Allocation, servers: Sequence[Place], peers: Sequence[str]) -> StepPlan:
    """Of the actor, which is told where the servers are."""
    actor = allocation.actor
    own: dict[str, object] = {
        "trainer.num_nodes": actor.nodes,
        "trainer.devices": actor.devices,
        "exp_manager.explicit_log_dir": settings.run_dir,
        "remote_rm.reward_model.ip": servers[0].address,
        "remote_rm.reward_model.port": servers[0].http_port,
        "remote_rm.reward_model.token_file": settings.token_file,
    }
    if len(servers) > 1:
        own["remote_rm.reward_model.replicas"] = f"[{','.join(place.http for place in servers[1:])}]"
    name = override_of(settings.server_args, "inference.name")
    if name is not None:
        own["remote_rm.reward_model.name"] = name
    script = settings.repository / "examples" / "train_reinforce_actor.py"
    return StepPlan(
        name=ACTOR,
        component=actor,
        nodes=(),
        tasks=actor.nodes * (actor.devices if settings.launcher == SRUN else 1),
        ranks=actor.ranks,
        program=(str(script), *settings.actor_args, *_missing(settings.actor_args, own)),
        serves=False,
        image=settings.container_image,
        peers=tuple(peers),
    )


def _missing(args: Sequence[str], own: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in own.items() if override_of(args, key) is None]


def srun_line(settings: Settings, plan: StepPlan, folder: Path) -> list[str]:
    """The whole command.

    Args:
        settings: of the job.
        plan: of the step.
        folder: of the attempt.
    """
    component = plan.component
    nodes = len(plan.nodes) or component.nodes
    line = ["srun", f"--job-name={plan.name}", f"--het-group={component.group}"]
    line += [f"--nodes={nodes}", f"--ntasks={plan.tasks}", f"--ntasks-per-node={plan.tasks // nodes}"]
    if plan.nodes:
        line.append(f"--nodelist={','.join(plan.nodes)}")
    if component.cpus_per_task is not None:  # which srun does not take from the job by itself
        cpus = component.cpus_per_task * max(1, component.tasks_per_node * nodes // plan.tasks)
        line.append(f"--cpus-per-task={cpus}")
    line += ["--kill-on-bad-exit=1", "--export=ALL", "--label", f"--output={folder / plan.name}.log"]
    if settings.mpi:
        line.append(f"--mpi={settings.mpi}")
    if plan.image:
        own = (settings.repository, settings.run_dir)
        mounts = [*(f"{path}:{path}" for path in own), *settings.container_mounts]
        line += [f"--container-image={plan.image}", f"--container-mounts={','.join(mounts)}"]
    line += settings.srun_args
    if settings.setup:
        line += ["bash", "-c", _with_setup(settings.setup), "bash"]
    return [*line, *_task(settings, plan, folder)]


def srun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of an srun, without what would be taken for options of its own."""
    return {name: value for name, value in environment.items() if name not in FOREIGN_OPTIONS}


def _with_setup(setup: str) -> str:
    """A script that does what was asked for and becomes the rest of the command line."""
    first = f". {shlex.quote(setup)}" if Path(setup).is_file() else setup
    # The signal that comes before the time limit would end a shell that does not mind it.
    return (
        f"trap '' USR1\n{{ {first}\n}} || {{ echo 'error: REINFORCE_SETUP failed' >&2; exit 1; }}\n"
        'trap - USR1\nexec "$@"'
    )


def _task(settings: Settings, plan: StepPlan, folder: Path) -> list[str]:
    line = [settings.interpreter(plan.image), "-c", START_TASK, str(settings.repository)]
    line += [f"--component={plan.name}", f"--folder={folder}", f"--repository={settings.repository}"]
    line += [f"--launcher={settings.launcher}", f"--devices={plan.component.devices}"]
    line += [f"--seconds={settings.ready_seconds:g}", "--peers", *plan.peers]
    if plan.serves:
        line.append("--serves")
    return [*line, "--", *plan.program]
