"""Reward models whose head has another name or two layers, against the saved module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.classifiers import classifier_folder, sequences_to_score
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder
from safetensors.torch import load_file, save_file
from torch import nn

from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.megatron.model.stored_head import unused_moments
from reinforce_rl.reward_model.scorer import Merging, load_reward_model, reward_model_identity

HIDDEN = 36
PAD_ID = 0
HEADS = {
    "value_head": lambda: nn.Linear(HIDDEN, 1, bias=False),  # OpenRLHF
    "reward_head": lambda: nn.Linear(HIDDEN, 1, bias=False),
    "v_head.summary": lambda: nn.Linear(HIDDEN, 1),  # TRL's AutoModelForCausalLMWithValueHead
    "regression_head": lambda: nn.Linear(HIDDEN, 1),
}


def two_layers(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 20), activation, nn.Linear(20, 1))


def write_head(folder: Path, name: str, module: nn.Module, **config: Any) -> Path:
    """Replace a classifier's `score.weight` by a head.

    The name seeds the head's random weights.
    """
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("score.weight", None)
    tensors |= {f"{name}.{key}": value.clone() for key, value in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    for key in ("id2label", "label2id"):
        values.pop(key, None)
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    return folder


@torch.no_grad()
def expected_scores(folder: Path, module: nn.Module) -> torch.Tensor:
    """Apply the head to transformers' hidden state at each row's last token."""
    from transformers import AutoModel

    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [
        trunk(torch.tensor([tokens])).last_hidden_state[0, -1] for tokens in sequences_to_score()
    ]
    return module(torch.stack(rows))


@pytest.fixture
def folder(tmp_path) -> Path:
    return classifier_folder(tmp_path / "rm", "llama", 1)


@pytest.mark.parametrize("name", HEADS)
def test_a_linear_head_of_another_name(name, folder, mesh):
    module = HEADS[name]()
    write_head(folder, name, module, architectures=["RewardModel"])
    values = (f"{name}.weight (1 x {HIDDEN})", f"reward_model.head_name={name}")
    with raises_error("reward_model.head.no_score", *values):
        load_reward_model(folder, None, mesh)

    expected = expected_scores(folder, module)
    for given in (name, f"{name}.weight"):
        model = load_reward_model(folder, None, mesh, head_name=given)
        assert model.attributes == ()
        scores = torch.tensor(model.score(sequences_to_score()))
        torch.testing.assert_close(scores, expected[:, 0], atol=1e-5, rtol=0, check_dtype=False)
    assert reward_model_identity(folder, None, model)["head_name"] == name


def test_a_language_model_with_a_value_head(mesh, tmp_path):
    """TRL also saves the output layer, and a head with a bias."""
    folder = tiny_llama_folder(
        tmp_path, hidden=HIDDEN, heads=9, groups=3, vocab_size=61, tied=False
    )
    module = nn.Linear(HIDDEN, 1)
    write_head(folder, "v_head.summary", module)
    scores = load_reward_model(folder, None, mesh, head_name="v_head.summary").score(
        sequences_to_score()
    )
    expected = expected_scores(folder, module)[:, 0]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=0, check_dtype=False)


def test_the_head_that_the_config_names_for_openrlhf(folder, mesh):
    module = HEADS["value_head"]()
    write_head(folder, "value_head", module, value_head_prefix="value_head")
    scores = load_reward_model(folder, None, mesh).score(sequences_to_score())
    expected = expected_scores(folder, module)[:, 0]
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=0, check_dtype=False)


def test_two_heads_are_a_choice(folder, mesh):
    module = HEADS["value_head"]()
    score = load_file(folder / "model.safetensors")["score.weight"]
    write_head(folder, "value_head", module, value_head_prefix="value_head", num_labels=1)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "score.weight": score}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    choices = ("reward_model.head_name=score", "reward_model.head_name=value_head")
    with raises_error("reward_model.head.two_heads", *choices):
        load_reward_model(folder, None, mesh)
    scores = {}
    for name in ("score", "value_head"):
        scores[name] = load_reward_model(folder, None, mesh, head_name=name).score(
            sequences_to_score()
        )
    expected = expected_scores(folder, module)[:, 0]
    torch.testing.assert_close(
        torch.tensor(scores["value_head"]), expected, atol=1e-5, rtol=0, check_dtype=False
    )
    assert scores["score"] != scores["value_head"]


def test_a_bias_that_transformers_leaves_out_is_a_choice(folder, mesh):
    tensors = load_file(folder / "model.safetensors")
    without = load_reward_model(folder, None, mesh).score(sequences_to_score())
    save_file(
        {**tensors, "score.bias": torch.tensor([0.5])},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    values = ("score.bias", "reward_model.head_name=score")
    with raises_error("reward_model.head.bias_of_score", *values):
        load_reward_model(folder, None, mesh)
    scores = load_reward_model(folder, None, mesh, head_name="score").score(sequences_to_score())
    expected = [score + 0.5 for score in without]
    assert scores == pytest.approx(expected, abs=1e-6)


class TestTwoLayers:
    def test_of_qwens_reward_models(self, tmp_path, mesh):
        """The head is Linear, ReLU, Linear: modeling_qwen2_rm.py of Qwen/Qwen2.5-Math-RM-72B."""
        folder = classifier_folder(tmp_path / "rm", "qwen2", 1, pad_token_id=None)
        module = two_layers(nn.ReLU())
        write_head(folder, "score", module, architectures=["Qwen2ForRewardModel"])
        model = load_reward_model(folder, None, mesh)
        expected = expected_scores(folder, module)[:, 0]
        scores = torch.tensor(model.score(sequences_to_score()))
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0, check_dtype=False)
        assert reward_model_identity(folder, None, model)["head_activation"] == "relu"

    @pytest.mark.parametrize(
        ("activation", "module"),
        [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("silu", nn.SiLU()), ("tanh", nn.Tanh())],
    )
    def test_the_activation_is_named(self, activation, module, folder, mesh):
        head = two_layers(module)
        write_head(folder, "v_head", head)
        choices = "reward_model.head_activation=relu|gelu|silu|tanh"
        for name in ("v_head", "v_head.0.weight"):
            with raises_error("reward_model.head.activation_not_set", choices):
                load_reward_model(folder, None, mesh, head_name=name)
        model = load_reward_model(
            folder, None, mesh, head_name="v_head", head_activation=activation
        )
        scores = torch.tensor(model.score(sequences_to_score()))
        expected = expected_scores(folder, head)[:, 0]
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0, check_dtype=False)

    def test_an_activation_for_one_layer_is_refused(self, folder, mesh):
        with raises_error("reward_model.head.one_layer", "reward_model.head_activation", "tanh"):
            load_reward_model(folder, None, mesh, head_activation="tanh")

    @pytest.mark.parametrize(
        "module",
        [
            nn.Sequential(
                nn.Linear(HIDDEN, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1)
            ),
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 1)),
            nn.ModuleDict({"dense": nn.Linear(HIDDEN, HIDDEN), "out_proj": nn.Linear(HIDDEN, 1)}),
            nn.Sequential(nn.Linear(HIDDEN, 20), nn.ReLU(), nn.Linear(21, 1)),
        ],
        ids=["three layers", "a norm", "layers without an order", "layers that do not fit"],
    )
    def test_other_structures_are_refused_with_what_is_there(self, module, folder, mesh):
        write_head(folder, "v_head", module)
        values = []
        for name, parameter in module.named_parameters():
            shape = " x ".join(map(str, parameter.shape))
            values.append(f"v_head.{name} ({shape})")
        with raises_error("reward_model.head.other_tensors", *values):
            load_reward_model(folder, None, mesh, head_name="v_head", head_activation="relu")


def test_a_name_that_is_not_there(folder, mesh):
    write_head(folder, "value_head", HEADS["value_head"]())
    values = ("reward_model.head_name is reward_head", "reward_model.head_name=value_head")
    with raises_error("reward_model.head.unknown_name", *values):
        load_reward_model(folder, None, mesh, head_name="reward_head")


def test_the_head_that_llama_factory_writes_beside_the_weights(mesh, tmp_path):
    folder = tiny_llama_folder(tmp_path, hidden=HIDDEN, heads=9, groups=3, vocab_size=61)
    module = nn.Linear(HIDDEN, 1)
    file = folder / "value_head.safetensors"
    save_file({f"v_head.summary.{key}": value for key, value in module.state_dict().items()}, file)
    settings = f"reward_model.head_path={file} reward_model.head_name=v_head.summary"
    with raises_error("reward_model.head.no_score", settings):
        load_reward_model(folder, None, mesh)
    model = load_reward_model(folder, file, mesh, head_name="v_head.summary")
    expected = expected_scores(folder, module)[:, 0]
    scores = torch.tensor(model.score(sequences_to_score()))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0, check_dtype=False)
    with raises_error("reward_model.head.other_tensors", "reward_head", file):
        RewardHead.from_file(file, "reward_head", folder)


class TestLabelsWithoutNames:
    CHOICE = ("LABEL_0, LABEL_1", "reward_model.attribute_weights")

    def test_need_a_choice(self, tmp_path, mesh):
        folder = classifier_folder(tmp_path, "llama", 2)
        with raises_error("reward_model.attributes.no_names", *self.CHOICE):
            load_reward_model(folder, None, mesh)
        with raises_error("reward_model.attributes.no_names", *self.CHOICE):
            Merging.from_names(("LABEL_0", "LABEL_1"), None)

    def test_the_choice_is_kept(self, tmp_path, mesh):
        folder = classifier_folder(tmp_path, "llama", 2)
        names = RewardHead.from_classifier(HFFolder(folder)).attributes
        by_weights = {}
        for weights in ({"LABEL_0": 1.0}, {"LABEL_1": 1.0}, {"LABEL_1": 1.0, "LABEL_0": -1.0}):
            merging = Merging.from_names(names, weights)
            model = load_reward_model(folder, None, mesh, merging=merging)
            by_weights[tuple(weights)] = torch.tensor(model.score(sequences_to_score()))
        scores = load_reward_model(folder, None, mesh, merging=merging).score_attributes(
            sequences_to_score()
        )
        columns = torch.tensor(scores.attributes).T
        torch.testing.assert_close(by_weights["LABEL_0",], columns[0], check_dtype=False)
        torch.testing.assert_close(by_weights["LABEL_1",], columns[1], check_dtype=False)
        expected = columns[1] - columns[0]
        torch.testing.assert_close(by_weights["LABEL_1", "LABEL_0"], expected, check_dtype=False)

    def test_names_mean_what_they_say(self):
        assert Merging.from_names(("safety", "LABEL_1"), None).weights == (0.5, 0.5)
        assert Merging.from_names((), None).weights == (1.0,)


@pytest.mark.parametrize(
    ("config", "is_said"),
    [
        ({"mean": 0.5, "std": 2.0}, True),
        ({"mean": 0, "std": 1}, False),
        ({}, False),
        ({"mean": None}, False),
    ],
)
def test_moments_that_openrlhf_would_apply_are_reported(config, is_said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    sentence = unused_moments(tmp_path)
    assert (sentence is not None) == is_said
    if sentence is not None:
        assert "reward_model.mean=0.5 reward_model.std=2.0" in sentence
