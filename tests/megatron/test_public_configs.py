"""The shapes in `helpers/public_configs.py`, which come from no model hub, against what transformers knows."""

from __future__ import annotations

import pytest
import torch
from helpers.public_configs import CONFIGS, PARAMETERS
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SHAPE = [
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "vocab_size",
    "sliding_window",
    "use_sliding_window",
    "attention_bias",
    "attention_dropout",
    "rope_theta",
]

# Where a class without arguments is another model than ours: its predecessor, or none that was published.
OTHERWISE = {
    "Llama-2-7b": {"max_position_embeddings", "rms_norm_eps"},  # Llama 1's
    "Mistral-7B-v0.1": {"max_position_embeddings", "rms_norm_eps"},
    "Mistral-7B-v0.3": {"max_position_embeddings", "rms_norm_eps", "rope_theta", "sliding_window", "vocab_size"},
    "Qwen3-8B": {
        "intermediate_size",
        "max_position_embeddings",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_theta",
    },
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_defaults_of_the_config_classes(name):
    ours = CONFIGS[name]
    known = CONFIG_MAPPING[ours["model_type"]]().to_dict()
    if "rope_parameters" in known:  # since transformers 5
        known["rope_theta"] = known["rope_parameters"]["rope_theta"]
    compared = [key for key in SHAPE if key in ours and key in known]
    assert {key for key in compared if ours[key] != known[key]} == OTHERWISE[name]
    assert len(compared) >= 10


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_model_has_as_many_parameters(name):
    config = CONFIG_MAPPING[CONFIGS[name]["model_type"]](**CONFIGS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
