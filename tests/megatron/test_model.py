"""Fields of megatron's configuration: what a user may set, and that recomputation happens."""

from __future__ import annotations

import pytest
import torch
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, random_tokens

from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.model.attention import CoreAttention
from reinforce_rl.megatron.model.model import ModelOptions

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), layers=LAYERS)


def test_an_override_wins(folder, mesh):
    lm = megatron_model(folder, mesh, options=ModelOptions(overrides={"layernorm_epsilon": 0.5}))
    assert lm.config.layernorm_epsilon == 0.5
    tokens = random_tokens(64, 1, 4)
    assert not torch.allclose(lm(tokens), megatron_model(folder, mesh)(tokens))


def test_all_wrong_names_in_one_message(folder, mesh):
    overrides = {"layernorm_epsilom": 1.0, "zzz": 1, "tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError) as raised:
        megatron_model(folder, mesh, options=ModelOptions(overrides=overrides))
    first, second, third = raised.value.faults
    assert "model.megatron_overrides.layernorm_epsilom" in first and "did you mean layernorm_epsilon?" in first
    assert "zzz" in second and "megatron.core.transformer.TransformerConfig" in second
    assert "what model.tensor_model_parallel_size sets" in third


@pytest.mark.parametrize("overrides", [{"num_moe_experts": -1}, {"fp16": True, "bf16": True}])
def test_values_that_megatron_refuses(overrides, folder, mesh):
    with pytest.raises(ConfigError, match=r"megatron-core refuses .*model.megatron_overrides="):
        megatron_model(folder, mesh, options=ModelOptions(overrides=overrides))


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (ModelOptions(), LAYERS),
        (ModelOptions("selective"), 2 * LAYERS),
        (ModelOptions("full", "uniform", 1), 2 * LAYERS),
        (ModelOptions("full", "uniform", 3), 2 * LAYERS),
        (ModelOptions("full", "block", 1), LAYERS + 1),
    ],
    ids=["none", "selective", "uniform", "uniform in threes", "block"],
)
def test_what_is_computed_again(options, runs, folder, mesh, monkeypatch):
    lm, seen = megatron_model(folder, mesh, options=options).train(), []
    forward = CoreAttention.forward
    monkeypatch.setattr(CoreAttention, "forward", lambda *a, **k: seen.append(0) or forward(*a, **k))
    lm(random_tokens(64, 2, 6)).sum().backward()
    assert len(seen) == runs
    seen.clear()
    lm.eval()(random_tokens(64, 2, 6))
    assert len(seen) == LAYERS


def test_groups_of_layers_that_do_not_divide(folder, mesh):
    with pytest.raises(ConfigError, match="num_layers is 2, which does not divide the 3 layers of stage 0"):
        megatron_model(folder, mesh, options=ModelOptions("full", "uniform", 2))
