"""`examples/train_reinforce_actor.py` with a reward function in place of the server, for tests that kill it.

`train_tiny.py OVERRIDE...` is one run. `train_tiny.py serve` imports everything once and then makes one run of each
line of its input, a JSON list [log file, options, ranks, override, ...], in one process a rank that it forks: it
prints the processes' ids at once, and at the end the exit status and that of each rank (negative: the signal). As
torchrun does, it ends the other ranks when one has failed, "patience" seconds later; the exit status is then that of
the one. Other options:

die_before: a process kills itself in place of moving the first file or folder whose destination ends so,
    but for the extension of a sample file.
act: {rank, phase, step, signal}: this rank sends itself the signal as it comes to the phase of this step, and with the
    signal 0 it does nothing any more, and with -1 it is busy for ever. While it waits for rewards the signal comes
    after a moment, and the rewards would take minutes.
allocation: from the fork on the batch system's allocation lasts so many seconds, and began hours before.
step_seconds: that each training lasts longer.
generators: [N, count]: the Nth training waits until so many generators have registered.
generate_seconds: that each call of the generator for a step lasts longer; one that may be interrupted, token by token.
slow_rank: with a request queue this rank ends its first micro-batch once the others have taken all that is left; every
    rank prints what it took.
engine: folder; TensorRT-LLM is the fake, and what the engine of rank N is given lies in folder/N.
engine_fault: [rank, options of `install_fake`]: what goes wrong with the engine of this rank.
generates: this is a generator that registers, beside what is started next. Its log ends with its exit status.
die_receiving: a generator kills itself as it is about to receive its Nth weights.
file_bytes: no file may become larger, which fails as a full disk does.
torch_timeout: seconds, in place of `TrainConfig.torch_timeout_seconds`.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

SCRIPT = Path(__file__).resolve()
GENERATES: list[bool] = []
LONG = 600.0  # seconds, longer than any test waits
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2])]

from omegaconf import DictConfig  # noqa: E402

from reinforce_rl.launch import programs, terminal  # noqa: E402
from reinforce_rl.launch.programs import with_config  # noqa: E402
from reinforce_rl.launch.terminal import start_ranks  # noqa: E402
from reinforce_rl.runtime.stop import StopRequest  # noqa: E402


@with_config("train_reinforce_actor")
def main(cfg: DictConfig) -> None:
    from reinforce_rl.config.load import load_config
    from reinforce_rl.runtime.settings import may_start

    ranks = os.environ.pop("WORLD_SIZE", None) if GENERATES else None
    config = load_config(cfg)
    os.environ.update({} if ranks is None else {"WORLD_SIZE": ranks})
    if not GENERATES and not may_start(config):
        return
    if not GENERATES:
        start_ranks(config.trainer.devices, config.trainer.num_nodes)
    stop = StopRequest.on_signals()

    from helpers.rewards import FunctionReward
    from helpers.tiny_run import PROMPT_TOKENS, SOME_ALIKE, odd_share

    import reinforce_rl.rewards.sources as connection
    from reinforce_rl.trainer.run import train

    # With prompts whose samples are all alike where those are left out.
    reward = (
        SOME_ALIKE
        if config.trainer.reinforce.dynamic_filtering
        else FunctionReward(odd_share, PROMPT_TOKENS)
    )
    connection._connect_to_reward_server = lambda *_: reward  # type: ignore[assignment]
    if GENERATES:
        from reinforce_rl.rollout.worker import generate

        generate(config, stop)
    else:
        train(config, stop)


def die_before(suffix: str) -> None:
    move = os.replace

    def replace(source, destination):
        if str(destination).endswith((suffix, f"{suffix}.parquet")):
            os.kill(os.getpid(), signal.SIGKILL)
        move(source, destination)

    os.replace = replace  # type: ignore[assignment]


def die_receiving(transfer: int) -> None:
    from reinforce_rl.rollout.weight_group import ElasticWeightGroup

    broadcast, calls = ElasticWeightGroup.broadcast, itertools.count(1)

    def die(group: ElasticWeightGroup, tensor):
        if next(calls) == transfer:
            os.kill(os.getpid(), signal.SIGKILL)
        return broadcast(group, tensor)

    ElasticWeightGroup.broadcast = die  # type: ignore[method-assign]


def limit_collectives(seconds: float) -> None:
    from reinforce_rl.config.actor import TrainConfig

    TrainConfig.torch_timeout_seconds = seconds  # type: ignore[assignment, misc]


def lengthen_steps(seconds: float) -> None:
    from reinforce_rl.trainer.reinforce import ReinforceTrainer

    train = ReinforceTrainer.run_training

    def slow_training(*args):
        time.sleep(seconds)
        return train(*args)

    ReinforceTrainer.run_training = slow_training  # type: ignore[method-assign]


def await_generators(training: int, count: int) -> None:
    from reinforce_rl.rollout.generator_pool import GeneratorPool
    from reinforce_rl.trainer.reinforce import ReinforceTrainer

    train = ReinforceTrainer.run_training
    register = GeneratorPool._register
    trainings = itertools.count(1)
    come = []

    def note_registration(pool: GeneratorPool, rank: int, registration):
        register(pool, rank, registration)
        come.append(rank)

    def wait_and_train(*args):
        deadline = time.monotonic() + LONG
        is_it = next(trainings) == training
        while is_it and len(come) < count:
            assert time.monotonic() < deadline, "they do not come"
            time.sleep(0.05)
        return train(*args)

    GeneratorPool._register = note_registration  # type: ignore[method-assign]
    ReinforceTrainer.run_training = wait_and_train  # type: ignore[method-assign]


def lengthen_generation(seconds: float) -> None:
    from reinforce_rl.generation.native.generator import NativeGenerator
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

    infer = MegatronGPTReinforceActorModel.infer

    def slow_infer(*args, validation: bool = False):
        if not validation:
            time.sleep(seconds)
        return infer(*args, validation=validation)

    MegatronGPTReinforceActorModel.infer = slow_infer  # type: ignore[method-assign]
    resume = NativeGenerator.resume

    def slow_resume(generator: NativeGenerator, responses, params, updates):
        return resume(
            generator, responses, params, SlowTokens(updates, seconds / params.max_length)
        )

    NativeGenerator.resume = slow_resume  # type: ignore[method-assign]


class SlowTokens:
    """`WeightUpdates` that sleep before each token, whatever the number of responses, as decoding does."""

    def __init__(self, updates, seconds: float):
        self._updates = updates
        self._seconds = seconds

    def __getattr__(self, name: str):
        return getattr(self._updates, name)

    def next_action(self, unfinished: int) -> str:
        time.sleep(self._seconds)
        return self._updates.next_action(unfinished)


def slow_down(slow: int, rank: int) -> None:
    from reinforce_rl.rollout.work_queue import COUNTER, WorkQueue

    take = WorkQueue.__iter__

    def take_slowly(queue: WorkQueue):
        taken = 0
        deadline = time.monotonic() + LONG
        for micro_batch in take(queue):
            taken += 1
            while (
                rank == slow
                and queue._shared
                and queue._mesh.count(COUNTER, 0) <= len(queue._micro_batches)
            ):
                assert time.monotonic() < deadline
                time.sleep(0.002)
            yield micro_batch
        print(
            f"queue: rank {rank} took {taken} of {len(queue._micro_batches)}, its own {len(queue._own)}",
            flush=True,
        )

    WorkQueue.__iter__ = take_slowly  # type: ignore[method-assign]


def use_fake_engine(folder: Path, rank: str, fault: list | None) -> None:
    from helpers.engine_fake import install_fake

    install_fake(folder / rank, **(fault[1] if fault and fault[0] == int(rank) else {}))


def act(phase: str, step: int, number: int) -> None:
    from helpers.rewards import ReadyRewards

    from reinforce_rl.runtime.phases import PhaseTracker

    begin = PhaseTracker.begin
    done = []

    def begin_and_act(phases: PhaseTracker, name: str, **options) -> None:
        begin(phases, name, **options)
        if name == phase and phases.phase.step >= step and not done:
            # a generator may be left out of a step
            done.append(True)
            if name.endswith("reward_wait"):
                ReadyRewards.result = wait_for_a_signal  # type: ignore[method-assign]
            elif number == 0:
                time.sleep(LONG)
            elif number == -1:
                while True:
                    time.sleep(0.05)
                    time.sleep(0.05)
            else:
                time.sleep(0.2)  # for the report of the new phase, which another thread sends
                os.kill(os.getpid(), number)

    def wait_for_a_signal(future: ReadyRewards) -> NoReturn:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        time.sleep(LONG)
        raise AssertionError("no signal came")

    PhaseTracker.begin = begin_and_act  # type: ignore[method-assign]


def run_in_fork(log: str, options: dict, environment: dict[str, str], overrides: list[str]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.environ.update(environment)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [str(SCRIPT), *overrides]
        if options.get("allocation"):
            now = round(time.time())
            times = {
                "SLURM_JOB_START_TIME": now - 7200,
                "SLURM_JOB_END_TIME": now + options["allocation"],
            }
            os.environ.update({name: str(value) for name, value in times.items()})
            print("the allocation ends at", times["SLURM_JOB_END_TIME"])
        if options.get("file_bytes"):
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_bytes"], most))
        if options.get("step_seconds"):
            lengthen_steps(options["step_seconds"])
        if options.get("generators"):
            await_generators(*options["generators"])
        if options.get("generate_seconds"):
            lengthen_generation(options["generate_seconds"])
        if "slow_rank" in options:
            slow_down(options["slow_rank"], int(environment.get("RANK", 0)))
        if "engine" in options:
            use_fake_engine(
                Path(options["engine"]), environment.get("RANK", "0"), options.get("engine_fault")
            )
        if options.get("torch_timeout"):
            limit_collectives(options["torch_timeout"])
        if options.get("generates"):
            GENERATES.append(True)
            # Its status is printed below.
            terminal.end_at_once = sys.exit  # type: ignore[assignment]
            programs.end_at_once = sys.exit  # type: ignore[assignment]
        if options.get("die_receiving"):
            die_receiving(options["die_receiving"])
        if options.get("die_before"):
            die_before(options["die_before"])
        if options.get("act", {}).get("rank") == int(environment.get("RANK", 0)):
            act(*(options["act"][key] for key in ("phase", "step", "signal")))
        main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    if GENERATES:
        print(f"exit status {status}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve() -> None:
    import helpers.tiny_run  # noqa: F401  (so that the runs need not import)
    from helpers import warm
    from helpers.toy_server import free_port

    warm.import_all()
    for line in sys.stdin:
        log, options, ranks, *overrides = json.loads(line)
        places = [{}]
        if ranks > 1:
            address = {
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(free_port()),
                "WORLD_SIZE": str(ranks),
            }
            places = [
                {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
            ]
        processes = [run_in_fork(log, options, place, overrides) for place in places]
        print(*processes, flush=True)
        if options.get("generates"):
            continue
        print(*wait_for(processes, options.get("patience", 0.0)), flush=True)


def wait_for(processes: list[int], patience: float) -> list[int]:
    status = 0
    found = dict[int, int]()
    deadline = None
    while len(found) < len(processes):
        for process in [process for process in processes if process not in found]:
            if deadline is not None and time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
            ended, code = os.waitpid(process, os.WNOHANG)
            if ended:
                found[process] = os.waitstatus_to_exitcode(code)
                status = status or found[process]
                if code and deadline is None:
                    deadline = time.monotonic() + patience
        time.sleep(0.01)
    return [status, *(found[process] for process in processes)]


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main()
