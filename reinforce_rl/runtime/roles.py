"""Roles of a job's ranks if some ranks only generate: which train, which generate, how they meet.

The first ranks train and the last ranks generate. The trainers form one world of process groups.
Each generator, the ranks that share one copy of the model, forms another world, so collectives of a
role never wait for the other role. `Links` carry prompts and rollouts between them, and a process
group carries weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from reinforce_rl.megatron.mesh import World, job_store
from reinforce_rl.utils.job_rank import JobRank

# Links name a generator's first rank by the generator's number, from 1, times RANKS.
RANKS = 4096


@dataclass(frozen=True)
class RankRole:
    """A rank's place in a job of trainers and generators."""

    rank: int  # in the job
    size: int  # of the job
    trainers: int  # ranks that train
    block: int  # ranks of each generator
    store: Any  # torch's store of the whole job
    timeout: timedelta  # of collectives between the roles

    @classmethod
    def of_job(cls, trainers: int, block: int, timeout_seconds: float) -> RankRole:
        """Return this process's role; all ranks of the job must call it.

        Raises torch's RuntimeErrors if the ranks do not connect.
        """
        job = JobRank.of_process()
        timeout = timedelta(seconds=timeout_seconds)
        store = job_store(job.size)
        if store is None:
            store, *_ = next(rendezvous("env://", job.rank, job.size, timeout=timeout))
        # torchrun may keep the store when it restarts the ranks.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(f"rank {job.rank}", "here")
        store.wait([f"rank {other}" for other in range(job.size)], timeout)
        return cls(job.rank, job.size, trainers, block, store, timeout)

    @property
    def generates(self) -> bool:
        return self.rank >= self.trainers

    @property
    def world(self) -> World:
        """The world of process groups that this rank shares."""
        if not self.generates:
            return World(self.rank, self.trainers, PrefixStore("trainers", self.store))
        generator, rank = divmod(self.rank - self.trainers, self.block)
        return World(rank, self.block, PrefixStore(f"generator {generator}", self.store))

    @property
    def generators(self) -> range:
        """The ranks that generate."""
        return range(self.trainers, self.size)

    @property
    def link_rank(self) -> int:
        """This generator's rank by the name of its link to rank 0."""
        return self.link_ranks[self.rank - self.trainers]

    @property
    def link_ranks(self) -> list[int]:
        """All ranks that generate, in order, by the names of their links."""
        places = (divmod(rank - self.trainers, self.block) for rank in self.generators)
        return [(1 + generator) * RANKS + rank for generator, rank in places]

    def job_rank(self, link_rank: int) -> int:
        """Return the rank in the job of the generator's rank that links name `link_rank`."""
        return self.trainers + self.link_ranks.index(link_rank)

    def share(self, name: str, text: str) -> None:
        """Give a text to the job's other ranks; they read it by `shared`."""
        self.store.set(name, text)

    def shared(self, name: str) -> str:
        """Wait for the text that a rank shares under this name."""
        self.store.wait([name], self.timeout)
        return self.store.get(name).decode()
