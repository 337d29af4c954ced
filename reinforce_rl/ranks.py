"""torchrun for one machine, with two differences: signals to stop reach the ranks, and the exit code is a rank's.

torchrun itself turns every failure of a rank into exit code 1. It passes SIGTERM on, but kills the ranks 30 s later,
however much of a checkpoint is still to be written; SIGUSR1 ends it and leaves the ranks behind.

Usage: python -m reinforce_rl.ranks TORCHRUN_OPTION... SCRIPT ARGUMENT...
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

import psutil

from reinforce_rl.errors import EXIT_FINISHED, EXIT_LOST_RANK, EXIT_STOPPED
from reinforce_rl.stop import STOP_SIGNALS

# What torchrun handles in its own way: it passes the signal on, and kills the ranks after a while.
TORCHRUN_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"


def run(arguments: list[str]) -> int:
    """Start the ranks and wait for them.

    Returns:
        the exit code: that of the rank which failed first; `EXIT_LOST_RANK` where a signal ended it, and
        `EXIT_STOPPED` where that was one which this process passed on, before the rank knew what to do with it.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    passed_on: set[int] = set()

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.add(number)
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                os.kill(rank.pid, number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    try:
        torchrun.run(torchrun.parse_args(["--signals-to-handle", TORCHRUN_SIGNALS, *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        if code >= 0:
            return code
        return EXIT_STOPPED if -code in passed_on else EXIT_LOST_RANK
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
