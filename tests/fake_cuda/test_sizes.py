"""Models at real width on their layouts, and the peak memory of an update by hand."""

from __future__ import annotations

import gc

import pytest
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.fake_cuda.workloads import Work, check_collectives, real_step, take_turns
from helpers.public_configs import LLAMA_3_1_8B, LLAMA_3_1_70B

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.mesh import parallel_mesh

# Ranks' shares of the optimizer begin and end in different parameters, each with a step counter.
COUNTERS = 1e-4  # share of the memory
DISTRIBUTED = OptimConfig(distributed=True, overlap_grad_sync=True)
LAYERS = 2
PROMPT = 1024
RESPONSE = 513


def test_8b_on_8_ranks(machine: Machine) -> None:
    config = {**LLAMA_3_1_8B, "num_hidden_layers": 2}
    ledgers_of_ranks: dict[int, dict[str, Ledger]] = {}
    gc.collect()  # garbage of earlier tests would count for the first rank

    def turn(rank: int) -> None:
        with parallel_mesh(4, sequence_parallel=True) as mesh:
            ledgers_of_ranks[rank] = real_step(
                machine, config, mesh, Work(prompts=1), optim=DISTRIBUTED
            )

    take_turns(machine, 8, turn)
    for phase in ledgers_of_ranks[0]:
        check_collectives({rank: ledgers[phase] for rank, ledgers in ledgers_of_ranks.items()})
    peaks = [ledgers["update"].peak for ledgers in ledgers_of_ranks.values()]
    assert max(peaks) - min(peaks) <= COUNTERS * max(peaks)


def test_70b_on_128_ranks(machine: Machine) -> None:
    """Two of a stage's twenty layers, on one rank of each stage.

    For the first stage also on a tensor- and a data-parallel peer.
    """
    config = {**LLAMA_3_1_70B, "num_hidden_layers": 8}
    ledgers_of_ranks: dict[int, dict[str, Ledger]] = {}
    for rank in (1, 8, 0, 32, 64, 96):
        with machine.rank(rank, 128), parallel_mesh(8, 4, sequence_parallel=True) as mesh:
            assert mesh.dp_size == 4
            assert mesh.pp_rank == rank // 32
            ledgers_of_ranks[rank] = real_step(
                machine, config, mesh, Work(prompts=1), optim=DISTRIBUTED
            )
    for phase in ledgers_of_ranks[0]:
        check_collectives({rank: ledgers[phase] for rank, ledgers in ledgers_of_ranks.items()})
    peaks = [ledgers_of_ranks[rank]["update"].peak for rank in (0, 1, 8)]
    assert max(peaks) - min(peaks) <= COUNTERS * max(peaks)


def by_hand(tp: int, shards: int) -> float:
    """Count a rank's bytes in the backward pass of the output layer, at Llama 3.1 8B's width.

    Sequence parallelism if tp > 1. Every layer's activations are alive, and the gradient of the
    vocabulary's table in fp32 and in bf16.
    """
    h = 4096
    kv = 1024
    f = 14336
    v = 128256
    # the last token has no target
    s = PROMPT + RESPONSE - 1
    n = RESPONSE
    matrices = 2 * v * h + LAYERS * (h * (h + 2 * kv) + h * h + 3 * h * f)
    norms = (2 * LAYERS + 1) * h
    parameters = matrices / tp + norms
    # weights, gradients; main weights, Adam's moments
    states = parameters * (2 + 4) + parameters * (4 + 8) / shards
    # bf16, so two bytes each. Split by sequence parallelism: outputs of both norms, both residual
    # sums.
    shared = 2 * s * (4 * h) / tp
    # Split by tensor parallelism: query, key and value before rotation; query and key after it;
    # attention's output; the MLP's first product, which is two matrices wide, and SwiGLU's output.
    split = 2 * s * ((h + 2 * kv) + h + kv + h + 2 * f + f) / tp
    # output of the embedding; output of the last norm, gathered for the output layer
    ends = 2 * s * h / tp + 2 * s * h
    if tp > 1:
        ends += 2 * s * h / tp  # output of the last norm before the gather
    table = (4 + 2) * v / tp * h
    logits = (4 + 2) * n * v / tp  # fp32, and their gradient in bf16
    return states + LAYERS * (shared + split) + ends + table + logits


@pytest.mark.parametrize(
    ("tp", "dp"), [(1, 1), (4, 2)], ids=["one rank", "TP4 SP DP2, distributed optimizer"]
)
def test_an_update_takes_what_was_counted(machine: Machine, tp: int, dp: int) -> None:
    config = {**LLAMA_3_1_8B, "num_hidden_layers": LAYERS}
    work = Work(prompts=1, samples=1, prompt_tokens=PROMPT, response_tokens=RESPONSE)
    with machine.rank(0, tp * dp), parallel_mesh(tp, sequence_parallel=tp > 1) as mesh:
        options = {"optim": DISTRIBUTED} if dp > 1 else {}
        before = machine.gpu.memory.bytes
        peak = real_step(machine, config, mesh, work, **options)["update"].peak - before
    assert peak == pytest.approx(by_hand(tp, dp), rel=0.03)
