"""Fields of megatron's configuration that a user may set, and recomputation."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import check_fault, raises_error
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
    faults = raised.value.faults
    assert len(faults) == 3
    section = "model.megatron_overrides"
    unknown = "config.megatron_overrides.unknown"
    check_fault(faults, unknown, f"{section}.layernorm_epsilom", "layernorm_epsilon?")
    check_fault(faults, unknown, f"{section}.zzz", "megatron.core.transformer.TransformerConfig")
    check_fault(
        faults,
        "config.megatron_overrides.set_by_another_key",
        f"{section}.tensor_model_parallel_size",
        " model.tensor_model_parallel_size",
    )


@pytest.mark.parametrize("overrides", [{"num_moe_experts": -1}, {"fp16": True, "bf16": True}])
def test_values_that_megatron_refuses(overrides, folder, mesh):
    given = f"model.megatron_overrides={overrides}"
    with raises_error("config.model.refused_by_megatron", given):
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
    lm = megatron_model(folder, mesh, options=options).train()
    seen = []
    forward = CoreAttention.forward
    monkeypatch.setattr(
        CoreAttention, "forward", lambda *a, **k: seen.append(0) or forward(*a, **k)
    )
    lm(random_tokens(64, 2, 6)).sum().backward()
    assert len(seen) == runs
    seen.clear()
    lm.eval()(random_tokens(64, 2, 6))
    assert len(seen) == LAYERS


def test_groups_of_layers_that_do_not_divide(folder, mesh):
    key = "config.activations_checkpoint_num_layers.not_a_divisor_of_layers"
    with raises_error(key, "model.activations_checkpoint_num_layers is 2", "3 layers", "stage 0"):
        megatron_model(folder, mesh, options=ModelOptions("full", "uniform", 2))
