"""The layout of ranks, and errors that reach all ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.errors import raises_error
from helpers.ranks import call_on_ranks, one_group
from helpers.toy_server import free_port
from torch.distributed.distributed_c10d import _get_object_coll_device
from torch.distributed.rendezvous import rendezvous
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

from reinforce_rl.errors import (
    EXIT_LOST_RANK,
    CheckpointError,
    ConfigError,
    DataError,
    GenerationError,
    ReinforceError,
    TooManyFailedRewardsError,
)
from reinforce_rl.megatron.mesh import Mesh, World, parallel_mesh, rank_at

SECONDS = 61.0


def test_one_rank_without_a_launcher():
    for _ in range(2):  # a mesh can be opened again after it is closed
        with parallel_mesh() as mesh:
            assert mesh.rank == 0
            assert mesh.world_size == 1
            assert mesh.dp_size == 1
            assert mesh.tp_size == 1
            assert mesh.is_main
            assert mesh.gather_over_dp("x") == ["x"]
            values = torch.tensor([1.5, 2.0])
            assert torch.equal(mesh.sum_over_dp(values), values)
            assert mesh.sum_over_dp(values) is not values
            assert mesh.from_model_parallel_rank_0([1]) == [1]
            assert mesh.any_rank(True) is True
            assert mesh.any_rank(False) is False
            mesh.raise_if_any(None)
            with pytest.raises(CheckpointError, match=r"^gone$"):
                mesh.raise_if_any(CheckpointError("gone"))


@pytest.mark.more
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_does_not_come(monkeypatch, rank):
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    values = (f"rank {rank}", socket.gethostname(), f"localhost:{port}")
    with (
        raises_error("ranks.rendezvous.failed", *values) as caught,
        parallel_mesh(timeout_seconds=2),
    ):
        pass
    assert caught.value.exit_code == EXIT_LOST_RANK
    assert not torch.distributed.is_initialized()


LONE_RANK = """
import sys
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.runtime.stop import StopNow, StopRequest
StopRequest.on_signals()
print("ready", flush=True)
try:
    with parallel_mesh(timeout_seconds=600):
        print("another rank came", flush=True)
except StopNow:
    print("stopped", flush=True)
    os._exit(75)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_waits_for_others_is_stopped_by_a_signal(rank):
    port = free_port()
    place = {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environment = {**os.environ, **place, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", f"import os\n{LONE_RANK}"]
    options = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(1.0)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75
    assert output == "stopped\n"


def test_closed_after_an_error():
    with pytest.raises(ValueError, match="inside"), parallel_mesh():
        raise ValueError("inside")
    assert not torch.distributed.is_initialized()
    with parallel_mesh():
        pass


def test_ranks_that_do_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        raises_error(
            "config.parallel_sizes.not_a_divisor_of_ranks",
            "model.tensor_model_parallel_size is 2",
            "3 ranks",
        ),
        parallel_mesh(tensor_model_parallel_size=2),
    ):
        pass
    assert not torch.distributed.is_initialized()


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
    ranks = (0, mesh.rank) if tp_size == 2 else (mesh.rank, 0)
    assert (mesh.dp_rank, mesh.tp_rank) == ranks
    assert mesh.is_main == (mesh.rank == 0)
    assert mesh.gather_over_dp(f"dp {mesh.dp_rank}") == [f"dp {i}" for i in range(dp_size)]
    local_values = torch.tensor([1.0, 10.0 * mesh.dp_rank])
    sums = [2.0, 10.0] if dp_size == 2 else [1.0, 0.0]
    assert mesh.sum_over_dp(local_values).tolist() == sums
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


def meshes_of_two_ranks():
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


def test_two_ranks():
    call_on_ranks(meshes_of_two_ranks, 2)


def mesh_with_nccl(tp_size):
    """gloo runs what needs no GPU."""
    init = dist.init_process_group

    def without_nccl(backend: str, **options: object) -> None:
        # A collective of the fake backend leaves tensors unchanged, so a collective over NCCL would
        # fail the checks below.
        init(backend.replace("nccl", "fake"), **options)  # type: ignore[arg-type]

    dist.init_process_group = without_nccl
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: None
    with parallel_mesh(tensor_model_parallel_size=tp_size, timeout_seconds=61) as mesh:
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(
            seconds=61
        )  # type: ignore
        assert mesh.device.type == "cuda"
        for group in (
            dist.group.WORLD,
            mesh.block_group,
            mesh.dp_group,
            mesh.tp_group,
            mesh.pp_group,
        ):
            assert _get_object_coll_device(group) == "cpu"
            assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        assert mesh.any_rank(mesh.rank == 1)
        assert not mesh.any_rank(False)
        assert mesh.from_main(mesh.rank) == 0
        assert mesh.from_model_parallel_rank_0(mesh.rank) == (mesh.rank if tp_size == 1 else 0)
        assert mesh.gather_over_dp(mesh.rank) == ([0, 1] if tp_size == 1 else [mesh.rank])
        ranks = mesh.sum_over_dp(torch.tensor([float(mesh.rank)])).tolist()
        assert ranks == ([1.0] if tp_size == 1 else [float(mesh.rank)])
        try:
            mesh.raise_if_any(GenerationError("gone") if mesh.rank == 1 else None)
        except GenerationError as error:
            assert "gone" in str(error)
        else:
            raise AssertionError("the other rank's error was not heard of")
        mesh.barrier()
    assert not dist.is_initialized()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_nothing_but_tensors_of_a_gpu_is_handed_to_nccl(tp_size):
    call_on_ranks(mesh_with_nccl, 2, tp_size)


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]


