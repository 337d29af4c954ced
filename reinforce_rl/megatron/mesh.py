"""Process groups and this rank's place in them.

This is the only module that reads megatron's global `parallel_state`.

A block is the tensor x context x pipeline ranks that share one model copy and work on the same
prompts. Its first rank is called model-parallel rank 0.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.rendezvous import rendezvous

from reinforce_rl.config.parallelism import Layout, layout_faults, rank_at
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
    key_of,
)
from reinforce_rl.utils.job_rank import JobRank
from reinforce_rl.utils.ranks import STORE_VARIABLE

_SIGNAL_SECONDS = 0.2  # maximum delay before a signal is handled
# Errors that are re-raised with the same type on the other ranks, by name.
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
class World:
    """The ranks that share process groups: all ranks of a job, or the ranks of one role."""

    rank: int
    size: int
    store: Any = None  # torch's store for the rendezvous; None: torchrun's


@dataclass(frozen=True)
class Mesh:
    rank: int  # global
    world_size: int
    # data parallel, without context parallel: ranks with one dp_rank hold the same prompts
    dp_rank: int
    dp_size: int
    tp_rank: int  # tensor parallel: ranks with one tp_rank hold the same slice of each weight
    tp_size: int
    pp_rank: int  # pipeline parallel: a stage of the model's layers
    pp_size: int
    cp_rank: int  # context parallel: holds a part of each sequence
    cp_size: int
    sequence_parallel: bool  # tensor-parallel ranks also split positions outside their matrices
    device: torch.device
    block_group: dist.ProcessGroup  # the ranks of this rank's block
    # torch's store, for counters; None if the process groups existed before.
    store: Any = None

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    @property
    def is_model_parallel_rank_0(self) -> bool:
        """True on the rank of each block that requests rewards and gathers weights."""
        return self.tp_rank == self.pp_rank == self.cp_rank == 0

    @property
    def is_last_stage(self) -> bool:
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
        return Layout(
            self.tp_size, self.pp_size, self.cp_size, self.dp_size, self.sequence_parallel
        )

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Return the sum over data-parallel ranks, on the input's device."""
        total = values.clone()
        dist.all_reduce(total, group=self.dp_group)
        return total

    def gather_over_dp(self, value: Any) -> list[Any]:
        """Return each data-parallel rank's picklable value, in rank order, on every rank."""
        return _gathered(value, self.dp_group)

    def join_over_dp(self, values: list[Any]) -> list[Any]:
        """Concatenate the data-parallel ranks' lists of picklable values on every rank.

        The lists are in rank order.
        """
        return [value for part in self.gather_over_dp(values) for value in part]

    def gather_over_dp_on_first(self, value: Any) -> list[Any]:
        """Return each data-parallel rank's picklable value, in rank order, on the first rank.

        The others get an empty list.
        """
        return _on_first(value, self.dp_group)

    def gather_on_main(self, value: Any) -> list[Any]:
        """Return each rank's picklable value, in rank order, on the first rank.

        The others get an empty list.
        """
        return _on_first(value, dist.group.WORLD)

    def gather_over_cp(self, value: Any) -> list[Any]:
        """Return each context-parallel rank's picklable value, in rank order, on all of them."""
        return _gathered(value, self.cp_group)

    def gather_over_pp(self, value: Any) -> list[Any]:
        """Return each stage's picklable value, in order, on every stage."""
        return _gathered(value, self.pp_group)

    def from_main(self, value: Any) -> Any:
        """Broadcast a picklable value from the first rank."""
        return _from_rank(value, 0, dist.group.WORLD)

    def from_model_parallel_rank_0(self, value: Any) -> Any:
        """Broadcast a picklable value from model-parallel rank 0 within its block."""
        if dist.get_world_size(self.block_group) == 1:
            return value
        return _from_rank(value, 0, self.block_group)

    def gather_on_model_parallel_rank_0(self, value: Any) -> list[Any]:
        """Return the block's picklable values, in rank order, on its model-parallel rank 0.

        The others get an empty list.
        """
        return _on_first(value, self.block_group)

    def copy_from_model_parallel_rank_0(self, tensor: Tensor) -> None:
        """Broadcast model-parallel rank 0's tensor into `tensor` within the block.

        Both have the same shape and dtype.
        """
        if dist.get_world_size(self.block_group) > 1:
            dist.broadcast(tensor, group=self.block_group, group_src=0)

    def from_last_stage(self, value: Any) -> Any:
        """Broadcast a picklable value from the last stage to all stages."""
        return value if self.pp_size == 1 else _from_rank(value, self.pp_size - 1, self.pp_group)

    def copy_from_last_stage(self, tensor: Tensor) -> None:
        """Broadcast the last stage's tensor into `tensor` on all stages.

        Both have the same shape and dtype.
        """
        if self.pp_size > 1:
            dist.broadcast(tensor, group=self.pp_group, group_src=self.pp_size - 1)

    def send_to_stage(self, tensor: Tensor, stage: int) -> None:
        """Send a contiguous tensor to another stage; blocks.

        The other stage calls `receive_from_stage`.
        """
        dist.send(tensor, group=self.pp_group, group_dst=stage)

    def receive_from_stage(self, tensor: Tensor, stage: int) -> None:
        """Receive into a contiguous tensor from another stage."""
        dist.recv(tensor, group=self.pp_group, group_src=stage)

    def any_rank(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is True on any."""
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes.item())

    def raise_if_any(self, error: Exception | None) -> None:
        """Raise on every rank if one failed.

        A rank that failed raises its own error. The others raise an error of the first failed
        rank's type, which names that rank.
        """
        local_failure = None
        if error is not None:
            local_failure = (type(error).__name__, str(error), key_of(error))
        failures = _gathered(local_failure, None)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                name, message, key = failure
                raise _ERRORS.get(name, ReinforceError)(f"rank {rank} failed: {message}", key=key)

    @contextlib.contextmanager
    def raise_on_all_ranks(
        self,
        failure_of: Callable[[BaseException], Exception] | None = None,
    ) -> Iterator[None]:
        """Raise on every rank if the block raised on one; a collective call.

        `failure_of` makes the error to raise from the block's error; None raises the block's error.
        """
        failure: Any = None
        try:
            yield
        except (Exception, CheckpointException) as error:
            # torch's CheckpointException is not an Exception.
            failure = error
            if failure_of is not None:
                failure = failure_of(error)
                failure.__cause__ = error
        self.raise_if_any(failure)

    def reset_count(self, name: str) -> None:
        """Reset a counter. Call it on one rank while no rank counts."""
        assert self.store is not None, "these process groups are another's"
        self.store.delete_key(name)

    def count(self, name: str, by: int = 1) -> int:
        """Add to a job-wide counter, which starts at 0, and return its new value."""
        assert self.store is not None, "these process groups are another's"
        return self.store.add(name, by)

    def count_by_block(self, name: str) -> int:
        """Add 1 for the whole block and return the new value on its ranks; a collective call."""
        value = self.count(name) if self.is_model_parallel_rank_0 else 0
        return value if self.dp_size == self.world_size else self.from_model_parallel_rank_0(value)

    def barrier(self) -> None:
        dist.barrier()


@contextlib.contextmanager
def parallel_mesh(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    *,
    sequence_parallel: bool = False,
    seed: int = 0,
    timeout_seconds: float = 1800,
    world: World | None = None,
) -> Iterator[Mesh]:
    """Initialize process groups and megatron's parallel state, and destroy both on exit.

    An existing default process group is used and left open. A collective waits `timeout_seconds`
    for a rank. `world` is by default all ranks of the job.

    Raises:
        ConfigError: the product of the sizes does not divide the number of ranks, or the layout is
            impossible in another way.
        LostRankError: a rank did not join, or left.
    """
    job = JobRank.of_process()
    rank, world_size = (job.rank, job.size) if world is None else (world.rank, world.size)
    tp = tensor_model_parallel_size
    pp = pipeline_model_parallel_size
    cp = context_parallel_size
    ranks = "this job (trainer.devices x trainer.num_nodes)"
    if faults := list(layout_faults(tp, pp, cp, sequence_parallel, world_size, ranks)):
        raise ConfigError(faults)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", job.local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    store = None if world is None else world.store
    with contextlib.ExitStack() as stack:
        with rendezvous_errors(rank, world_size):
            if not dist.is_initialized():
                if store is None:
                    store = (
                        dist.HashStore()  # type: ignore[attr-defined]
                        if world_size == 1
                        else job_store(world_size)
                    )
                # NCCL spins on the GPU while it waits, so objects, votes and barriers, which may
                # wait long, use gloo.
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                store = _in_thread(lambda: _join(backend, rank, world_size, store, timeout))
                stack.callback(dist.destroy_process_group)
            stack.callback(_leave_groups)
            minutes: Any = timeout_seconds / 60
            parallel_state.initialize_model_parallel(
                tp, pp, context_parallel_size=cp, distributed_timeout_minutes=minutes
            )
            block_group = _block_group(rank, (tp, cp, world_size // (tp * pp * cp), pp), timeout)
            stack.callback(dist.destroy_process_group, block_group)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        prefix_store: Any = None
        if store is not None:
            prefix_store = dist.PrefixStore("mesh", store)  # type: ignore[attr-defined]
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
            store=prefix_store,
        )


def _join(backend: str, rank: int, world_size: int, store: Any, timeout: timedelta) -> Any:
    """Create the default process group. Return its store, by default torchrun's."""
    if store is None:
        store, *_ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, timeout=timeout)
    return store


