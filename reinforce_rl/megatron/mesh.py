"""Process groups: who this rank is in the grid of data- and tensor-parallel ranks.

The only file that reads megatron's global `parallel_state`. Everything else is handed a `Mesh`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from reinforce_rl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ReinforceError,
    RewardServerError,
    TooManyFailedRewardsError,
)

# Errors that mean the same on every rank, by the name under which they travel.
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, DataError, RewardServerError, TooManyFailedRewardsError)}


@dataclass(frozen=True)
class Mesh:
    """This rank's place.

    Attributes:
        rank, world_size: in the whole job.
        dp_rank, dp_size: data parallel; ranks of one dp_rank hold the same prompts.
        tp_rank, tp_size: tensor parallel; ranks of one tp_rank hold the same slice of each weight.
        device: where this rank computes.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the terminal."""
        return self.rank == 0

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()  # type: ignore[return-value]

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)  # type: ignore[return-value]

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel ranks; the input is left as it is."""
        total = values.clone().to(self.device)
        dist.all_reduce(total, group=self.dp_group)
        return total

    def gather_over_dp(self, value: Any) -> list[Any]:
        """Every data-parallel rank's picklable value, in rank order, on every rank."""
        gathered: list[Any] = [None] * self.dp_size
        dist.all_gather_object(gathered, value, group=self.dp_group)
        return gathered

    def gather_on_main(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on the first rank; an empty list on the others."""
        gathered: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered or []

    def from_tp_rank_0(self, value: Any) -> Any:
        """The picklable value that the first tensor-parallel rank holds, on every rank of its group."""
        box = [value]
        dist.broadcast_object_list(box, src=parallel_state.get_tensor_model_parallel_src_rank(), group=self.tp_group)
        return box[0]

    def any_rank(self, flag: bool) -> bool:
        """True on every rank as soon as one rank says True."""
        votes = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def check_together(self, error: Exception | None) -> None:
        """Raise on every rank when one rank failed, so that nobody waits in a collective for a rank that is gone.

        Raises:
            the rank's own error where there is one, else one of the same kind naming the first rank that failed.
        """
        found: list[tuple[str, str] | None] = [None] * self.world_size
        dist.all_gather_object(found, None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error
        for rank, failure in enumerate(found):
            if failure is not None:
                kind = _ERRORS.get(failure[0], ReinforceError)
                raise kind(f"rank {rank} failed: {failure[1]}")

    def barrier(self) -> None:
        dist.barrier()


def world_size_from_environment() -> int:
    """Ranks of this job as torchrun says; 1 for a plain `python`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def parallel_mesh(
    tensor_model_parallel_size: int = 1, *, seed: int = 0, timeout_seconds: float = 1800
) -> Iterator[Mesh]:
    """Join the job's process group, lay out the ranks, and take both down again on leaving.

    Args:
        tensor_model_parallel_size: ranks that share one copy of the weights; must divide the number of ranks.
        seed: of megatron's RNG tracker.
        timeout_seconds: how long a collective may wait for a rank before the job fails.

    Raises:
        ConfigError: the ranks cannot be laid out so.
    """
    world_size, rank = world_size_from_environment(), int(os.environ.get("RANK", "0"))
    if world_size % tensor_model_parallel_size:
        raise ConfigError(
            [
                f"model.tensor_model_parallel_size is {tensor_model_parallel_size}, which does not divide "
                f"the {world_size} ranks of this job (trainer.devices x trainer.num_nodes)"
            ]
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    store = torch.distributed.HashStore() if world_size == 1 else None  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=timeout_seconds)
    )
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_model_parallel_size)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield Mesh(
            rank=rank,
            world_size=world_size,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            device=device,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
