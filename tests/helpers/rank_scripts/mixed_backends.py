"""Two ranks act as GPU ranks: gloo runs what needs no GPU. Usage: mixed_backends.py TP"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers "fake"

from reinforce_rl.errors import GenerationError
from reinforce_rl.megatron.mesh import parallel_mesh


def main() -> None:
    init = dist.init_process_group

    def without_nccl(backend: str, **options: object) -> None:
        # A collective of the fake backend leaves tensors unchanged, so a collective over NCCL would
        # fail the checks below.
        init(backend.replace("nccl", "fake"), **options)  # type: ignore[arg-type]

    dist.init_process_group = without_nccl
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: None
    tp_size = int(sys.argv[1])
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
    print("all checks passed")


if __name__ == "__main__":
    main()
