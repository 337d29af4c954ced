"""The shape of a model from its config.json: every fault at once, and the padding for tensor parallelism."""

from __future__ import annotations

import pytest
from helpers.models import tiny_llama_folder

from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture

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


def test_reads_what_transformers_wrote(tmp_path):
    folder = tiny_llama_folder(tmp_path, vocab_size=63, tied=False, heads=4, groups=2, head_dim=16, max_positions=99)
    found = Architecture.from_folder(folder)
    assert (found.vocab_size, found.num_heads, found.num_groups, found.head_size) == (63, 4, 2, 16)
    assert (found.hidden_size, found.ffn_size, found.num_layers, found.max_positions) == (32, 64, 2, 99)
    assert not found.tied_embeddings


def test_defaults_of_older_configs():
    values = {k: v for k, v in SMOLLM2.items() if k not in ("num_key_value_heads", "tie_word_embeddings")}
    found = Architecture.from_hf(values)
    assert (found.num_groups, found.head_size, found.tied_embeddings) == (9, 64, False)


def test_all_faults_in_one_message():
    raw = {**SMOLLM2, "model_type": "mamba", "attention_bias": True, "num_key_value_heads": 2, "hidden_act": "gelu"}
    del raw["vocab_size"], raw["intermediate_size"]
    with pytest.raises(ConfigError) as caught:
        Architecture.from_hf(raw, source="some/config.json")
    text = str(caught.value)
    assert len(caught.value.faults) == 6
    assert all("some/config.json" in fault for fault in caught.value.faults)
    for part in ("'mamba'", "supported: llama", "vocab_size is missing", "intermediate_size is missing"):
        assert part in text
    for part in ("attention_bias is True", "hidden_act is 'gelu'", "num_key_value_heads is 2"):
        assert part in text


def test_heads_that_do_not_divide_the_hidden_size():
    with pytest.raises(ConfigError, match="hidden_size is 577, which 9 attention heads do not divide"):
        Architecture.from_hf({**SMOLLM2, "hidden_size": 577})
    assert Architecture.from_hf({**SMOLLM2, "hidden_size": 577, "head_dim": 64}).head_size == 64


def test_missing_folder_and_broken_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/config\.json does not exist"):
        Architecture.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        Architecture.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("tp_size", "vocab_size", "groups", "heads"),
    [(1, 49152, 3, 9), (2, 49152, 4, 12), (3, 49152, 3, 9), (4, 49152, 4, 12), (6, 49152, 6, 18)],
)
def test_padding_of_smollm2(tp_size, vocab_size, groups, heads):
    sizes = Architecture.from_hf(SMOLLM2).padded(tp_size)
    assert (sizes.vocab_size, sizes.num_groups, sizes.num_heads) == (vocab_size, groups, heads)


def test_padding_of_an_odd_vocabulary():
    assert Architecture.from_hf({**SMOLLM2, "vocab_size": 63}).padded(2).vocab_size == 64
    assert Architecture.from_hf({**SMOLLM2, "vocab_size": 63}).padded(1).vocab_size == 63


def test_feed_forward_size_that_does_not_divide():
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size is 5, which does not divide .* 1536"):
        Architecture.from_hf(SMOLLM2).padded(5)
