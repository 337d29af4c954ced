"""Layouts, model families and the reward server's model, rank by rank.

No tensor is on the wrong device, and no two ranks disagree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import actor_of, sequences
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.workloads import batch_of, check_collectives, run_layout, take_turns
from helpers.families import MODELS, family_folder
from helpers.layouts import ALL_LAYOUTS, LAYOUTS, SETTINGS, Layout
from helpers.policies import random_tokens
from helpers.trainable import CASES, NAMES, PAD_ID, examples_of, model_of, take_gradient

from reinforce_rl.data.batches import Prompt
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.reward_model.scorer import MegatronRewardModel, load_trunk

WINDOW = 7  # for families with a window: prompt and response are longer
NAMED = ("TP2 SP", "PP2", "CP2", "DP2 distributed optimizer", "TP2 PP2 SP")
# Other layouts run the same code, on more ranks or with more of them parallel.
ALIKE: set[Any] = {
    "TP2 DP2",
    "TP2 PP2",
    "PP2 DP2",
    "TP2 CP2",
    "CP2 DP2",
    "PP4",
    "TP4 SP",
    "CP4",
    "DP4",
    "PP2 bf16",
    "CP2 bf16",
    "CP2 LoRA",
    "TP2 PP2 SP LoRA",
    "PP2 DP2 distributed optimizer LoRA",
}
# The same for families, whose differences the other models combine.
ALIKE |= {"llama_bias", "mistral", "qwen2", "qwen2_padded", "qwen2_window", "qwen3"}
# And for trained heads: "TP2 PP2 SP" and "one" cover pooling and loss.
ALIKE |= {("TP2 SP", "ranking"), ("DP2 distributed optimizer", "ranking")}


def slow_if_alike(cases: Iterable[Any]) -> list[Any]:
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = [pytest.mark.slow] if case in ALIKE else []
        marked.append(pytest.param(*values, marks=marks))
    return marked


@pytest.mark.parametrize("name", slow_if_alike(ALL_LAYOUTS))
def test_ranks_agree(machine: Machine, folders: dict[int, Path], name: str) -> None:
    layout = ALL_LAYOUTS[name]
    folder = folders[2 if layout.pp == 1 else 4]
    ledgers = run_layout(machine, layout, folder)
    assert check_collectives(ledgers) > 0


def update(folder: Path, mesh: Mesh, out: Path) -> None:
    actor = actor_of(
        folder,
        mesh,
        dtype=torch.bfloat16,
        forward_micro_batch_size=2,
        shared_prefix=False,
        with_reference=False,
    )
    prompt = Prompt(0, "", tuple(range(3, 3 + WINDOW + 2)))
    drawn = actor.generator.generate([prompt], 2, SamplingParams(max_length=2), seed=0)
    assert drawn.tokens.shape == (2, 2)
    prompt_lengths = torch.tensor([WINDOW + 2] * 2)
    response_lengths = torch.tensor([6, 3])
    batch = batch_of(random_tokens(61, 2, WINDOW + 8), prompt_lengths, response_lengths, samples=1)
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS))
    actor.get_loss_and_metrics(batch, sequences(2))
    optimizer.step()
    actor.export(folder, out)


@pytest.mark.parametrize("name", slow_if_alike(MODELS))
def test_a_family_runs(machine: Machine, tmp_path: Path, name: str) -> None:
    folder = family_folder(tmp_path, name)
    with machine.rank(), parallel_mesh() as mesh:
        update(folder, mesh, tmp_path / "alone")
    assert (tmp_path / "alone" / "model.safetensors").is_file()

    def turn(rank: int) -> None:
        with parallel_mesh(2, sequence_parallel=True) as mesh:
            update(folder, mesh, tmp_path / "shared")

    assert check_collectives(take_turns(machine, 2, turn)) > 0


@pytest.mark.parametrize("name", ["TP2", "TP2 SP", "PP2", "CP2", "TP2 PP2"])
def test_reward_model_scores(machine: Machine, folders: dict[int, Path], name: str) -> None:
    layout = LAYOUTS[name]

    def turn(rank: int) -> None:
        with layout.mesh() as mesh:
            trunk = load_trunk(folders[2], mesh)
            head = RewardHead(torch.randn(trunk.architecture.hidden_size), torch.zeros(()), "mean")
            scores = MegatronRewardModel(trunk, head).score([[3, 4, 5], [6] * 12, [7]])
            assert len(scores) == 3
            assert all(map(math.isfinite, scores))

    ledgers = take_turns(machine, layout.ranks, turn, rehearsals=int(layout.pp > 1))
    assert check_collectives(ledgers) > 0


@pytest.mark.parametrize(("name", "case"), slow_if_alike(itertools.product(["one", *NAMED], CASES)))
def test_reward_model_trains(
    machine: Machine, folders: dict[int, Path], tmp_path: Path, name: str, case: str
) -> None:
    layout = LAYOUTS.get(name, Layout())
    objective, _ = CASES[case]

    def turn(rank: int) -> None:
        with layout.mesh() as mesh:
            model = model_of(folders[2], mesh, case, layout)
            optimizer = ActorOptimizer(*build_optimizer(model.ddp, **SETTINGS))
            examples = examples_of(objective, 3)
            model.scores([objective.sequences_of(example) for example in examples])
            take_gradient(model, case, examples)
            assert not optimizer.step().skipped
            model.export(folders[2], tmp_path / "out", NAMES if objective.names else (), PAD_ID)

    ledgers = take_turns(machine, layout.ranks, turn, rehearsals=2 * (layout.pp > 1))
    assert layout.ranks == 1 or check_collectives(ledgers) > 0
