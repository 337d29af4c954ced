"""The gradient of a reward model's loss equals autograd's on transformers' model.

For any cut and spread of the batch.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import flat, gradient_of, relative_difference
from helpers.errors import raises_error
from helpers.layouts import SETTINGS, Layout, on_layouts
from helpers.models import tiny_llama_folder
from helpers.policies import named_gradients
from helpers.ranks import call_on_ranks
from helpers.trainable import (
    CASES,
    NAMES,
    PAD_ID,
    VOCAB_SIZE,
    computed,
    examples_of,
    model_of,
    take_gradient,
)

from reinforce_rl.megatron.checkpointer import Checkpoint, Checkpointer
from reinforce_rl.megatron.optimizer import build_optimizer
from reinforce_rl.reward_model.train_full import load_trainable

ON_TWO_RANKS = [
    "TP2 SP",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("PP2", "CP2", "DP2")),
]
SLOW_ON_TWO_RANKS = ("TP2", "TP2 SP full recompute")
SLOW_ON_FOUR_RANKS = ("TP2 PP2 SP", "PP2 DP2", "TP2 CP2 SP", "CP2 DP2", "PP2 CP2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads, groups and vocabulary need padding at TP=2."""
    root = tmp_path_factory.mktemp("model")
    return tiny_llama_folder(root, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36)


@pytest.fixture(scope="module")
def expected(folder, mesh):
    return computed(Layout(), folder, mesh)


def brute_force(folder: Path, case: str, examples: list[Any]) -> tuple[float, torch.Tensor]:
    """Compute loss and gradient of the exported start by autograd on transformers' model.

    One sequence at a time.
    """
    from transformers import AutoModelForSequenceClassification

    objective, pooling = CASES[case]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    # transformers' own gives the padding token's embedding no gradient
    model.model.embed_tokens.padding_idx = None
    rows = []
    for example in examples:
        scores = []
        for sequence in objective.sequences_of(example):
            if pooling == "last":
                scores.append(model(torch.tensor([sequence])).logits[0])
            else:
                hidden = model.model(torch.tensor([sequence])).last_hidden_state[0]
                scores.append(model.score(hidden.mean(0)))
        rows.append(torch.stack(scores))
    scores = torch.stack(rows)
    if case == "ranking":
        margins = scores[:, 0, 0] - scores[:, 1, 0]
        loss = -torch.log(torch.sigmoid(margins)).mean()
    else:
        errors = []
        for i, example in enumerate(examples):
            for k, rating in enumerate(example.ratings):
                if not math.isnan(rating):
                    errors.append((scores[i, 0, k] - rating) ** 2)
        loss = torch.stack(errors).mean()
    loss.backward()
    return loss.item(), flat(named_gradients(model))


@pytest.mark.parametrize("case", CASES)
def test_equals_autograd_for_every_micro_batch_size(case, folder, mesh, tmp_path):
    objective, _ = CASES[case]
    examples = examples_of(objective)
    start = model_of(folder, mesh, case).export(folder, tmp_path / "start", objective.names, PAD_ID)
    loss, gradient = brute_force(start, case, examples)
    for micro_batch_size in (1, 2, 5, 100):
        model = model_of(folder, mesh, case, micro_batch_size=micro_batch_size)
        assert take_gradient(model, case, examples) == pytest.approx(loss, rel=1e-5)
        assert relative_difference(gradient_of(model), gradient) < 1e-5


def assert_same(results: dict[str, Any], expected: dict[str, Any]) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, float):
            assert results[name] == pytest.approx(value, rel=1e-5), name
        elif "gradient" in name:
            assert relative_difference(results[name], value) <= 1e-5, name
        else:
            torch.testing.assert_close(results[name], value, atol=2e-5, rtol=1e-5, msg=name)


def check_layouts(
    names: tuple[str, ...], ranks: int, folder: Path, expected: dict[str, Any], out: Path
) -> None:
    for of_rank in call_on_ranks(on_layouts, ranks, names, computed, folder, out, timeout=300):
        for results in of_rank.values():
            assert_same(results, expected)


@pytest.fixture(scope="module", params=ON_TWO_RANKS)
def on_two_ranks(request, folder, expected, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two")
    check_layouts((request.param,), 2, folder, expected, out)
    return out / request.param


def test_two_ranks_equal_one(on_two_ranks):
    """`check_layouts` has the checks."""


@pytest.mark.slow
def test_two_ranks_more(folder, expected, tmp_path):
    check_layouts(SLOW_ON_TWO_RANKS, 2, folder, expected, tmp_path)


@pytest.mark.slow
def test_four_ranks(folder, expected, tmp_path):
    check_layouts(SLOW_ON_FOUR_RANKS, 4, folder, expected, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_two_ranks_goes_on_here(case, on_two_ranks, folder, mesh, expected):
    model = model_of(folder, mesh, case)
    checkpoint = on_two_ranks / f"{case}.checkpoints" / "step_00000002"
    saved = Checkpoint(checkpoint, {})
    optimizer = build_optimizer(model.ddp, **SETTINGS)
    Checkpointer(saved.folder.parent, mesh, model.ddp, *optimizer).restore(saved)
    objective, _ = CASES[case]
    scores = model.scores([objective.sequences_of(example) for example in examples_of(objective)])
    torch.testing.assert_close(scores, expected[f"{case} scores after"], atol=2e-5, rtol=1e-5)


def test_a_folder_exported_by_two_ranks_scores_as_in_transformers(on_two_ranks, expected):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        on_two_ranks / "ranking", dtype=torch.float32
    )
    objective, _ = CASES["ranking"]
    sequences = [s for example in examples_of(objective) for s in objective.sequences_of(example)]
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([sequence])).logits for sequence in sequences])
    scores = logits.view(-1, 2, 1)
    torch.testing.assert_close(scores, expected["ranking scores after"], atol=2e-5, rtol=1e-5)


def test_a_model_that_its_weights_do_not_bear_out_is_not_built(folder, mesh, tmp_path):
    """Its embedding alone would need terabytes."""
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "vocab_size": 10**13}))
    with raises_error("model.weights.not_of_config", "embed_tokens.weight", f"({10**13}, "):
        load_trainable(tmp_path / "model", mesh, (), seed=0)


def test_a_classifier_goes_on_with_its_own_head(folder, mesh, tmp_path):
    start = model_of(folder, mesh, "regression")
    start.export(folder, tmp_path / "start", NAMES, PAD_ID)
    again = load_trainable(tmp_path / "start", mesh, NAMES, seed=99)
    assert torch.equal(again.score.weight, start.lm.score.weight)
    with raises_error("reward_model.head.other_scores", "kind, brief, true", "one reward"):
        load_trainable(tmp_path / "start", mesh, (), seed=0)
    with raises_error("reward_model.head.other_scores", "brief, kind, true", tmp_path / "start"):
        load_trainable(tmp_path / "start", mesh, ("brief", "kind", "true"), seed=0)
