"""Forks the ranks of `run_ranks` from a process that has imported torch and megatron-core.

Reads one request a line, {script, args, ranks, environment, output}, and answers with the exit
status of the first failed rank, or 0. If a rank fails, the others are killed, as by torchrun.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import threading

from helpers import warm

from reinforce_rl.utils.net import free_port
from reinforce_rl.utils.process import die_with_parent


def main() -> None:
    die_with_parent(os.getppid())
    warm.import_all()
    for line in sys.stdin:
        request = json.loads(line)
        ranks = set()
        environment = {**request["environment"], **rendezvous(request["ranks"])}
        for rank in range(request["ranks"]):
            process = os.fork()
            if not process:
                become(request, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                return
            ranks.add(process)
        print(wait_for(ranks), flush=True)


def rendezvous(ranks: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def become(request: dict, environment: dict[str, str]) -> None:
    """Run the script as `__main__`."""
    assert threading.active_count() == 1
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for target in (1, 2):
        os.dup2(output, target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    die_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [request["script"], *request["args"]]
    sys.path[0] = os.path.dirname(request["script"])
    runpy.run_path(request["script"], run_name="__main__")


def wait_for(ranks: set[int]) -> int:
    first = 0
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return first


if __name__ == "__main__":
    main()
