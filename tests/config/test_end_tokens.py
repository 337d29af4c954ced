"""The end tokens of a folder, and those used by transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import raises_error
from transformers import GenerationConfig, LlamaConfig

from reinforce_rl.config.end_tokens import read_end_tokens, with_end_tokens

MISSING = "missing"
CASES = {
    "one": (2, 2, 2, (2,)),
    "Qwen2.5: two in one file": (2, [2, 5], 2, (2, 5)),
    "Llama 3: the tokenizer names another": ([2, 5], [2, 5], 7, (2, 5, 7)),
    "each its own": (2, [5, 6], 7, (2, 5, 6, 7)),
    "no generation config": ([2, 5], MISSING, 5, (2, 5)),
    "a generation config without": (2, None, 2, (2,)),
    "the tokenizer has none": (2, 5, None, (2, 5)),
    "none at all": (None, None, None, ()),
    "beyond the vocabulary": (2, [2, 64], 99, (2,)),
}


def write_folder(folder: Path, configured: Any, generation: Any) -> Path:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "bos_token_id": 1,
        "eos_token_id": configured,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if generation != MISSING:
        values = {"eos_token_id": generation, "top_p": 0.8}
        (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def eos_of_transformers(folder: Path) -> tuple[int, ...]:
    """Return the ids that a model's `from_pretrained` chooses, from one file or the other."""
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    else:
        eos = GenerationConfig.from_model_config(LlamaConfig.from_pretrained(folder)).eos_token_id
    several = eos if isinstance(eos, list) else [eos]
    return tuple(sorted(token for token in several if token is not None))


@pytest.mark.parametrize(
    ("configured", "generation", "tokenizer", "expected"), CASES.values(), ids=CASES.keys()
)
def test_the_union_and_what_generate_would_use(
    configured, generation, tokenizer, expected, tmp_path
):
    folder = write_folder(tmp_path, configured, generation)
    end_tokens = read_end_tokens(folder, tokenizer)
    assert end_tokens.ids == expected
    assert end_tokens.of_generate == eos_of_transformers(folder)
    difference = end_tokens.difference(folder)
    assert (difference is None) == (expected == eos_of_transformers(folder))
    if difference is not None:
        for token in {*expected, *eos_of_transformers(folder)}:
            assert str(token) in difference
    written = with_end_tokens(folder, end_tokens)
    (folder / "generation_config.json").write_text(json.dumps(written))
    assert eos_of_transformers(folder) == expected
    assert written.get("top_p") == (None if generation == MISSING else 0.8)


@pytest.mark.parametrize("eos", ["</s>", [2, "</s>"], True, -1, [None], 2.0, {}])
def test_an_invalid_id_is_refused_with_its_file(eos, tmp_path):
    for place in ("config.json", "generation_config.json"):
        folder = write_folder(
            tmp_path, eos if place == "config.json" else 2, 2 if place == "config.json" else eos
        )
        with raises_error("model.eos_token_id.invalid", folder / place, "eos_token_id", repr(eos)):
            read_end_tokens(folder, 2)


@pytest.mark.parametrize(
    ("text", "key"),
    [("{", "model.generation_config.not_json"), ("[]", "model.generation_config.no_object")],
)
def test_a_broken_generation_config_is_refused(text, key, tmp_path):
    """transformers would silently use config.json's end tokens."""
    folder = write_folder(tmp_path, 2, 2)
    (folder / "generation_config.json").write_text(text)
    with raises_error(key, folder / "generation_config.json"):
        read_end_tokens(folder, 2)
