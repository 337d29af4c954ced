"""The reward server's model, and training of all its weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers.fake_cuda import check_collectives
from helpers.layouts import LAYOUTS, SETTINGS, Layout
from helpers.trainable import CASES, NAMES, PAD_ID, examples_of, model_of, take_gradient

from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.preflight.fake_cuda.machine import Machine
from reinforce_rl.reward_model.scorer import MegatronRewardModel, load_trunk

NAMED = ("TP2 SP", "PP2", "CP2", "DP2 distributed optimizer", "TP2 PP2 SP")


@pytest.mark.parametrize("name", ["TP2", "TP2 SP", "PP2", "CP2", "TP2 PP2"])
def test_scores(machine: Machine, folders: dict[int, Path], name: str) -> None:
    layout = LAYOUTS[name]

    def turn(rank: int) -> None:
        with layout.mesh() as mesh:
            trunk = load_trunk(folders[2], mesh)
            head = RewardHead(torch.randn(trunk.architecture.hidden_size), torch.zeros(()), "mean")
            scores = MegatronRewardModel(trunk, head).score([[3, 4, 5], [6] * 12, [7]])
            assert len(scores) == 3
            assert all(map(math.isfinite, scores))

    assert check_collectives(machine.ranks(layout.ranks, turn, rehearsals=int(layout.pp > 1))) > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [Layout(), *map(LAYOUTS.get, NAMED)], ids=["one", *NAMED])
def test_trains(machine: Machine, folders: dict[int, Path], tmp_path: Path, layout: Layout, case: str) -> None:
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

    ledgers = machine.ranks(layout.ranks, turn, rehearsals=2 * (layout.pp > 1))
    assert layout.ranks == 1 or check_collectives(ledgers) > 0
