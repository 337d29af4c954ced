"""Process groups: who this rank is in the grid of data-, pipeline-, context- and tensor-parallel ranks.

The ranks that share one copy of the model and work on the same prompts (tensor x context x pipeline) are a block;
there are as many blocks as data-parallel ranks.

The only file that reads megatron's global `parallel_state`. Everything else is handed a `Mesh`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from reinforce_rl.config.parallelism import Layout, rank_at
from reinforce_rl.config.rules import layout_faults
from reinforce_rl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    GenerationError,
    LostRankError,
    ReinforceError,
    RewardServerError,
    StoppedEarly,
    TooManyFailedRewardsError,
)
from reinforce_rl.utils.ranks import STORE_VARIABLE

# Errors that mean the same on every rank, by the name under which they travel.
_KINDS = (
    CheckpointError,
    DataError,
    GenerationError,
    RewardServerError,
    StoppedEarly,
    TooManyFailedRewardsError,
)
_ERRORS = {kind.__name__: kind for kind in _KINDS}


@dataclass(frozen=True)
class Mesh:
    """This rank's place."""

    rank: int  # in the whole job
    world_size: int
    dp_rank: int  # data parallel, context parallel not counted: ranks of one dp_rank hold the same prompts
    dp_size: int
    tp_rank: int  # tensor parallel: ranks of one tp_rank hold the same slice of each weight
    tp_size: int
    pp_rank: int  # pipeline parallel: a stage of the model's layers
    pp_size: int
    cp_rank: int  # context parallel: holds a part of each sequence
    cp_size: int
    sequence_parallel: bool  # tensor-parallel ranks also share the positions between their matrices
    device: torch.device  # where this rank computes
    block_group: dist.ProcessGroup  # the ranks of this rank's block

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and talks to the terminal."""
        return self.rank == 0

    @property
    def is_block_leader(self) -> bool:
        """True on one rank of each block: the one that asks for rewards and gathers weights."""
        return self.tp_rank == self.pp_rank == self.cp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the pipeline's output layer is."""
        return self.pp_rank == self.pp_size - 1

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()  # type: ignore[return-value]

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_pipeline_model_parallel_group()  # type: ignore[return-value]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_context_parallel_group()  # type: ignore[return-value]

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group()  # type: ignore[return-value]

    @property
    def layout(self) -> Layout:
        return Layout(self.tp_size, self.pp_size, self.cp_size, self.dp_size, self.sequence_parallel)

    @property
    def sequence_multiple(self) -> int:
        """See `Layout`."""
        return self.layout.sequence_multiple

    def grid(self) -> str:
        """Which ranks form which block, one line a block."""
        return self.layout.grid()

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel ranks, where the input is; the input is left as it is."""
        total = values.clone()
        dist.all_reduce(total, group=self.dp_group)
        return total

    def gather_over_dp(self, value: Any) -> list[Any]:
        """Every data-parallel rank's picklable value, in rank order, on every rank."""
        return _gathered(value, self.dp_group)

    def join_over_dp(self, values: list[Any]) -> list[Any]:
        """The picklable values of every data-parallel rank in one list, in rank order, on every rank."""
        return [value for part in self.gather_over_dp(values) for value in part]

    def gather_on_main(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on the first rank; an empty list on the others."""
        gathered: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered, dst=0)
        return gathered or []

    def gather_over_cp(self, value: Any) -> list[Any]:
        """Every context-parallel rank's picklable value, in rank order, on every rank of the group."""
        return _gathered(value, self.cp_group)

    def gather_over_pp(self, value: Any) -> list[Any]:
        """Every stage's picklable value, in order, on every stage."""
        return _gathered(value, self.pp_group)

    def from_main(self, value: Any) -> Any:
        """The picklable value that the first rank holds, on every rank."""
        return _from_rank(value, 0, dist.group.WORLD)

    def from_block_leader(self, value: Any) -> Any:
        """The picklable value that the leader holds, on every rank of its block."""
        return _from_rank(value, 0, self.block_group)

    def gather_on_block_leader(self, value: Any) -> list[Any]:
        """Every picklable value of this rank's block, in rank order, on its leader; an empty list on the others."""
        count = dist.get_world_size(self.block_group)
        gathered: list[Any] | None = [None] * count if self.is_block_leader else None
        dist.gather_object(value, gathered, group=self.block_group, group_dst=0)
        return gathered or []

    def copy_from_block_leader(self, tensor: Tensor) -> None:
        """Fill a tensor of the same shape and dtype on every rank of the block with the leader's."""
        if dist.get_world_size(self.block_group) > 1:
            dist.broadcast(tensor, group=self.block_group, group_src=0)

    def from_last_stage(self, value: Any) -> Any:
        """The picklable value that the last stage holds, on every stage."""
        return value if self.pp_size == 1 else _from_rank(value, self.pp_size - 1, self.pp_group)

    def copy_from_last_stage(self, tensor: Tensor) -> None:
        """Fill a tensor of the same shape and dtype on every stage with the last one's."""
        if self.pp_size > 1:
            dist.broadcast(tensor, group=self.pp_group, group_src=self.pp_size - 1)

    def send_to_stage(self, tensor: Tensor, stage: int) -> None:
        """Hand a contiguous tensor to another stage, which calls `receive_from_stage`; waits."""
        dist.send(tensor, group=self.pp_group, group_dst=stage)

    def receive_from_stage(self, tensor: Tensor, stage: int) -> None:
        """Fill a contiguous tensor with what another stage sends."""
        dist.recv(tensor, group=self.pp_group, group_src=stage)

    def any_rank(self, flag: bool) -> bool:
        """True on every rank as soon as one rank says True."""
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def check_together(self, error: Exception | None) -> None:
        """Raise on every rank when one rank failed, so that nobody waits in a collective for a rank that is gone.

        Raises:
            the rank's own error where there is one, else one of the same kind naming the first rank that failed.
        """
        found = _gathered(None if error is None else (type(error).__name__, str(error)), None)
        if error is not None:
            raise error
        for rank, failure in enumerate(found):
            if failure is not None:
                kind = _ERRORS.get(failure[0], ReinforceError)
                raise kind(f"rank {rank} failed: {failure[1]}")

    @contextlib.contextmanager
    def together(self, failure_of: Callable[[BaseException], Exception]) -> Iterator[None]:
        """Raise on every rank where the block failed on one; a collective call.

        Args:
            failure_of: makes this rank's error of what was raised.
        """
        failure: Exception | None = None
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's own is not an Exception
            failure = failure_of(error)
            failure.__cause__ = error
        self.check_together(failure)

    def reset_count(self, name: str) -> None:
        """The counter begins again; by one rank, while no rank counts."""
        _store().delete_key(name)

    def count(self, name: str, by: int = 1) -> int:
        """Add to a counter that all ranks of the job share, and which begins with 0; its value then."""
        return _store().add(name, by)

    def count_by_block(self, name: str) -> int:
        """Add 1 for the whole block, whose ranks call it together; the value then, on all of them."""
        value = self.count(name) if self.is_block_leader else 0
        return value if self.dp_size == self.world_size else self.from_block_leader(value)

    def barrier(self) -> None:
        dist.barrier()


def world_size_from_environment() -> int:
    """Ranks of this job as torchrun says; 1 for a plain `python`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def parallel_mesh(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    *,
    sequence_parallel: bool = False,
    seed: int = 0,
    timeout_seconds: float = 1800,
) -> Iterator[Mesh]:
    """Join the job's process group, lay out the ranks, and take both down again on leaving.

    A process group that exists already is used, and left as it is.

    Args:
        tensor_model_parallel_size: ranks that share each weight matrix.
        context_parallel_size: ranks that share each sequence. The product of the three must divide the ranks.
        sequence_parallel: share the positions among tensor-parallel ranks where no matrix is.
        timeout_seconds: how long a collective may wait for a rank before the job fails.

    Raises:
        ConfigError: the ranks cannot be laid out so.
        LostRankError: a rank did not come, or went again.
    """
    world_size, rank = world_size_from_environment(), int(os.environ.get("RANK", "0"))
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    faults = layout_faults(tp, pp, cp, sequence_parallel, world_size, "this job (trainer.devices x trainer.num_nodes)")
    if faults:
        raise ConfigError(faults)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    timeout = timedelta(seconds=timeout_seconds)
    with contextlib.ExitStack() as stack:
        with before_the_watch(rank, world_size):
            if not dist.is_initialized():
                store = dist.HashStore() if world_size == 1 else None  # type: ignore[attr-defined]
                if world_size > 1 and STORE_VARIABLE in os.environ:
                    store = dist.FileStore(os.environ[STORE_VARIABLE], world_size)  # type: ignore[attr-defined]
                # A wait in NCCL is a kernel that spins on the GPU until the last rank comes. Objects, votes and
                # barriers, which may take as long as a generation, go over gloo; new groups have both too.
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, timeout=timeout)
                stack.callback(dist.destroy_process_group)
            stack.callback(_leave_groups)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                context_parallel_size=cp,
                distributed_timeout_minutes=timeout_seconds / 60,  # type: ignore[arg-type]
            )
            block_group = _block_group(rank, (tp, cp, world_size // (tp * pp * cp), pp), timeout)
            stack.callback(dist.destroy_process_group, block_group)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield Mesh(
            rank=rank,
            world_size=world_size,
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=tp,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pp_size=pp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=cp,
            sequence_parallel=sequence_parallel,
            device=device,
            block_group=block_group,
        )


@contextlib.contextmanager
def before_the_watch(rank: int, world_size: int) -> Iterator[None]:
    """Nobody watches over the ranks yet in this block: torch's own error is all that is known of a lost one.

    Raises:
        LostRankError: naming this rank and its host.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size == 1:
            raise
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LostRankError(
            f"rank {rank} (host {socket.gethostname()}) has not found the other {world_size - 1} of this job at "
            f"{address} in phase start: {str(error).strip()}. Look for a rank that did not start or has ended, and "
            "whether that address can be reached from every host. The same command goes on from the last checkpoint"
        ) from error


def _leave_groups() -> None:
    """megatron leaves most groups open, and each of gloo's has threads that wake a hundred times a second."""
    groups = list(parallel_state._global_process_group_list or [])
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # which stands for the job's own
            with contextlib.suppress(ValueError):  # megatron has ended some itself
                dist.destroy_process_group(group)


def _block_group(rank: int, sizes: tuple[int, int, int, int], timeout: timedelta) -> dist.ProcessGroup:
    tp_size, cp_size, dp_size, pp_size = sizes
    blocks = [
        [
            rank_at(tp, cp, dp, pp, sizes)
            for pp, cp, tp in itertools.product(range(pp_size), range(cp_size), range(tp_size))
        ]
        for dp in range(dp_size)
    ]
    # Every rank takes part in making every group, in the same order.
    groups = [dist.new_group(block, timeout=timeout) for block in blocks]
    return next(group for group, block in zip(groups, blocks, strict=True) if rank in block)  # type: ignore


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # torch has no other name for it


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank of the group."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _from_rank(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]
