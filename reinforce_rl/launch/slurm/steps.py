"""The steps of the job: `srun` processes, and those left by an earlier attempt."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reinforce_rl.launch.slurm.outcome import TaskEnd, read_ends
from reinforce_rl.launch.slurm.rendezvous import Endpoint, read_endpoint
from reinforce_rl.launch.slurm.settings import (
    ACTOR,
    EXTERNAL_GENERATORS,
    SRUN,
    Allocation,
    Component,
    Settings,
    override_of,
    with_missing,
)
from reinforce_rl.utils.process import Child
from reinforce_rl.utils.slurm_commands import SlurmCallError, call

POLL_SECONDS = 0.2
RETRY_SECONDS = 5.0
KILL_SECONDS = 60.0  # from SIGKILL of a step to SIGKILL of its srun
STALE_POLL_SECONDS = 1.0
KILLED = 128 + signal.SIGKILL
OUR_STEPS = re.compile(rf"{ACTOR}|rm-\d+|gen-\d+(\.\d+)?")
LOST_REASON = (
    "it left no record: its wrapper was killed, its node is gone, or the run's folder is full"
)
# Not `python -m`: a container image may override PYTHONPATH.
START_TASK = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from reinforce_rl.launch.slurm.task import main; sys.exit(main(sys.argv[2]))"
)
# srun reads these as options, and Slurm sets them to component 0's values for every component.
# Without them a step gets all resources of its component on its nodes; ranks select GPUs by
# LOCAL_RANK.
FOREIGN_OPTIONS = (
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    *(
        "SLURM_GPUS",
        "SLURM_GPUS_PER_NODE",
        "SLURM_GPUS_PER_SOCKET",
        "SLURM_GPUS_PER_TASK",
        "SLURM_GPU_BIND",
    ),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION"),
    *(
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_SOCKET",
        "SLURM_NTASKS_PER_CORE",
    ),
)


def job_states(job_id: str) -> set[str]:
    """Return Slurm's short names of the states of a job's components; CG if it is being ended or requeued."""
    try:
        return set(call(["squeue", "-h", "-j", job_id, "-o", "%t"]).split())
    except SlurmCallError:  # Slurm has forgotten an old job
        return set()


def steps(job_id: str) -> dict[str, str]:
    """Return names of a component's running steps by id (12.1), including the batch script."""
    lines = call(["squeue", "-h", "--steps", "-j", job_id, "-o", "%i|%j"]).splitlines()
    return {step: name for step, _, name in (line.strip().partition("|") for line in lines)}


def signal_step(step: str, number: int) -> None:
    # Through the controller: scancel itself asks all nodes of the component, and fails where a step
    # has only some.
    call(["scancel", "--ctld", f"--signal={int(number)}", step])


@dataclass(frozen=True)
class StepPlan:
    # for `srun -J` and file names: actor, rm-0, rm-1, ..., or gen-0, gen-0.1 after its first
    # restart, ...
    name: str
    component: Component
    nodes: tuple[str, ...]  # names; empty for all of the component's
    tasks_per_node: int
    program: tuple[str, ...]  # arguments of Python: a file, or -m and a name, and what follows
    serves: bool  # it is a reward server
    image: str  # of the container; empty for none
    peers: tuple[str, ...]  # a node of the other component
    listens: bool = False  # for generators, at its first task's address
    # of a generator, which may share its node: rank there of its first task
    first_local: int | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.nodes) or self.component.nodes

    @property
    def tasks(self) -> int:
        return self.num_nodes * self.tasks_per_node


def server_plan(
    settings: Settings,
    allocation: Allocation,
    number: int,
    nodes: Sequence[str],
    folder: Path,
    peers: Sequence[str],
) -> StepPlan:
    """Plan the step of reward server `number` on its share of component 0's `nodes`."""
    server = allocation.server
    each = len(nodes) // settings.servers
    own = {
        "inference.token_file": settings.token_file,
        "inference.ready_file": folder / f"ready-{number}.json",
    }
    own |= {"num_nodes": each, "devices": server.devices}
    mine = tuple(nodes[number * each : (number + 1) * each]) if settings.servers > 1 else ()
    program = (
        *settings.program("serve_reward_model", "serve"),
        *with_missing(settings.server_args, own),
    )
    image = settings.server_container_image or settings.container_image
    tasks = server.devices if settings.launcher == SRUN else 1
    return StepPlan(f"rm-{number}", server, mine, tasks, program, True, image, tuple(peers))


def actor_plan(
    settings: Settings, allocation: Allocation, servers: Sequence[Endpoint], peers: Sequence[str]
) -> StepPlan:
    """Plan the actor's step, with the servers' addresses."""
    actor = allocation.actor
    program = (
        *settings.program("train_reinforce_actor", "train"),
        *_actor_args(settings, allocation, servers),
    )
    tasks = actor.devices if settings.launcher == SRUN else 1
    listens = allocation.generator is not None
    image = settings.container_image
    return StepPlan(ACTOR, actor, (), tasks, program, False, image, tuple(peers), listens=listens)


