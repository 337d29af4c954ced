"""A model's shape from its config.json, its padding, and transformers' defaults.

All faults are reported at once.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy

import pytest
import torch
from helpers.errors import check_fault, raises_error
from helpers.models import tiny_llama_folder
from helpers.public_configs import CONFIGS, PARAMETERS, QWEN2_5_7B
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture, with_old_rope_keys
from reinforce_rl.megatron.model.model import rope_parameters
from reinforce_rl.megatron.weight_map import weight_map

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
USED = {"sliding_window": 512, "use_sliding_window": True}
WINDOWS = {
    "mistral, window": ("mistral", {"sliding_window": 512}, 512),
    "mistral, null": ("mistral", {"sliding_window": None}, None),
    "mistral, as long as the model": ("mistral", {"sliding_window": 2048}, None),
    "qwen2, not used": ("qwen2", {"sliding_window": 512}, None),
    "qwen2, on all layers": ("qwen2", {**USED, "max_window_layers": 0}, 512),
    "qwen2, on no layer": ("qwen2", {**USED, "max_window_layers": 30}, None),
    "qwen3, by layer_types": ("qwen3", {**USED, "layer_types": ["sliding_attention"] * 30}, 512),
    "qwen2, long, on some layers": (
        "qwen2",
        {**USED, "sliding_window": 4096, "max_window_layers": 15},
        None,
    ),
    "llama has none": ("llama", {"sliding_window": 512}, None),
}
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
# Models for which transformers' class without arguments is a different model: a predecessor, or an
# unpublished one.
OTHERWISE = {
    "Llama-2-7b": {"max_position_embeddings", "rms_norm_eps"},  # Llama 1's values
    "Mistral-7B-v0.1": {"max_position_embeddings", "rms_norm_eps"},
    "Mistral-7B-v0.3": {
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "sliding_window",
        "vocab_size",
    },
    "Qwen3-8B": {
        "intermediate_size",
        "max_position_embeddings",
        "num_hidden_layers",
        "num_key_value_heads",
        "rope_theta",
    },
}


def test_reads_what_transformers_wrote(tmp_path):
    folder = tiny_llama_folder(
        tmp_path, vocab_size=63, tied=False, heads=4, groups=2, head_dim=16, max_positions=99
    )
    arch = Architecture.from_folder(folder)
    assert arch.vocab_size == 63
    assert arch.num_heads == 4
    assert arch.num_groups == 2
    assert arch.head_size == 16
    assert arch.hidden_size == 32
    assert arch.ffn_size == 64
    assert arch.num_layers == 2
    assert arch.max_positions == 99
    assert not arch.tied_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_public_models_have_their_published_size(name):
    """Sizes from model cards or from `total_size` of index files; no weights are needed."""
    arch = Architecture.from_hf(CONFIGS[name])
    for tp_size in (1, 4):
        count = sum(math.prod(row.shape) for row in weight_map(arch, tp_size))
        assert count == PARAMETERS[name]
    frequencies, scale = rope_parameters(arch)
    assert frequencies.shape == (arch.head_size // 2,)
    assert scale == 1


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_keys_that_are_left_out_mean_what_they_mean_to_transformers(family):
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "intermediate_size": 64,
    }
    raw = {"model_type": family, "vocab_size": 64, **sizes}
    theirs = CONFIG_MAPPING[family].from_dict(deepcopy(raw))
    arch = Architecture.from_hf(raw)
    head_size = getattr(theirs, "head_dim", None) or 256 // 32
    assert arch.num_groups == theirs.num_key_value_heads
    assert arch.head_size == head_size
    assert arch.norm_eps == theirs.rms_norm_eps
    assert arch.max_positions == theirs.max_position_embeddings
    assert arch.window == getattr(theirs, "sliding_window", None)
    assert arch.tied_embeddings == theirs.tie_word_embeddings


def test_biases_and_norms_of_the_families():
    architectures = {name: Architecture.from_hf(raw) for name, raw in CONFIGS.items()}
    assert {name for name, arch in architectures.items() if arch.qkv_bias} == {
        "Qwen2.5-0.5B",
        "Qwen2.5-7B",
    }
    assert {name for name, arch in architectures.items() if arch.qk_norm} == {
        "Qwen3-0.6B",
        "Qwen3-8B",
    }
    for arch in architectures.values():
        assert not arch.output_bias
    biased = Architecture.from_hf({**SMOLLM2, "attention_bias": True})
    assert biased.qkv_bias is True
    assert biased.output_bias is True


@pytest.mark.parametrize(("family", "keys", "window"), WINDOWS.values(), ids=WINDOWS.keys())
def test_sliding_window(family, keys, window):
    raw = {**SMOLLM2, "max_position_embeddings": 2048, **keys, "model_type": family}
    assert Architecture.from_hf(raw).window == window


@pytest.mark.parametrize(
    "keys",
    [{"max_window_layers": 15}, {"layer_types": ["sliding_attention"] * 29 + ["full_attention"]}],
)
def test_a_window_on_some_layers_is_refused(keys):
    with raises_error("model.config.window_on_some_layers", "sliding_window", 512):
        Architecture.from_hf(
            {**SMOLLM2, "model_type": "qwen2", "max_position_embeddings": 2048, **USED, **keys}
        )


def test_defaults_of_older_configs():
    values = {
        k: v for k, v in SMOLLM2.items() if k not in ("num_key_value_heads", "tie_word_embeddings")
    }
    arch = Architecture.from_hf(values)
    assert arch.num_groups == 9
    assert arch.head_size == 64
    assert arch.tied_embeddings is False


def test_all_faults_in_one_message():
    raw = {
        **SMOLLM2,
        "model_type": "mamba",
        "mlp_bias": True,
        "num_key_value_heads": 2,
        "hidden_act": "gelu",
    }
    del raw["vocab_size"], raw["intermediate_size"]
    with pytest.raises(ConfigError) as caught:
        Architecture.from_hf(raw, source="some/config.json")
    faults = caught.value.faults
    assert len(faults) == 6
    for fault in faults:
        assert "some/config.json" in fault
    check_fault(faults, "model.config.other_model_type", "model_type", "'mamba'", "llama, mistral")
    for key in ("vocab_size", "intermediate_size"):
        check_fault(faults, "model.config.missing", key)
    check_fault(faults, "model.config.not_supported", "mlp_bias", "True")
    check_fault(faults, "model.config.not_supported", "hidden_act", "'gelu'")
    check_fault(faults, "model.config.groups_no_divisor_of_heads", "num_key_value_heads", 2, 9)


def test_what_would_change_the_numbers_is_refused():
    changes = {
        "num_experts": 60,
        "num_local_experts": 8,
        "dual_chunk_attention_config": {"chunk_size": 262144},
        "quantization_config": {"quant_method": "awq"},
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "partial_rotary_factor": 0.5,
        "sliding_window": 512,
        "use_sliding_window": True,
        "max_window_layers": 15,
    }
    with pytest.raises(ConfigError) as caught:
        Architecture.from_hf({**QWEN2_5_7B, **changes})
    faults = caught.value.faults
    assert len(faults) == 7
    not_supported = (
        "num_experts",
        "num_local_experts",
        "dual_chunk_attention_config",
        "partial_rotary_factor",
    )
    for key in not_supported:
        check_fault(faults, "model.config.not_supported", key, changes[key])
    check_fault(faults, "model.weights.quantised", "quantization_config", "awq")
    check_fault(faults, "model.config.other_rope_type", "rope_type", "'dynamic'")
    check_fault(faults, "model.config.window_on_some_layers", "sliding_window", 512)


QUANTISED = {
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": True}}, "awq"),
    "GPTQ": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "desc_act": False}},
        "gptq",
    ),
    "FP8": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "fp8",
    ),
    "bitsandbytes": (
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
        "bitsandbytes",
    ),
    "ModelOpt": (
        {"quantization_config": {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}},
        "NVFP4",
    ),
    "compressed-tensors": ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
    "MLX": (
        {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"bits": 4}},
        "quantization",
    ),
}


@pytest.mark.parametrize(("keys", "method"), QUANTISED.values(), ids=QUANTISED.keys())
def test_quantised_folders_are_refused_with_their_method_in_one_sentence(keys, method):
    with pytest.raises(ConfigError) as caught:
        Architecture.from_hf({**QWEN2_5_7B, **keys})
    (fault,) = caught.value.faults
    check_fault([fault], "model.weights.quantised", method)
    assert "{" not in fault, "no printed dictionary"


def test_keys_that_say_not_quantised():
    for nothing in (None, {}, False):
        keys = {
            "quantization_config": nothing,
            "compression_config": nothing,
            "quantization": nothing,
        }
        assert Architecture.from_hf({**QWEN2_5_7B, **keys}).num_layers == 28


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", None),
        ("hidden_size", "576"),
        ("num_hidden_layers", 2.0),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_key_value_heads", -3),
        ("head_dim", "64"),
        ("max_position_embeddings", None),
        ("rope_scaling", "linear"),
        ("rope_parameters", [4.0]),
    ],
)
def test_values_of_another_type_are_faults_with_their_key(key, value):
    with pytest.raises(ConfigError) as caught:
        Architecture.from_hf({**SMOLLM2, key: value})
    (fault,) = caught.value.faults
    kind = "rope_no_object" if key.startswith("rope") else "no_count"
    check_fault([fault], f"model.config.{kind}", key, repr(value))


@pytest.mark.parametrize(
    "keys",
    [
        {"rms_norm_eps": None},
        {"rope_theta": None},
        {"rope_scaling": {"rope_type": "linear", "factor": None}},
        {"rope_scaling": {"rope_type": "linear"}},
    ],
)
def test_what_transformers_refuses_is_a_fault_of_the_configuration(keys):
    architecture = Architecture.from_hf({**SMOLLM2, **keys})
    with raises_error("model.config.refused_by_transformers", "config.json"):
        rope_parameters(architecture)


def test_a_head_of_odd_size_has_no_pairs_to_turn():
    """transformers rejects it since 5.23; earlier versions fail at the first forward pass."""
    with raises_error("model.config.odd_head_size", "head_dim", 33):
        Architecture.from_hf({**SMOLLM2, "head_dim": 33})


def test_swish_is_silu():
    assert Architecture.from_hf({**SMOLLM2, "hidden_act": "swish"}).num_layers == 30


def test_head_dim_and_groups_that_are_null_mean_what_they_mean_to_transformers():
    keys = {**SMOLLM2, "head_dim": None, "num_key_value_heads": None}
    architecture = Architecture.from_hf(keys)
    theirs = CONFIG_MAPPING["llama"].from_dict(deepcopy(keys))
    assert architecture.head_size == theirs.head_dim
    assert architecture.num_groups == theirs.num_key_value_heads


@pytest.mark.parametrize(("key", "most"), [("num_hidden_layers", 1000), ("num_labels", 10_000)])
def test_numbers_of_which_transformers_makes_lists_are_bounded(key, most):
    values = {**SMOLLM2, **USED, "model_type": "qwen2", "max_window_layers": 0}
    assert Architecture.from_hf({**values, key: most}).raw[key] == most
    with pytest.raises(ConfigError) as caught:
        Architecture.from_hf({**values, key: 10**15}, source="some/config.json")
    (fault,) = caught.value.faults
    check_fault([fault], "model.config.too_large", "some/config.json", key, 10**15, most)


@pytest.mark.parametrize("others", [["config.json", "config.4.0.0.json"], "config.4.0.0.json"])
def test_another_file_in_place_of_config_json_is_refused(tmp_path, others):
    values = {**SMOLLM2, "configuration_files": ["config.json"]}
    Architecture.from_hf(values)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, "configuration_files": others}))
    with pytest.raises(ConfigError) as caught:
        Architecture.from_folder(tmp_path)
    (fault,) = caught.value.faults
    named = (path, "configuration_files", "config.4.0.0.json")
    check_fault([fault], "model.config.other_file", *named)
    if isinstance(others, list):
        (tmp_path / "config.4.0.0.json").write_text(json.dumps({**SMOLLM2, "vocab_size": 7}))
        read = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
        assert read.vocab_size == 7, "transformers reads the other file"


def test_heads_that_do_not_divide_the_hidden_size():
    with raises_error("model.config.heads_no_divisor_of_hidden", "hidden_size", 577, 9):
        Architecture.from_hf({**SMOLLM2, "hidden_size": 577})
    assert Architecture.from_hf({**SMOLLM2, "hidden_size": 577, "head_dim": 64}).head_size == 64


def test_missing_folder_and_broken_file(tmp_path):
    with raises_error("model.folder.no_model", tmp_path / "nowhere"):
        Architecture.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with raises_error("model.config.not_json", tmp_path / "config.json"):
        Architecture.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with raises_error("model.config.no_object", tmp_path / "config.json", "list"):
        Architecture.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("tp_size", "vocab_size", "groups", "heads"),
    [(1, 49152, 3, 9), (2, 49152, 4, 12), (3, 49152, 3, 9), (4, 49152, 4, 12), (6, 49152, 6, 18)],
)
def test_padding_of_smollm2(tp_size, vocab_size, groups, heads):
    sizes = Architecture.from_hf(SMOLLM2).padded(tp_size)
    assert sizes.vocab_size == vocab_size
    assert sizes.num_groups == groups
    assert sizes.num_heads == heads


def test_padding_of_an_odd_vocabulary():
    assert Architecture.from_hf({**SMOLLM2, "vocab_size": 63}).padded(2).vocab_size == 64
    assert Architecture.from_hf({**SMOLLM2, "vocab_size": 63}).padded(1).vocab_size == 63


def test_feed_forward_size_that_does_not_divide():
    key = "config.tensor_model_parallel_size.not_a_divisor_of_feed_forward"
    with raises_error(key, "model.tensor_model_parallel_size is 5", 1536):
        Architecture.from_hf(SMOLLM2).padded(5)


def test_rope_of_every_kind_equals_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kinds = {
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    }
    for kind, values in kinds.items():
        raw = {**SMOLLM2, "rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **values}}
        theirs = LlamaRotaryEmbedding(LlamaConfig(**deepcopy(raw)))
        frequencies, scale = rope_parameters(Architecture.from_hf(raw))
        assert torch.equal(frequencies, theirs.inv_freq)
        assert scale == theirs.attention_scaling
        assert (scale != 1) == (kind == "yarn")


LINEAR = {"rope_type": "linear", "factor": 4.0}
ROPE_FORMS = {
    "old names": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
    "both names of the type": {
        "rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 2.0}
    },
    "new names": {"rope_parameters": {**LINEAR, "rope_theta": 5e5}},
    "theta beside the new names": {"rope_parameters": LINEAR, "rope_theta": 5e5},
    "two thetas": {"rope_parameters": {**LINEAR, "rope_theta": 5e5}, "rope_theta": 1e4},
    "no theta": {"rope_parameters": LINEAR},
    "old and new": {
        "rope_scaling": LINEAR,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "old null and new": {"rope_scaling": None, "rope_parameters": {**LINEAR, "rope_theta": 5e5}},
    "new empty and old": {"rope_scaling": LINEAR, "rope_parameters": {}},
    "length beside the scaling": {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 128,
    },
    "of type default": {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
}


@pytest.mark.parametrize("keys", ROPE_FORMS.values(), ids=ROPE_FORMS.keys())
def test_rope_in_every_spelling_equals_transformers(keys):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {**SMOLLM2, "max_position_embeddings": 512, **keys}
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(deepcopy(raw)))
    frequencies, scale = rope_parameters(Architecture.from_hf(raw))
    assert torch.equal(frequencies, theirs.inv_freq)
    assert scale == theirs.attention_scaling


def test_the_rope_that_transformers_takes_of_two_is_the_one_that_is_checked():
    """transformers takes `rope_scaling`: here an unsupported kind, beside a supported one."""
    raw = {**SMOLLM2, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": LINEAR}
    assert (
        CONFIG_MAPPING["llama"].from_dict(deepcopy(raw)).rope_parameters["rope_type"] == "dynamic"
    )
    with raises_error("model.config.other_rope_type", "rope_type", "'dynamic'"):
        Architecture.from_hf(raw)
    with_old_keys = with_old_rope_keys({**raw, "rope_theta": 5e5})
    assert with_old_keys["rope_scaling"]["type"] == "dynamic", "for transformers 4 too"
    assert with_old_keys["rope_theta"] == 5e5


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
    config = CONFIG_MAPPING[CONFIGS[name]["model_type"]](**deepcopy(CONFIGS[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
