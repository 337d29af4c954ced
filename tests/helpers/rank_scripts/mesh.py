"""Two ranks check their mesh, with data and with tensor parallelism."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from reinforce_rl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ReinforceError,
    TooManyFailedRewardsError,
)
from reinforce_rl.megatron.mesh import Mesh, World, parallel_mesh

SECONDS = 61.0


def raised(mesh: Mesh, error: Exception | None) -> Exception | None:
    try:
        mesh.raise_if_any(error)
    except Exception as caught:
        return caught
    return None


def check_time_limits() -> None:
    """Check every group's timeout, but for megatron's groups of experts, which are not used."""
    groups = [
        group for group in dist.distributed_c10d._world.pg_map if "EXPERT" not in group.group_desc
    ]
    assert len(groups) > 5
    for group in groups:
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(
            seconds=SECONDS
        ), group.group_desc


def check(mesh: Mesh, tp_size: int) -> None:
    dp_size = 2 // tp_size
    assert (mesh.world_size, mesh.tp_size, mesh.dp_size) == (2, tp_size, dp_size)
    assert (mesh.dp_rank, mesh.tp_rank) == ((0, mesh.rank) if tp_size == 2 else (mesh.rank, 0))
    assert mesh.is_main == (mesh.rank == 0)
    assert mesh.gather_over_dp(f"dp {mesh.dp_rank}") == [f"dp {i}" for i in range(dp_size)]
    local_values = torch.tensor([1.0, 10.0 * mesh.dp_rank])
    assert mesh.sum_over_dp(local_values).tolist() == ([2.0, 10.0] if dp_size == 2 else [1.0, 0.0])
    assert local_values.tolist() == [1.0, 10.0 * mesh.dp_rank]
    assert mesh.from_model_parallel_rank_0(mesh.rank) == (0 if tp_size == 2 else mesh.rank)
    assert mesh.any_rank(mesh.rank == 1)
    assert not mesh.any_rank(False)

    assert raised(mesh, None) is None
    for failing in (0, 1):
        for kind in (CheckpointError, DataError, TooManyFailedRewardsError):
            mine = kind("no space", key="disk.full") if mesh.rank == failing else None
            raised_error = raised(mesh, mine)
            assert type(raised_error) is kind
            assert raised_error.key == "disk.full"
            if mine:
                assert raised_error is mine
            else:
                assert str(raised_error) == f"rank {failing} failed: no space"
        # An error of another kind is raised on its own rank, and a ReinforceError on the others.
        for error in (KeyError("x"), ConfigError(["a fault"])):
            raised_error = raised(mesh, error if mesh.rank == failing else None)
            if mesh.rank == failing:
                assert raised_error is error
            else:
                assert type(raised_error) is ReinforceError
    raised_error = raised(mesh, DataError(f"from {mesh.rank}"))
    assert str(raised_error) == f"from {mesh.rank}"
    mesh.barrier()

    for _ in range(2):  # a count restarts after reset_count
        if mesh.is_main:
            mesh.reset_count("tests/counter")
        mesh.barrier()
        taken = [mesh.count_by_block("tests/counter") for _ in range(3)]
        assert taken == sorted(taken)
        assert sorted(mesh.join_over_dp(taken)) == list(range(1, 1 + 3 * dp_size))
        parts = mesh.gather_over_dp(taken)
        assert mesh.gather_over_dp_on_first(taken) == (parts if mesh.dp_rank == 0 else [])
        assert mesh.from_model_parallel_rank_0(taken) == taken
        assert mesh.count("tests/counter", 0) == 3 * dp_size
        mesh.barrier()


def main() -> None:
    # Once: joining the same store again is a race.
    timeout = timedelta(seconds=SECONDS)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=timeout)
    for tp_size in (1, 2):
        world = World(rank, size, store)
        with parallel_mesh(tp_size, timeout_seconds=SECONDS, world=world) as mesh:
            check_time_limits()
            check(mesh, tp_size)
    dist.destroy_process_group()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main()
