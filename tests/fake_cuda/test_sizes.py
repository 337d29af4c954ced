"""Models at their real width on the layouts that they are trained on: 8B on 8 ranks, 70B on 128."""

from __future__ import annotations

import gc
from typing import Any

from helpers.fake_cuda import Work, check_collectives, real_step
from helpers.public_configs import LLAMA_3_1_8B

from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.optimizer import DataParallelSettings
from reinforce_rl.preflight.fake_cuda.ledger import Ledger
from reinforce_rl.preflight.fake_cuda.machine import Machine

LLAMA_3_1_70B: dict[str, Any] = {
    **LLAMA_3_1_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
# Ranks' shares of the optimizer begin and end in different parameters, each of which has a counter of steps.
COUNTERS = 1e-4  # of the memory
DISTRIBUTED = DataParallelSettings(distributed_optimizer=True, overlap_grad_sync=True)


def test_8b_on_8_ranks(machine: Machine) -> None:
    config = {**LLAMA_3_1_8B, "num_hidden_layers": 2}
    found: dict[int, dict[str, Ledger]] = {}
    gc.collect()  # what earlier tests left in cycles would be counted as the first rank's

    def turn(rank: int) -> None:
        with parallel_mesh(4, sequence_parallel=True) as mesh:
            found[rank] = real_step(machine, config, mesh, Work(prompts=1), data_parallel=DISTRIBUTED)

    machine.ranks(8, turn)
    for phase in found[0]:
        check_collectives({rank: ledgers[phase] for rank, ledgers in found.items()})
    peaks = [ledgers["update"].peak for ledgers in found.values()]
    assert max(peaks) - min(peaks) <= COUNTERS * max(peaks)


def test_70b_on_128_ranks(machine: Machine) -> None:
    """Two layers of a stage's twenty; of each stage one rank, of the first also a tensor- and a data-parallel peer."""
    config = {**LLAMA_3_1_70B, "num_hidden_layers": 8}
    found: dict[int, dict[str, Ledger]] = {}
    for rank in (1, 8, 0, 32, 64, 96):
        with machine.rank(rank, 128), parallel_mesh(8, 4, sequence_parallel=True) as mesh:
            assert (mesh.dp_size, mesh.pp_rank) == (4, rank // 32)
            found[rank] = real_step(machine, config, mesh, Work(prompts=1), data_parallel=DISTRIBUTED)
    for phase in found[0]:
        check_collectives({rank: ledgers[phase] for rank, ledgers in found.items()})
    peaks = [found[rank]["update"].peak for rank in (0, 1, 8)]
    assert max(peaks) - min(peaks) <= COUNTERS * max(peaks)
