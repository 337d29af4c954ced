"""Four ranks check their mesh in several layouts. Usage: mesh_of_four.py"""

from __future__ import annotations

from datetime import timedelta

import torch

from reinforce_rl.megatron.mesh import Mesh, parallel_mesh, rank_at

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]


def check(mesh: Mesh, tp: int, pp: int, cp: int) -> None:
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


def main() -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for tp, pp, cp in LAYOUTS:
        with parallel_mesh(tp, pp, cp) as mesh:
            check(mesh, tp, pp, cp)
            if mesh.is_main:
                print(mesh.layout.grid(), flush=True)
    torch.distributed.destroy_process_group()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main()
