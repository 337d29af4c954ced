"""What the fake-CUDA tier runs: a small actor on any layout, models at real sizes, and checks of what was counted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.batches import actor_of, rows_of, sequences, whole_batch
from helpers.layouts import SETTINGS, Layout

from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native import NativeGenerator
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.preflight.fake_cuda.ledger import Ledger
from reinforce_rl.preflight.fake_cuda.machine import Machine
from reinforce_rl.rollout import Prompt

PROMPTS = [Prompt(number, "", tuple(range(3, 6 + number))) for number in range(4)]


def small_step(layout: Layout, folder: Path, mesh: Mesh) -> None:
    """Generation, log-probs of both policies, two updates and offload, on two samples of each data-parallel rank."""
    options: dict[str, Any] = {"model": layout.model, "data_parallel": layout.data_parallel, "dtype": layout.dtype}
    actor = actor_of(folder, mesh, with_reference=True, updates=layout.updates, micro_batch_size=1, **options)
    batch = rows_of(whole_batch(), [0, 3])
    rollouts = batch.rollouts
    where = (rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths, rollouts.group_ids)
    generator = NativeGenerator(actor.lm, actor.tokenizer)
    done = generator.generate(PROMPTS, 2, SamplingParams(max_length=2), seed=3)
    assert done.tokens.shape == (8, 2)
    assert not done.tokens.is_cuda
    width = int(rollouts.response_lengths.max())
    assert actor.get_inference_log_probs(*where).shape == (2, width)
    assert actor.get_init_policy_logprobs(*where).shape == (2, width)
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, SETTINGS))
    for _ in range(2):  # the optimizer's states are there from the first step on
        actor.get_loss_and_metrics(batch, sequences(2 * mesh.dp_size))
        assert not optimizer.step().skipped
    with optimizer.offloaded():
        pass


def run_layout(machine: Machine, layout: Layout, folder: Path) -> dict[int, Ledger]:
    """`small_step` on every rank, one after the other."""

    def turn(rank: int) -> None:
        with layout.mesh() as mesh:
            small_step(layout, folder, mesh)

    return machine.ranks(layout.ranks, turn)


def check_collectives(ledgers: Mapping[int, Ledger]) -> int:
    """The ranks of each group call the same collectives in the same order, and what one sends its peer receives.

    Returns:
        How many calls were compared.
    """
    calls: dict[tuple[int, ...], dict[int, list[Any]]] = {}
    wires: dict[tuple[int, int], dict[str, list[int]]] = {}
    for rank, ledger in ledgers.items():
        for call in ledger.collectives:
            if call.kind in ("send", "recv"):
                wire = call.ranks if call.kind == "send" else call.ranks[::-1]
                wires.setdefault(wire, {"send": [], "recv": []})[call.kind].append(call.bytes)
            else:
                of_group = calls.setdefault(call.ranks, {rank: [] for rank in call.ranks})
                of_group[rank].append((call.kind, call.bytes, call.on_gpu))
    for group, of_rank in calls.items():
        for (first, expected), (other, found) in itertools.pairwise(of_rank.items()):
            for number, (here, there) in enumerate(itertools.zip_longest(expected, found)):
                assert here == there, f"group {group}, call {number}: rank {first} makes {here}, rank {other} {there}"
    for (source, target), ends in wires.items():
        assert ends["send"] == ends["recv"], f"what rank {source} sends is not what rank {target} receives"
    return sum(len(found) for of_rank in calls.values() for found in of_rank.values())
