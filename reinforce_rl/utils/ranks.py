"""torchrun with stop signals for the ranks, a rank's exit code, and a private rendezvous.

torchrun itself exits with 1 whenever a rank fails. It forwards SIGTERM but kills the ranks 30 s
later, even during a save; SIGUSR1 ends it and orphans the ranks. On one machine it listens on all
addresses without authentication, and unpickles what it receives.

Usage: python -m reinforce_rl.utils.ranks TORCHRUN_OPTION... SCRIPT ARGUMENT...
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from types import FrameType

import psutil

from reinforce_rl.errors import EXIT_FINISHED, EXIT_LOST_RANK, EXIT_STOPPED
from reinforce_rl.utils.process import active_stop_signals

# Signals left to torchrun, which forwards them and kills the ranks after a while.
TORCHRUN_SIGNALS = "SIGINT,SIGQUIT"
ONE_MACHINE = "one_machine"
STORE_VARIABLE = "REINFORCE_STORE"  # path of the ranks' rendezvous file on one machine


def run(arguments: list[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the first rank to fail.

    The code is `EXIT_LOST_RANK` if a signal killed the rank, or `EXIT_STOPPED` if this process
    forwarded that signal before the rank could handle it.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    passed_on: set[int] = set()

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed_on.add(number)
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                os.kill(rank.pid, number)

    for number in active_stop_signals():
        signal.signal(number, pass_on)
    options = torchrun.parse_args(["--signals-to-handle", TORCHRUN_SIGNALS, *arguments])
    if options.nnodes in ("1", "1:1"):
        _meet_on_this_machine()
        options.standalone = False
        options.rdzv_backend = ONE_MACHINE
        options.rdzv_endpoint = "localhost"
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        if code >= 0:
            return code
        if -code in passed_on:
            return EXIT_STOPPED
        print(
            f"error: rank {failure.local_rank} was ended by {failure.signal_name()}",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_LOST_RANK
    return EXIT_FINISHED


def _meet_on_this_machine() -> None:
    """Register the rendezvous backend ONE_MACHINE.

    Its ranks meet in a file and communicate over the loopback.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.elastic import rendezvous
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneMachine(StaticTCPRendezvous):
        @property
        def use_agent_store(self) -> bool:
            return False  # the ranks meet in REINFORCE_STORE, not in the agent's TCP store

        def get_backend(self) -> str:
            return ONE_MACHINE

        def next_rendezvous(self) -> rendezvous.RendezvousInfo:
            return rendezvous.RendezvousInfo(
                HashStore(), 0, 1, rendezvous.RendezvousStoreInfo("localhost", 0)
            )

    rendezvous.rendezvous_handler_registry.register(
        ONE_MACHINE, lambda parameters: OneMachine("localhost", 0, 0, 1, parameters.run_id, 0)
    )
    # An unnamed file in memory leaves nothing behind; only this user may open it by this path.
    os.environ[STORE_VARIABLE] = f"/proc/{os.getpid()}/fd/{os.memfd_create('store')}"
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
