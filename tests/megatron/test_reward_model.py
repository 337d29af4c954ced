"""Hugging Face classifiers as reward models, against transformers, and files of heads."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.classifiers import (
    FAMILIES,
    HELPSTEER,
    classifier_folder,
    sequences_to_score,
    transformers_scores,
)
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks

from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.reward_head import RewardHead, counted_lengths, pool
from reinforce_rl.reward_model.scorer import (
    Batching,
    Merging,
    load_reward_model,
    reward_model_identity,
)

KINDS = list(itertools.product(FAMILIES, (1, 5)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    folders = {}
    for family, labels in KINDS:
        folder = root / f"{family}{labels}"
        folders[family, labels] = classifier_folder(folder, family, labels)
    return folders


@pytest.fixture(scope="module")
def expected(folders):
    return {
        kind: transformers_scores(folder, sequences_to_score(), padded=True)
        for kind, folder in folders.items()
    }


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_classifier_scores_as_in_transformers(kind, folders, expected, mesh):
    model = load_reward_model(folders[kind], None, mesh, batching=Batching(4))
    scored = model.score_attributes(sequences_to_score())
    scores = torch.tensor(scored.attributes)
    assert expected[kind].std() > 0.3  # otherwise closeness would prove little
    torch.testing.assert_close(scores, expected[kind], atol=1e-5, rtol=0)
    alone = transformers_scores(folders[kind], sequences_to_score(), padded=False)
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=0)
    rewards = torch.tensor(scored.rewards)
    torch.testing.assert_close(rewards, expected[kind].mean(1), atol=1e-5, rtol=0)
    assert model.score(sequences_to_score()) == scored.rewards
    assert model.attributes == (HELPSTEER if kind[1] == 5 else ())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_trunk_in_bf16_has_a_head_in_fp32_and_another_identity(kind, folders, expected, mesh):
    exact = load_reward_model(folders[kind], None, mesh, dtype=torch.float32)
    model = load_reward_model(folders[kind], None, mesh, dtype=torch.bfloat16)
    dtypes = {p.dtype for p in model._lm.parameters()}
    assert dtypes == {torch.bfloat16}
    assert model._weight.dtype == torch.float32
    scores = torch.tensor(model.score_attributes(sequences_to_score()).attributes)
    torch.testing.assert_close(scores, expected[kind], atol=0.1, rtol=0)
    # Only the trunk rounds: a head in bf16 would give multiples of 2^-9 around 1.
    assert not torch.equal(scores, scores.to(torch.bfloat16).to(scores.dtype))
    identities = [
        reward_model_identity(folders[kind], None, reward_model) for reward_model in (exact, model)
    ]
    assert identities[1] == {**identities[0], "precision": "bfloat16"}
    assert "precision" not in identities[0]  # as before precisions existed


def scores_of(folders, layout):
    with parallel_mesh(*layout) as mesh:
        scores = []
        for folder in folders:
            model = load_reward_model(folder, None, mesh, batching=Batching(4))
            scores.append(model.score_attributes(sequences_to_score()).attributes)
        return scores


@pytest.mark.parametrize(
    "layout",
    [
        (2, 1, 1),
        pytest.param((1, 2, 1), marks=pytest.mark.slow),
        pytest.param((1, 1, 2), marks=pytest.mark.slow),
    ],
    ids=["TP2", "PP2", "CP2"],
)
def test_classifiers_on_two_ranks(layout, folders, expected):
    ranks = call_on_ranks(scores_of, 2, list(folders.values()), layout, timeout=240)
    for scores in ranks:
        for of_folder, kind in zip(scores, folders, strict=True):
            torch.testing.assert_close(torch.tensor(of_folder), expected[kind], atol=1e-5, rtol=0)


def test_without_a_padding_token_every_token_counts(tmp_path, mesh):
    folder = classifier_folder(tmp_path / "no_pad", "llama", 1, pad_token_id=None)
    scores = load_reward_model(folder, None, mesh).score(sequences_to_score())
    expected = transformers_scores(folder, sequences_to_score(), padded=False)[:, 0]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=0)


def test_the_last_token_that_is_not_padding():
    tokens = torch.tensor([[5, 6, 0, 9], [5, 0, 6, 0], [0, 0, 0, 0], [0, 5, 5, 5]])
    lengths = torch.tensor([3, 4, 2, 4])
    assert counted_lengths(tokens, lengths, 0).tolist() == [2, 3, 1, 4]
    assert counted_lengths(tokens, lengths, None) is lengths


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_shares_of_positions_add_up(pooling):
    hidden = torch.randn(3, 8, 4)
    lengths = torch.tensor([1, 8, 5])
    whole = pool(hidden, lengths, pooling)
    rows = [hidden[i, :n] for i, n in enumerate(lengths.tolist())]
    expected = torch.stack([row.mean(0) if pooling == "mean" else row[-1] for row in rows])
    torch.testing.assert_close(whole, expected)
    parts = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
    shares = [pool(hidden[:, part], lengths, pooling, part) for part in parts]
    torch.testing.assert_close(sum(shares), whole)


def test_a_folder_without_a_head_says_what_to_give(tmp_path, mesh):
    folder = tiny_llama_folder(tmp_path / "lm")
    with raises_error("reward_model.head.no_score", "score.weight", "reward_model.head_path"):
        load_reward_model(folder, None, mesh)


def test_a_model_that_its_weights_do_not_bear_out_is_not_built(folders, mesh, tmp_path):
    """The embedding alone would take terabytes, and the list of labels gigabytes."""
    shutil.copytree(folders[KINDS[0]], tmp_path / "model")
    file = tmp_path / "model/config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "vocab_size": 10**13}))
    with raises_error("model.weights.not_of_config", "embed_tokens.weight", f"({10**13}, "):
        load_reward_model(tmp_path / "model", None, mesh)
    file.write_text(json.dumps({**values, "id2label": None, "num_labels": 10**15}))
    with raises_error("model.config.too_large", "num_labels", 10**15, " 10000"):
        load_reward_model(tmp_path / "model", None, mesh)


def test_labels_that_do_not_belong_to_the_head_are_refused(folders, tmp_path):
    config = json.loads((folders["llama", 5] / "config.json").read_text())
    config["id2label"] = {"0": "one", "1": "two"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copyfile(folders["llama", 5] / "model.safetensors", tmp_path / "model.safetensors")
    values = ("score.weight", "5 rows", "id2label", "2 names")
    with raises_error("reward_model.head.other_labels", *values):
        RewardHead.from_classifier(HFFolder(tmp_path))


def test_a_head_of_attributes_survives_its_file(tmp_path):
    head = RewardHead(torch.randn(2, 6), torch.randn(2), "mean", ("kind", "brief"), 0.25, 1.5)
    head.save(tmp_path / "head.safetensors")
    again = RewardHead.load(tmp_path / "head.safetensors")
    assert torch.equal(again.weight, head.weight)
    assert torch.equal(again.bias, head.bias)
    assert again.pooling == "mean"
    assert again.attributes == ("kind", "brief")
    assert again.mean == 0.25
    assert again.std == 1.5
    with raises_error("reward_model.head.other_shapes", "(2, 6)", "3 names"):
        RewardHead(torch.randn(2, 6), torch.randn(2), "mean", ("a", "b", "c"))


def test_the_demo_head_still_loads():
    path = Path(__file__).parents[2] / "examples/demo/reward_head/head.safetensors"
    head = RewardHead.load(path)
    assert head.attributes == ()
    assert head.mean == 0.0
    assert head.std == 1.0


def test_merging():
    scores = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    names = ("a", "b", "c")
    assert Merging.from_names(names, None)(scores).tolist() == pytest.approx([2.0, 1.0])
    weights = {"c": 0.5, "a": -1}
    weighted = Merging.from_names(names, weights)
    assert weighted(scores).tolist() == pytest.approx([0.5, 2.0])
    scaled = Merging.from_names(names, weights, 0.5, 2.0)
    assert scaled(scores).tolist() == pytest.approx([0.0, 0.75])
    nameless = Merging.from_names((), None, 1.0, 0.5)
    assert nameless(scores[:, :1]).tolist() == pytest.approx([0.0, -2.0])


def test_merging_refuses_names_that_the_head_lacks():
    with raises_error("reward_model.attributes.unknown", "names helpfulnes; ", "verbosity"):
        Merging.from_names(HELPSTEER, {"helpfulnes": 1.0})
    with raises_error("reward_model.attributes.unknown", "helpfulness"):
        Merging.from_names((), {"helpfulness": 1.0})
    with raises_error("reward_model.attributes.all_zero", "reward_model.attribute_weights"):
        Merging.from_names(HELPSTEER, {"helpfulness": 0.0})
    # A head's file may contain any values.
    for mean, deviation in ((float("nan"), 1.0), (0.0, 0.0)):
        with raises_error("reward_model.moments.invalid", f"mean {mean}", f"std {deviation}"):
            Merging.from_names((), None, mean, deviation)
