"""A checkpoint goes on at another layout as at its own, for three steps, with padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.checkpoint_run import Run
from helpers.families import family_folder
from helpers.ranks import run_ranks
from helpers.toy_server import free_port

from reinforce_rl.megatron.checkpoint import latest_checkpoint

SCRIPT = Path(__file__).parents[1] / "helpers/rank_scripts/resharding.py"
# Tied and untied embeddings; padded at TP=2 in heads, groups and vocabulary.
MODELS = ("llama_bias_padded", "qwen3_padded")
RUNS = ["dp2", "dp2 to tp1", "dp2 to tp2", "tp1 to dp2", "tp1 to tp2", "tp2", "tp2 to dp2", "tp2 to tp1"]


def test_three_steps_after_a_load(mesh, tmp_path):
    folders = [family_folder(tmp_path / "models", name) for name in MODELS]
    uninterrupted = {}
    for model in folders:
        run = Run(mesh, model, tmp_path / model.name / "tp1")
        run.train_on(0, 2)
        run.checkpointer.save(2, {"step": 2})
        uninterrupted[model.name] = run.train_on(2, 3)
    run_ranks(SCRIPT, 2, tmp_path, *(free_port() for _ in range(3)), *folders)
    for model in folders:
        losses = json.loads((tmp_path / model.name / "losses.json").read_text())
        for source in ("tp1", "tp2", "dp2"):
            run = Run(mesh, model, tmp_path / model.name)
            run.train_on(50, 1)
            run.checkpointer.restore(latest_checkpoint(tmp_path / model.name / source))
            losses[f"{source} to tp1"] = run.train_on(2, 3)
        assert losses.pop("tp1 to tp1") == uninterrupted[model.name]
        assert sorted(losses) == RUNS
        for found in losses.values():
            assert found == pytest.approx(uninterrupted[model.name], rel=1e-5, abs=0.0), losses
