"""A tokenizer file that would fill the memory is refused before the library reads it."""

from __future__ import annotations

import base64
import json
import struct
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


def charsmap(*texts: str) -> dict[str, Any]:
    """A Precompiled rule with an empty trie."""
    table = struct.pack("<I", 4) + bytes(4) + b"".join(text.encode() + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


PREPEND = {"type": "Prepend", "prepend": "▁"}
LLAMA_2 = sequence(PREPEND, replace(" ", "▁"))
ALBERT = sequence(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, expression(" {2,}", " "))
GROWING = {
    "doubled 32 times": {"normalizer": sequence(*[replace("a", "aa")] * 32)},
    "sequences in sequences": {"normalizer": sequence(*[sequence(replace("a", "aa"))] * 7)},
    "one long text": {"normalizer": replace("a", "a" * 101)},
    "two long texts": {"normalizer": sequence(replace("aa", "a" * 22), replace("a", "a" * 10))},
    "one that shortens first": {"normalizer": sequence(replace("b" * 100, ""), replace("a", "a" * 101))},
    "an expression": {"normalizer": expression("", "a" * 50)},
    "an empty text": {"normalizer": replace("", "a" * 50)},
    "bytes twice": {"normalizer": sequence({"type": "ByteLevel"}, {"type": "ByteLevel"})},
    "Chinese characters twice": {"normalizer": sequence({"type": "BertNormalizer"}, {"type": "BertNormalizer"})},
    "a table": {"normalizer": charsmap("a", "b" * 101, "c")},
    "two tables": {"normalizer": sequence(charsmap("a"), sequence(charsmap("a")))},
    "a rule without a type": {"normalizer": sequence({"pattern": {"String": "a"}, "content": "aa"})},
    "a part without a type": {"decoder": {"pattern": {"String": "a"}, "content": "aa"}},
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
    "XLM-R": {
        "normalizer": sequence(charsmap("a", "ü" * 16), expression(" {2,}", "▁")),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    },
    "GPT-2": {
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "post_processor": {"type": "ByteLevel"},
        "decoder": {"type": "ByteLevel"},
    },
    "Llama 3": {
        "pre_tokenizer": sequence(
            {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False},
            key="pretokenizers",
        ),
        "post_processor": sequence({"type": "ByteLevel"}, template(1), key="processors"),
    },
    "a table at the bound": {"normalizer": charsmap("b" * 100)},
    "an expression at the bound": {"normalizer": expression("", "a" * 49)},
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
    """transformers may choose a file by version, whatever comes before it; JSON may escape letters."""
    write(tmp_path, {})
    write(tmp_path, GROWING["one long text"], "tokenizer.4.0.0.json")
    assert "tokenizer.4.0.0.json" in (tokenizer_fault(tmp_path) or "")
    (tmp_path / "tokenizer.4.0.0.json").unlink()
    write(tmp_path, GROWING["one long text"], "my_tokenizer.4.0.0.json")
    assert "my_tokenizer.4.0.0.json" in (tokenizer_fault(tmp_path) or "")
    (tmp_path / "my_tokenizer.4.0.0.json").unlink()
    names = {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}
    write(tmp_path, names, "tokenizer_config.json")
    assert tokenizer_fault(tmp_path) is None
    write(tmp_path, {"fast_tokenizer_files": ["a/tokenizer.4.0.0.json"]}, "tokenizer_config.json")
    assert "name a file of another folder" in (tokenizer_fault(tmp_path) or "")
    write(tmp_path, names, "tokenizer_config.json")
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
