"""A reward model on several ranks: the numbers of one rank, and what happens when a rank fails, dies or hangs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.ranks import run_ranks

from reinforce_rl.megatron.reward_model import RewardHead, load_reward_model
from reinforce_rl.reward.batching import Batching

SCRIPT = Path(__file__).parents[1] / "helpers" / "rank_scripts" / "reward_ranks.py"


@pytest.fixture(scope="module", params=["mean", "last"])
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_llama_folder(folder / "trunk", vocab_size=64)
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
    RewardHead(weight, torch.tensor(0.5), request.param).save(folder / "head.safetensors")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 63, length).tolist() for length in rng.integers(1, 40, 30)]
    (folder / "sequences.json").write_text(json.dumps(sequences))
    return folder


def direct(folder: Path, mesh) -> list[float]:
    model = load_reward_model(folder / "trunk", folder / "head.safetensors", mesh, batching=Batching(1))
    return model.score(json.loads((folder / "sequences.json").read_text()))


def check(folder: Path, mesh, ranks: int, *layouts: str) -> None:
    expected = direct(folder, mesh)
    assert np.std(expected) > 0.1
    run_ranks(SCRIPT, ranks, folder, *layouts, timeout=200)
    for layout in layouts:
        found = json.loads((folder / f"scores_{layout.replace(' ', '_')}.json").read_text())
        np.testing.assert_allclose(found["first"], expected, atol=1e-5, err_msg=layout)
        assert found["second"] == found["first"]
        assert "rank 0" in found["error"]
        assert "MemoryError: no memory for this one" in found["error"]


def test_two_ranks_score_as_one_does_and_survive_a_failed_call(folder, mesh):
    check(folder, mesh, 2, "2 1 0", "2 1 1", "1 2 0", "1 1 0")


@pytest.mark.slow
def test_four_ranks_score_as_one_does(folder, mesh):
    check(folder, mesh, 4, "2 1 0", "2 2 1", "1 2 0", "4 1 0", "1 1 0")
