"""Slurm commands with timeouts, and the srun command line of each step."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reinforce_rl.config.keys import override_of
from reinforce_rl.launch.slurm.rendezvous import Endpoint
from reinforce_rl.launch.slurm.settings import SRUN, Allocation, Component, Settings

CALL_SECONDS = 30.0
# Not `python -m`: a container image may override PYTHONPATH.
START_TASK = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from reinforce_rl.launch.slurm.task import main; sys.exit(main(sys.argv[2:]))"
)
ACTOR = "actor"
# srun reads these as options, and Slurm sets them to component 0's values for every component.
# Without them a step gets all resources of its component on its nodes; ranks select GPUs by LOCAL_RANK.
FOREIGN_OPTIONS = (
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE"),
)


class SlurmCallError(Exception):
    """A Slurm command failed or timed out; `said` is its stderr, or why there is none."""

    def __init__(self, command: Sequence[str], said: str):
        super().__init__(f"{' '.join(command)}: {said}")
        self.said = said


def call(
    command: Sequence[str],
    *,
    seconds: float = CALL_SECONDS,
    base: Mapping[str, str] | None = None,
    with_stderr: bool = False,
    **environment: str,
) -> str:
    """Run a command and return its stdout.

    Args:
        base: its environment; None for this process's.
        with_stderr: append its stderr.
        environment: further variables.

    Raises:
        SlurmCallError: it failed.
    """
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**(os.environ if base is None else base), **environment},
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmCallError(
            command, f"no answer within {seconds:.0f} s; is the controller up (scontrol ping)?"
        ) from error
    except OSError as error:
        raise SlurmCallError(command, str(error)) from error
    if done.returncode:
        raise SlurmCallError(command, done.stderr.strip() or f"exit code {done.returncode}")
    return done.stdout + done.stderr if with_stderr else done.stdout


def job_times(job_id: str) -> tuple[int | None, int | None]:
    """Return start and end of an allocation in unix seconds; None if unknown to Slurm."""
    text = call(["squeue", "-h", "-j", job_id, "-o", "%A|%S|%e"], SLURM_TIME_FORMAT="%s")
    for line in text.splitlines():
        found, *times = line.split("|")
        if found == job_id:
            start, end = (int(value) if value.isdecimal() else None for value in times)
            return start, end
    return None, None


def node_names(nodelist: str) -> list[str]:
    """Expand a list such as act[0-3]."""
    return call(["scontrol", "show", "hostnames", nodelist]).split()


def steps(job_id: str) -> dict[str, str]:
    """Return names of a component's running steps by id (12.1), including the batch script."""
    lines = call(["squeue", "-h", "--steps", "-j", job_id, "-o", "%i|%j"]).splitlines()
    return {step: name for step, _, name in (line.strip().partition("|") for line in lines)}


def step_id(job_id: str, name: str) -> str | None:
    return next((step for step, found in steps(job_id).items() if found == name), None)


def signal_step(step: str, number: int) -> None:
    # Through the controller: scancel itself asks all nodes of the component, and fails where a step has only some.
    call(["scancel", "--ctld", f"--signal={int(number)}", step])


def requeue(job_id: str) -> None:
    """Requeue the running job with all its components; `job_id` is the leading component's."""
    call(["scontrol", "requeue", job_id])


def is_running(job_id: str) -> bool:
    """Return True if the job has nodes."""
    return any(state in ("R", "CF", "S", "ST") for state in _states(job_id))


def is_completing(job_id: str) -> bool:
    """Return True if Slurm is ending the job, after `scancel` or `scontrol requeue`."""
    return "CG" in _states(job_id)


def _states(job_id: str) -> list[str]:
    try:
        return call(["squeue", "-h", "-j", job_id, "-o", "%t"]).split()
    except SlurmCallError:  # Slurm has forgotten an old job
        return []


@dataclass(frozen=True)
class StepPlan:
    name: str  # for `srun -J` and file names: actor, or rm-0, rm-1, ...
    component: Component
    nodes: tuple[str, ...]  # names; empty for all of the component's
    tasks: int  # number of them
    ranks: int  # number of them
    program: tuple[str, ...]  # a Python file of the repository and its arguments
    serves: bool  # it is a reward server
    image: str  # of the container; empty for none
    peers: tuple[str, ...]  # a node of the other component


def server_plan(
    settings: Settings, allocation: Allocation, number: int, nodes: Sequence[str], folder: Path, peers: Sequence[str]
) -> StepPlan:
    """Plan the step of reward server `number` on its share of component 0's `nodes`."""
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


def actor_plan(
    settings: Settings, allocation: Allocation, servers: Sequence[Endpoint], peers: Sequence[str]
) -> StepPlan:
    """Plan the actor's step, with the servers' addresses."""
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
        own["remote_rm.reward_model.replicas"] = f"[{','.join(server.http for server in servers[1:])}]"
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
    """Return the srun command of a step; `folder` is the attempt's."""
    component = plan.component
    nodes = len(plan.nodes) or component.nodes
    line = ["srun", f"--job-name={plan.name}", f"--het-group={component.group}"]
    line += [f"--nodes={nodes}", f"--ntasks={plan.tasks}", f"--ntasks-per-node={plan.tasks // nodes}"]
    if plan.nodes:
        line.append(f"--nodelist={','.join(plan.nodes)}")
    if component.cpus_per_task is not None:  # srun does not inherit it from the job
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
    """Drop the variables that srun would take as options."""
    return {name: value for name, value in environment.items() if name not in FOREIGN_OPTIONS}


def _with_setup(setup: str) -> str:
    """Return a shell script that runs `setup`, then execs the rest of the command line."""
    first = f". {shlex.quote(setup)}" if Path(setup).is_file() else setup
    # The signal before the time limit would end a shell that does not ignore it.
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