def check_layout(mesh: Mesh, tp: int, pp: int, cp: int) -> None:
    dp = 4 // (tp * pp * cp)
    assert (mesh.tp_size, mesh.pp_size, mesh.cp_size, mesh.dp_size) == (tp, pp, cp, dp)
    assert (
        rank_at(mesh.tp_rank, mesh.cp_rank, mesh.dp_rank, mesh.pp_rank, (tp, cp, dp, pp))
        == mesh.rank
    )
    seen: list = [None] * 4
    torch.distributed.all_gather_object(
        seen, (mesh.dp_rank, mesh.is_model_parallel_rank_0, mesh.is_last_stage)
    )
    block = [rank for rank in range(4) if seen[rank][0] == mesh.dp_rank]
    assert torch.distributed.get_process_group_ranks(mesh.block_group) == block
    assert [seen[rank][1] for rank in block] == [True] + [False] * (len(block) - 1)
    assert sum(last for _, _, last in seen) == 4 // pp
    # Each data-parallel rank counts once, however many ranks share its block.
    assert mesh.sum_over_dp(torch.ones(1)).tolist() == [dp]
    assert mesh.gather_over_dp(mesh.dp_rank) == list(range(dp))
    assert mesh.from_model_parallel_rank_0(mesh.rank) == block[0]
    assert mesh.gather_over_cp(mesh.cp_rank) == list(range(cp))
    assert mesh.gather_over_pp(mesh.pp_rank) == list(range(pp))
    assert mesh.from_last_stage(mesh.pp_rank) == pp - 1
    stage = torch.tensor([mesh.pp_rank])
    mesh.copy_from_last_stage(stage)
    assert stage.tolist() == [pp - 1]
    if pp > 1:
        handed = torch.tensor([mesh.pp_rank])
        if mesh.pp_rank > 0:
            mesh.receive_from_stage(handed, mesh.pp_rank - 1)
            assert handed.tolist() == [mesh.pp_rank - 1]
        if not mesh.is_last_stage:
            mesh.send_to_stage(torch.tensor([mesh.pp_rank]), mesh.pp_rank + 1)


def meshes_of_four_ranks():
    grids = {}
    with one_group():
        for layout in LAYOUTS:
            with parallel_mesh(*layout) as mesh:
                check_layout(mesh, *layout)
                grids[layout] = mesh.layout.grid()
    return grids


@pytest.mark.slow
def test_four_ranks_in_several_layouts():
    grids = call_on_ranks(meshes_of_four_ranks, 4)[0]
    assert grids[2, 2, 1] == (
        "4 ranks: 1 data x 2 pipeline x 1 context x 2 tensor parallel\n"
        "  data 0: stage 0 [0 1], stage 1 [2 3]"
    )
    assert grids[1, 2, 2].startswith(
        "4 ranks: 1 data x 2 pipeline x 2 context x 1 tensor parallel\n  data 0: stage 0 [0 | 1]"
    )
    assert grids[1, 2, 1].startswith(
        "4 ranks: 2 data x 2 pipeline x 1 context x 1 tensor parallel\n"
        "  data 0: stage 0 [0], stage 1 [2]"
    )
