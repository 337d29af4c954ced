"""Each family on one rank and on two tensor-parallel ranks, against transformers.

Logits, gradients, greedy responses, log-probs and entropies of the training path with their
gradients, and the generator's log-probs are compared. The exported folder has the same tensors for
any number of ranks, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.families import (
    MAX_SHARD_BYTES,
    MODELS,
    TEMPERATURE,
    computed_by_transformers,
    computed_here,
    family_folder,
    tokens_of,
)
from helpers.policies import brute_force_log_probs, transformers_logits, transformers_model
from helpers.ranks import call_on_ranks
from safetensors.torch import load_file

from reinforce_rl.megatron.mesh import parallel_mesh

# Two ranks take longer; these models cover every family, with and without padding.
ON_TWO_RANKS = ("llama_bias_padded", "mistral_window", "qwen2_padded", "qwen3", "qwen3_padded")
every_model = pytest.mark.parametrize("name", MODELS)
models_on_two_ranks = pytest.mark.parametrize("name", ON_TWO_RANKS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def folders(root):
    return {name: family_folder(root, name) for name in MODELS}


@pytest.fixture(scope="module")
def expected(folders):
    return {name: computed_by_transformers(folder) for name, folder in folders.items()}


def computed_on_two_ranks(folders, out):
    with parallel_mesh(2) as mesh:
        return {name: computed_here(folders[name], mesh, out / name) for name in ON_TWO_RANKS}


@pytest.fixture(scope="module")
def on_two_ranks(root, folders):
    """Return the results by model; the ranks export to `root`/out."""
    return call_on_ranks(computed_on_two_ranks, 2, folders, root / "out", timeout=240)[0]


@every_model
def test_one_rank(name, folders, expected, mesh, tmp_path):
    computed = computed_here(folders[name], mesh, tmp_path / "out")
    assert_equal(computed, expected[name])
    assert_scored_alike(computed, expected[name], folders[name])
    assert_same_weights(tmp_path / "out", folders[name])


@models_on_two_ranks
def test_two_ranks(name, root, folders, expected, on_two_ranks):
    computed = on_two_ranks[name]
    assert_equal(computed, expected[name])
    assert_scored_alike(computed, expected[name], folders[name])
    assert_same_weights(root / "out" / name, folders[name])
    again = transformers_model(root / "out" / name)
    assert torch.equal(
        transformers_logits(again, tokens_of(again.config.vocab_size)), expected[name]["logits"]
    )


def assert_equal(computed: dict, expected: dict) -> None:
    assert expected["logits"].std() > 0.5  # otherwise closeness would prove little
    torch.testing.assert_close(computed["logits"], expected["logits"], atol=1e-5, rtol=0)
    assert computed["responses"] == computed["responses_alone"] == expected["responses"]
    assert len({tuple(response) for response in computed["responses"]}) > 1
    assert computed["gradient"].keys() == expected["gradient"].keys()
    for key, gradient in expected["gradient"].items():
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(
            computed["gradient"][key], gradient, atol=1e-6, rtol=1e-4, msg=key
        )
    # Parameters on several ranks count once, padding not at all.
    assert computed["norm"] == pytest.approx(expected["norm"], rel=1e-4)


def assert_scored_alike(computed: dict, expected: dict, folder: Path) -> None:
    """Log-probs of training and generation equal transformers' softmax at the temperature."""
    ours = computed["scores"]
    theirs = expected["scores"]
    assert theirs["log_probs"].std() > 0.5
    for layout in ("padded", "packed"):
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(
                ours[layout][name].float(), theirs[name].float(), atol=1e-5, rtol=0
            )
    assert ours["gradient"].keys() == theirs["gradient"].keys()
    for key, gradient in theirs["gradient"].items():
        both_layouts = 2 * gradient
        torch.testing.assert_close(
            ours["gradient"][key], both_layouts, atol=1e-4, rtol=1e-4, msg=key
        )
    drawn = computed["drawn"]
    of_tokens = brute_force_log_probs(
        transformers_model(folder, torch.float64),
        drawn["sequences"],
        drawn["prompts"],
        drawn["responses"],
        temperature=TEMPERATURE,
        width=drawn["log_probs"].shape[1],
    )
    assert len(drawn["responses"].unique()) > 1 or bool((drawn["responses"] > 1).all())
    torch.testing.assert_close(drawn["log_probs"], of_tokens.detach().float(), atol=1e-5, rtol=0)


def assert_same_weights(folder: Path, other: Path) -> None:
    weights = all_tensors(folder)
    others = all_tensors(other)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert weight.dtype == others[name].dtype
        assert torch.equal(weight, others[name]), name


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@models_on_two_ranks
def test_files_keep_to_their_size(name, on_two_ranks):
    files = sorted((on_two_ranks / name).glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        tensors = load_file(file)
        assert (
            sum(tensor.nbytes for tensor in tensors.values()) <= MAX_SHARD_BYTES
            or len(tensors) == 1
        )
