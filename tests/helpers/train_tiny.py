"""`examples/train_reinforce_actor.py` with a reward function instead of the server, to be killed.

`train_tiny.py OVERRIDE...` is one run. `train_tiny.py serve` imports everything once, then executes
a run for each line of its input, a JSON list [log file, options, ranks, override, ...], in one
forked process per rank. It prints the process ids at once, and at the end the exit status of the
run and of each rank (negative: the signal). Like torchrun, it kills the other ranks "patience"
seconds after the first failure and exits with the status of the failed rank. Other options:

die_before: the process kills itself instead of moving the first file or folder whose destination
    has this suffix, apart from the extension of a sample file.
act: {rank, phase, step, signal}: this rank sends itself the signal when it enters the phase of this
    step. With signal 0 it hangs, and with -1 it is busy forever. While it waits for rewards, the
    signal comes after a moment, and the rewards would take minutes.
step_seconds: delay of each training.
generates: the process is a generator that registers, and the next run starts beside it. Its log
    ends with its exit status.
patches: [[`reference` of a function, argument, ...], ...]: functions to call before the run.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

SCRIPT = Path(__file__).resolve()
GENERATES: list[bool] = []
LONG = 600.0  # seconds, longer than any test waits
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2])]

from helpers.ranks import resolve  # noqa: E402
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

    # Dynamic filtering needs some prompts whose samples all have the same reward.
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


def lengthen_steps(seconds: float) -> None:
    from reinforce_rl.trainer.reinforce import ReinforceTrainer

    train = ReinforceTrainer.run_training

    def slow_training(*args):
        time.sleep(seconds)
        return train(*args)

    ReinforceTrainer.run_training = slow_training  # type: ignore[method-assign]


def act(phase: str, step: int, number: int) -> None:
    from helpers.rewards import ReadyRewards

    from reinforce_rl.runtime.phases import PhaseTracker

    begin = PhaseTracker.begin
    done = []

    def begin_and_act(phases: PhaseTracker, name: str, **options) -> None:
        begin(phases, name, **options)
        if name == phase and phases.phase.step >= step and not done:
            # `>=`: a generator may be left out of a step
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


def be_rank(log: str, options: dict, environment: dict[str, str], overrides: list[str]) -> None:
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [str(SCRIPT), *overrides]
    for where, *arguments in options.get("patches", []):
        resolve(*where)(*arguments)
    if options.get("step_seconds"):
        lengthen_steps(options["step_seconds"])
    if options.get("die_before"):
        die_before(options["die_before"])
    if options.get("act", {}).get("rank") == int(environment.get("RANK", 0)):
        act(*(options["act"][key] for key in ("phase", "step", "signal")))
    if not options.get("generates"):
        main()
        return
    GENERATES.append(True)
    # The exit status is printed below.
    terminal.end_at_once = sys.exit  # type: ignore[assignment]
    programs.end_at_once = sys.exit  # type: ignore[assignment]
    status: object = 1
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
        raise
    finally:
        print(f"exit status {status}")


def serve() -> None:
    import helpers.tiny_run  # noqa: F401  (so that the runs need not import)
    import pytest  # noqa: F401
    from helpers import warm
    from helpers.toy_server import free_port

    warm.import_all()
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        log, options, count, *overrides = json.loads(line)
        address = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(count),
        }
        ranks = []
        for rank in range(count):
            place = {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            process = context.Process(target=be_rank, args=(log, options, place, overrides))
            process.start()
            ranks.append(process)
        print(*(process.pid for process in ranks), flush=True)
        if not options.get("generates"):
            print(*wait_for(ranks, options.get("patience", 0.0)), flush=True)


def wait_for(ranks: Sequence[BaseProcess], patience: float) -> list[int | None]:
    """Return the status of the first rank that failed, or 0, and those of all ranks."""
    status = 0
    patience_ends = math.inf
    while True:
        codes = [process.exitcode for process in ranks]
        if any(codes) and not status:
            status = next(code for code in codes if code)
            patience_ends = time.monotonic() + patience
        if None not in codes:
            return [status, *codes]
        if time.monotonic() > patience_ends:
            for process in ranks:
                process.kill()
        time.sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main()
