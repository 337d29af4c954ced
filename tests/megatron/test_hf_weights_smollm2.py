"""The real weights on one rank, and weights on two tensor-parallel ranks: both ways, the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.models import smollm2_folder, tiny_llama_folder
from helpers.policies import all_logits, megatron_model, random_tokens, transformers_logits, transformers_model
from helpers.ranks import run_ranks
from safetensors.torch import load_file

from reinforce_rl.megatron.weights.hf_weights import export_hf_folder

TEXT = "The tide comes in twice a day because the Moon pulls at the sea, and the Earth turns below it."


@pytest.fixture(scope="module")
def expected():
    """Tokens and transformers' logits of them."""
    from transformers import AutoTokenizer

    folder = smollm2_folder()
    text = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[:, :20]
    tokens = {"text": text, "random": random_tokens(49152, 2, 40)}
    model = transformers_model(folder)
    return {name: (value, transformers_logits(model, value)) for name, value in tokens.items()}


def test_logits_on_one_rank_and_export(expected, mesh, tmp_path):
    lm = megatron_model(smollm2_folder(), mesh)
    for tokens, logits in expected.values():
        assert (all_logits(lm, tokens) - logits).abs().max() < 1e-4
    exported = export_hf_folder(lm, smollm2_folder(), tmp_path / "exported")
    assert_same_weights(exported, smollm2_folder())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(folder, what a run on two tensor-parallel ranks wrote) of models that need padding in different ways."""
    root = tmp_path_factory.mktemp("two_ranks")
    shapes = {
        "tied": {},
        "untied_odd": {"vocab_size": 63, "tied": False},
        "odd_groups": {"heads": 9, "groups": 3, "hidden": 36, "vocab_size": 61},
        "one_group": {"heads": 4, "groups": 1, "head_dim": 16},
    }
    folders = [tiny_llama_folder(root / name, **shape) for name, shape in shapes.items()]
    folders.append(smollm2_folder())
    out = root / "out"
    out.mkdir()
    run_ranks(Path(__file__).parents[1] / "helpers/rank_scripts/weights_tp2.py", 2, out, *folders)
    return {folder.name: (folder, out) for folder in folders}


@pytest.mark.parametrize("name", ["tied", "untied_odd", "odd_groups", "one_group"])
def test_small_models_on_two_ranks(name, two_ranks):
    folder, out = two_ranks[name]
    logits = torch.load(out / f"{name}.pt")
    expected = transformers_logits(transformers_model(folder), random_tokens(logits.shape[-1], 2, 40))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert_same_weights(out / name, folder)


def test_real_weights_on_two_ranks(two_ranks, expected):
    folder, out = two_ranks[smollm2_folder().name]
    logits = torch.load(out / f"{folder.name}.pt")
    assert (logits - expected["random"][1]).abs().max() < 1e-4
    assert_same_weights(out / folder.name, folder)


def assert_same_weights(one: Path, other: Path) -> None:
    """Bit for bit: nothing is computed on the way, so the logits in transformers are the same too."""
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype
        assert torch.equal(weight, others[name]), name