def generator_plan(
    settings: Settings,
    allocation: Allocation,
    number: int,
    restart: int,
    nodes: Sequence[str],
    servers: Sequence[Endpoint],
    peers: Sequence[str],
) -> StepPlan:
    """Plan the step of a generator, which has a part of one of component 2's `nodes`, with the actor's arguments."""
    assert allocation.generator is not None
    each = allocation.generator_ranks
    node, place = divmod(number, allocation.generator.devices // each)
    name = f"gen-{number}.{restart}" if restart else f"gen-{number}"
    return StepPlan(
        name,
        replace(allocation.generator, devices=each),
        (nodes[node],),
        each,
        (*settings.program("generate", "generate"), *_actor_args(settings, allocation, servers)),
        False,
        settings.container_image,
        tuple(peers),
        first_local=place * each,
    )


def _actor_args(
    settings: Settings, allocation: Allocation, servers: Sequence[Endpoint]
) -> list[str]:
    actor = allocation.actor
    first, *others = servers
    own: dict[str, object] = {"trainer.num_nodes": actor.nodes, "trainer.devices": actor.devices}
    if allocation.generator is not None:
        own |= EXTERNAL_GENERATORS
    own["exp_manager.explicit_log_dir"] = settings.run_dir
    server: dict[str, object] = {
        "ip": first.address,
        "port": first.http_port,
        "token_file": settings.token_file,
    }
    if others:
        server["replicas"] = f"[{','.join(str(other.http) for other in others)}]"
    if (name := override_of(settings.server_args, "inference.name")) is not None:
        server["name"] = name
    own |= {f"remote_rm.reward_model.{key}": value for key, value in server.items()}
    return with_missing(settings.actor_args, own)


def srun_line(settings: Settings, plan: StepPlan, folder: Path) -> list[str]:
    """Return the srun command of a step; `folder` is the attempt's."""
    component = plan.component
    line = ["srun", f"--job-name={plan.name}", f"--het-group={component.group}"]
    line += [
        f"--nodes={plan.num_nodes}",
        f"--ntasks={plan.tasks}",
        f"--ntasks-per-node={plan.tasks_per_node}",
    ]
    is_generator = plan.first_local is not None
    if is_generator:
        line.append("--overlap")
    if plan.nodes:
        line.append(f"--nodelist={','.join(plan.nodes)}")
    if component.cpus_per_task is not None:  # srun does not inherit it from the job
        cpus = component.cpus_per_task * max(1, component.tasks_per_node // plan.tasks_per_node)
        line.append(f"--cpus-per-task={cpus}")
    line += [
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--label",
        f"--output={folder / plan.name}.log",
    ]
    if settings.mpi:
        line.append(f"--mpi={settings.mpi}")
    if plan.image:
        own = (settings.repository, settings.run_dir)
        mounts = [*(f"{path}:{path}" for path in own), *settings.container_mounts]
        line += [f"--container-image={plan.image}", f"--container-mounts={','.join(mounts)}"]
    line += settings.srun_args
    if settings.setup:
        line += ["bash", "-c", _with_setup(settings.setup), "bash"]
    task = {"component": plan.name, "folder": str(folder), "repository": str(settings.repository)}
    launcher = SRUN if is_generator else settings.launcher
    task |= {"launcher": launcher, "devices": component.devices, "seconds": settings.ready_seconds}
    task |= {"peers": plan.peers, "serves": plan.serves, "script": plan.program}
    task |= {"listens": True} if plan.listens else {}
    task |= {"first_local": plan.first_local} if is_generator else {}
    return [
        *line,
        settings.interpreter(plan.image),
        "-c",
        START_TASK,
        str(settings.repository),
        json.dumps(task),
    ]


def _with_setup(setup: str) -> str:
    """Return a shell script that runs `setup`, then execs the rest of the command line."""
    first = f". {shlex.quote(setup)}" if Path(setup).is_file() else setup
    # The signal before the time limit would end a shell that does not ignore it.
    return (
        f"trap '' USR1\n{{ {first}\n}} || {{ echo 'error: REINFORCE_SETUP failed' >&2; exit 1; }}\n"
        'trap - USR1\nexec "$@"'
    )


class Step:
    """A running `srun`; Slurm's variables for component 0 alone are left out of its `env`."""

    def __init__(
        self,
        plan: StepPlan,
        line: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        log: Callable[[str], None],
    ):
        self.plan = plan
        self.name = plan.name
        self._messages: list[tuple[float, str]] = []
        self._folder = folder
        self._log = log
        env = {name: value for name, value in env.items() if name not in FOREIGN_OPTIONS}
        self._srun = Child(
            line, own_session=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
        )
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        return self._srun.exit_code is not None

    @property
    def failed_node(self) -> str:
        """Return the node whose failure srun reports; empty for none."""
        found = (
            re.search(r"error: Node failure on (\S+)", message)
            for _, message in list(self._messages)
        )
        return next((match[1] for match in found if match), "")

    def _read_messages(self) -> None:
        # srun's own messages: killed tasks, or a step that cannot start. Tasks write to the log
        # file.
        assert self._srun.process.stderr is not None
        for line in self._srun.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._messages.append((time.time(), text))
            self._log(f"{self.name}: {text}")

    def signal(self, number: int) -> bool:
        """Signal every process of the step; return False if it must be retried."""
        job_id = self.plan.component.job_id
        try:
            found = (
                []
                if self.has_ended
                else [step for step, name in steps(job_id).items() if name == self.name]
            )
            for step in found:
                signal_step(step, number)
            return bool(found)
        except SlurmCallError as error:
            if "CG" in job_states(job_id):  # and Slurm sends SIGTERM itself
                return True
            self._log(f"cannot signal {self.name}, trying again: {error}")
            return False

    def end(self, number: int, deadline: float) -> bool:
        """Signal the step, kill it at `deadline` (`time.monotonic`); return True if it ended by itself."""
        if self._ends_by(number, deadline):
            return True
        self._log(f"{self.name} has not ended in time; killing it")
        if not self._ends_by(signal.SIGKILL, time.monotonic() + KILL_SECONDS):
            self._srun.kill()
        return False

    def _ends_by(self, number: int, deadline: float) -> bool:
        # Retry: a starting step has no id yet, and the controller may be busy.
        while not self.has_ended and not self.signal(number) and time.monotonic() < deadline:
            self._wait(min(deadline, time.monotonic() + RETRY_SECONDS))
        return self._wait(deadline)

    def _wait(self, deadline: float) -> bool:
        if self._srun.wait(deadline - time.monotonic()) is not None:
            self._reader.join(5.0)
        return self.has_ended

    def ends(self) -> list[TaskEnd]:
        return [end for end in read_ends(self._folder) if end.component == self.name]

    def lost(self) -> list[TaskEnd]:
        """Return tasks without a recorded end, after the step failed."""
        known = {end.task for end in self.ends()}
        if not self._srun.exit_code or (
            not known and read_endpoint(self._folder, self.name) is None
        ):
            return []  # it did not fail, or nothing was started
        found = (self._lost_task(task) for task in range(self.plan.tasks) if task not in known)
        return sorted(found, key=lambda end: end.time)

    def _lost_task(self, task: int) -> TaskEnd:
        each = self.plan.component.devices // self.plan.tasks_per_node
        ranks = str(task) if each == 1 else f"{task * each}-{(task + 1) * each - 1}"
        # srun: error: act1: task 2: Killed        srun: error: act0: tasks 0-1: Exited with exit
        # code 1
        for when, message in self._messages:
            found = re.search(
                r"error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+))?", message
            )
            spans = [span.split("-") for span in found[2].split(",")] if found else []
            if found and any(int(span[0]) <= task <= int(span[-1]) for span in spans):
                return TaskEnd(
                    self.name, task, ranks, found[1], int(found[3] or KILLED), when, LOST_REASON
                )
        return TaskEnd(self.name, task, ranks, "an unknown node", KILLED, time.time(), LOST_REASON)


def end_stale_steps(job_ids: Sequence[str], seconds: float, log: Callable[[str], None]) -> None:
    """End steps of an earlier attempt whose batch script is gone: SIGTERM, SIGKILL after `seconds`, or SlurmCallError.

    When a node of component 0 fails, Slurm 22.05 requeues this component alone. The actor goes on in the folder that
    the next attempt needs, and holds the cores that its srun would wait for.
    """
    left = ""
    for number, limit, how in (
        (signal.SIGTERM, seconds, "asked to end"),
        (signal.SIGKILL, KILL_SECONDS, "killed"),
    ):
        deadline = time.monotonic() + limit
        signalled: set[str] = set()
        while True:
            try:
                found = {
                    s: name
                    for job in job_ids
                    for s, name in steps(job).items()
                    if OUR_STEPS.fullmatch(name)
                }
                for step in sorted(found.keys() - signalled):
                    signal_step(step, number)
                    signalled.add(step)
                    log(
                        f"{found[step]} of an earlier attempt still runs, as step {step}; it is {how}"
                    )
                left = ", ".join(
                    f"step {step} ({name}) of an earlier attempt" for step, name in found.items()
                )
            except SlurmCallError as error:
                left = f"what an earlier attempt may have left: {error}"
            if not left:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(STALE_POLL_SECONDS)
    raise SlurmCallError(("squeue", "--steps"), f"cannot end {left}")
