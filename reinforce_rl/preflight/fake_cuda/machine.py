"""One process as any rank of a GPU cluster: `install` once, then `with machine.rank(r, n):`."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from reinforce_rl.preflight.fake_cuda.guard import load_guard

if TYPE_CHECKING:
    from reinforce_rl.preflight.fake_cuda.collectives import Network
    from reinforce_rl.preflight.fake_cuda.ledger import Ledger
    from reinforce_rl.preflight.fake_cuda.mode import FakeCuda

GIBIBYTES = 80
_LEFT_OVER = 1 << 26
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_machine: Machine | None = None


class Machine:
    """What `install` made of this process."""

    def __init__(self, gpu: FakeCuda, network: Network):
        self.gpu = gpu
        self._network = network

    @contextlib.contextmanager
    def rank(self, rank: int = 0, world_size: int = 1) -> Iterator[Ledger]:
        """Be this rank inside the block, with an empty ledger."""
        before = {name: os.environ.get(name) for name in _PLACE}
        values = (str(rank), str(world_size), "0", "localhost", "1")
        os.environ.update(dict(zip(_PLACE, values, strict=True)))
        self._network.begin()
        if self.gpu.memory.bytes > _LEFT_OVER:
            gc.collect()  # a model that nobody holds is in cycles
        try:
            with self.gpu, self.gpu.counting("") as ledger:
                yield ledger
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def ranks(self, world_size: int, turn: Callable[[int], None], *, rehearsals: int = 0) -> dict[int, Ledger]:
        """Give every rank of a job its turn, in order.

        Args:
            world_size: of the job.
            turn: what a rank does, called within `rank`.
            rehearsals: turns of all ranks before, whose errors do not count. A rank needs one for each chain of
                objects that comes from a rank with a later turn.
        """
        self._network.objects.clear()
        for _ in range(rehearsals):
            for rank in range(world_size):
                with contextlib.suppress(Exception), self.rank(rank, world_size):
                    turn(rank)
        ledgers = {}
        for rank in range(world_size):
            with self.rank(rank, world_size) as ledgers[rank]:
                turn(rank)
        return ledgers


def install(gibibytes: int = GIBIBYTES) -> Machine:
    """Make this process a machine with fake GPUs, for good. Nothing may have imported torch before.

    Args:
        gibibytes: memory that each GPU claims to have; nothing ends when more is used.

    Raises:
        ConfigError: see `load_guard`.
    """
    global _machine
    if _machine is not None:
        return _machine
    load_guard()
    from reinforce_rl.preflight.fake_cuda.collectives import Network
    from reinforce_rl.preflight.fake_cuda.device import replace_device
    from reinforce_rl.preflight.fake_cuda.kernels import replace_kernels
    from reinforce_rl.preflight.fake_cuda.mode import FakeCuda

    gpu = FakeCuda()
    replace_device(gpu, gibibytes)
    replace_kernels(gpu)
    network = Network(gpu)
    network.install()
    _machine = Machine(gpu, network)
    return _machine
