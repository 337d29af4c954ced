"""`examples/train_reinforce_actor.py` with a reward function in place of the server, for tests that kill it.

`train_tiny.py OVERRIDE...` is one run. `train_tiny.py serve` imports everything once and then makes one run of each
line of its input, a JSON list [log file, die before, ranks, override, ...], in one process a rank that it forks: it
prints the processes' ids at once and the exit status (negative: the signal) at the end. As torchrun does, it ends the
other ranks when one has failed; the status is then that of the one. With "die before" set, a process kills itself in
place of moving the first file or folder whose destination ends so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve()
sys.path[:0] = [str(SCRIPT.parents[1]), str(SCRIPT.parents[2])]

from omegaconf import DictConfig  # noqa: E402

from reinforce_rl.cli import start_ranks, with_config  # noqa: E402


@with_config("train_reinforce_actor")
def main(cfg: DictConfig) -> None:
    from reinforce_rl.config import load_config

    config = load_config(cfg)
    start_ranks(config.trainer.devices, config.trainer.num_nodes)

    from helpers.rewards import FunctionReward
    from helpers.tiny_run import PROMPT_TOKENS, SOME_ALIKE, odd_share

    import reinforce_rl.build as build

    # With prompts whose samples are all alike where those are left out.
    reward = SOME_ALIKE if config.trainer.reinforce.dynamic_filtering else FunctionReward(odd_share, PROMPT_TOKENS)
    build.connect_to_reward_server = lambda *_: reward  # type: ignore[assignment]
    build.train(config)


def die_before(suffix: str) -> None:
    move = os.replace

    def replace(source, destination):
        if str(destination).endswith(suffix):
            os.kill(os.getpid(), signal.SIGKILL)
        move(source, destination)

    os.replace = replace  # type: ignore[assignment]


def run_in_fork(log: str, suffix: str, environment: dict[str, str], overrides: list[str]) -> int:
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
        if suffix:
            die_before(suffix)
        main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def serve() -> None:
    import helpers.tiny_run  # noqa: F401  (so that the runs need not import)
    import transformers  # noqa: F401
    from helpers.toy_server import free_port

    for line in sys.stdin:
        log, suffix, ranks, *overrides = json.loads(line)
        places = [{}]
        if ranks > 1:
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            places = [{**address, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        processes = [run_in_fork(log, suffix, place, overrides) for place in places]
        print(*processes, flush=True)
        print(wait_for(processes), flush=True)


def wait_for(processes: list[int]) -> int:
    left, status = set(processes), 0
    while left:
        process, ended = os.wait()
        left.discard(process)
        if ended and not status:
            status = os.waitstatus_to_exitcode(ended)
            for other in left:
                os.kill(other, signal.SIGKILL)
    return status


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main()