def _in_thread(action: Callable[[], Any]) -> Any:
    """Call `action` in a thread, so that this thread handles signals while torch waits for ranks.

    Returns the result of the action, or raises its error. If a signal's handler raises, this does
    too, at once. The thread then waits on, so the program must end.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="rendezvous")
    thread.start()
    while thread.is_alive():
        thread.join(_SIGNAL_SECONDS)
    if errors:
        raise errors[0]
    return results[0]


def job_store(world_size: int) -> Any:
    """Return the store for the rendezvous of ranks on one machine; None if it is torchrun's."""
    path = os.environ.get(STORE_VARIABLE)
    return None if path is None else dist.FileStore(path, world_size)  # type: ignore[attr-defined]


@contextlib.contextmanager
def rendezvous_errors(rank: int, world_size: int) -> Iterator[None]:
    """Convert torch's connection errors to a LostRankError with this rank and host.

    For the time before the watchdog runs.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size == 1:
            raise
        address = JobRank.of_process().meeting
        raise LostRankError(
            f"rank {rank} (host {socket.gethostname()}) did not find the other {world_size - 1} "
            f"ranks of this job at {address} in phase start: {str(error).strip()}. "
            "Check that every rank has started and that every host can reach this address. The "
            "same command resumes from the last checkpoint",
            key="ranks.rendezvous.failed",
        ) from error


def _leave_groups() -> None:
    # `destroy_model_parallel` of megatron-core 0.16 forgets its groups without destroying them, and
    # their threads and sockets stay.
    groups = {
        group for group in vars(parallel_state).values() if isinstance(group, dist.ProcessGroup)
    }
    parallel_state.destroy_model_parallel()
    for group in groups - {dist.group.WORLD}:
        with contextlib.suppress(ValueError):  # megatron has destroyed some already
            dist.destroy_process_group(group)


def _block_group(
    rank: int, sizes: tuple[int, int, int, int], timeout: timedelta
) -> dist.ProcessGroup:
    tp_size, cp_size, dp_size, pp_size = sizes
    places = list(itertools.product(range(pp_size), range(cp_size), range(tp_size)))
    blocks = [[rank_at(tp, cp, dp, pp, sizes) for pp, cp, tp in places] for dp in range(dp_size)]
    # All ranks take part in creating each group, in the same order.
    groups = [dist.new_group(block, timeout=timeout) for block in blocks]
    local_groups = (group for group, block in zip(groups, blocks, strict=True) if rank in block)
    return next(local_groups)  # type: ignore


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _on_first(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    gathered: list[Any] | None = (
        [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    )
    dist.gather_object(value, gathered, group=group, group_dst=0)
    return gathered or []


def _from_rank(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]
