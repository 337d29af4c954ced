"""A tokenizer file that would fill the memory is refused before the library reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_llama_folder

from reinforce_rl.data.tokenizer import encode_all, load_tokenizer
from reinforce_rl.data.tokenizer_bounds import tokenizer_fault
from reinforce_rl.errors import ConfigError


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def expression(regex: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": regex}, "content": content}


def sequence(*rules: dict[str, Any], key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(rules)}


def template(count: int, ids: int = 1) -> dict[str, Any]:
    piece = {"SpecialToken": {"id": "b", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"b": {"id": "b", "ids": [1] * ids, "tokens": ["b"] * ids}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [*[piece] * count, text],
        "pair": pair,
        "special_tokens": special,
    }


PREPEND = {"type": "Prepend", "prepend": "▁"}
LLAMA_2 = sequence(PREPEND, replace(" ", "▁"))
ALBERT = sequence(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, expression(" {2,}", " "))
GROWING = {
    "doubled 32 times": {"normalizer": sequence(*[replace("a", "aa")] * 32)},
    "sequences in sequences": {"normalizer": sequence(*[sequence(replace("a", "aa"))] * 7)},
    "one long text": {"normalizer": replace("a", "a" * 101)},
    "two long texts": {"normalizer": sequence(replace("aa", "a" * 22), replace("a", "a" * 10))},
    "one that shortens first": {"normalizer": sequence(replace("b" * 100, ""), replace("a", "a" * 101))},
    "an expression": {"normalizer": expression("", "a" * 100)},
    "an empty text": {"normalizer": replace("", "a" * 100)},
    "prepended": {"normalizer": sequence(*[{"type": "Prepend", "prepend": "a"}] * 7)},
    "decoded": {"decoder": sequence(*[replace("a", "aa")] * 7, key="decoders")},
    "tokens": {"post_processor": template(98)},
    "ids of one token": {"post_processor": sequence(template(1, ids=26), key="processors")},
}
USUAL = {
    "Llama 2": {"normalizer": LLAMA_2, "decoder": sequence(replace("▁", " "), key="decoders")},
    "Albert": {"normalizer": ALBERT, "decoder": None},
    "nothing": {},
    "tokens": {"post_processor": template(97)},
    "ids of one token": {"post_processor": template(1, ids=25)},
    "at the bound": {"normalizer": replace("a", "a" * 100)},
    "of another part": {"normalizer": LLAMA_2, "decoder": replace("a", "a" * 100)},
}


def write(folder: Path, rules: Any, name: str = "tokenizer.json") -> Path:
    (folder / name).write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", GROWING)
def test_what_makes_too_much_is_refused(tmp_path: Path, kind: str) -> None:
    rules = GROWING[kind]
    part = next(iter(rules))
    fault = tokenizer_fault(write(tmp_path, rules))
    assert fault is not None and fault.startswith(f"{tmp_path / 'tokenizer.json'}: its {part} ")


@pytest.mark.parametrize("kind", USUAL)
def test_what_tokenizers_do_passes(tmp_path: Path, kind: str) -> None:
    assert tokenizer_fault(write(tmp_path, USUAL[kind])) is None


def test_other_places_and_spellings(tmp_path: Path) -> None:
    """transformers may choose a file by version; JSON may escape letters."""
    write(tmp_path, {})
    write(tmp_path, GROWING["one long text"], "tokenizer.4.0.0.json")
    assert "tokenizer.4.0.0.json" in (tokenizer_fault(tmp_path) or "")
    (tmp_path / "tokenizer.4.0.0.json").unlink()
    text = json.dumps(GROWING["one long text"]).replace('"Replace"', r'"Repl\u0061ce"')
    assert json.loads(text) == GROWING["one long text"]
    (tmp_path / "tokenizer.json").write_text(text)
    assert tokenizer_fault(tmp_path) is not None
    write(tmp_path, ["Replace", {"type": "Replace"}])
    assert tokenizer_fault(tmp_path) is None, "the library refuses it"


def test_it_is_not_loaded(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text(encoding="utf-8"))
    plain = encode_all(load_tokenizer(folder), ["tea"])
    write(folder, {**rules, "normalizer": sequence(replace("a", "aa"))})
    assert encode_all(load_tokenizer(folder), ["tea"]) != plain, "the rules are followed"
    write(folder, {**rules, "normalizer": sequence(*[replace("a", "aa")] * 32)})
    with pytest.raises(ConfigError, match=r"tokenizer\.json: its normalizer makes a text more than 100 times as long"):
        load_tokenizer(folder)
    path.write_text('{"normalizer": ["Replace", ')
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(folder)
