"""A tokenizer file that would exhaust memory is rejected before the library reads it."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers.errors import check_fault, raises_error
from helpers.models import tiny_llama_folder
from helpers.tiny_tokenizer import write_tiny_tokenizer
from tokenizers.normalizers import Replace, Sequence
from transformers import AutoTokenizer

from reinforce_rl.data.tokenizer import encode_all, load_tokenizer
from reinforce_rl.data.tokenizer_bounds import MAX_RULES, loaded_fault, tokenizer_fault
from reinforce_rl.errors import Fault


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
    """Return a Precompiled rule with an empty trie."""
    terminated = b"".join(text.encode() + b"\0" for text in texts)
    table = struct.pack("<I", 4) + bytes(4) + terminated
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


PREPEND = {"type": "Prepend", "prepend": "▁"}
SPLIT = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": False}
BERT = {"type": "BertProcessing", "sep": ["b", 1], "cls": ["b", 1]}
LLAMA_2 = sequence(PREPEND, replace(" ", "▁"))
ALBERT = sequence(
    replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, expression(" {2,}", " ")
)
GROWING = {
    "doubled 32 times": {"normalizer": sequence(*[replace("a", "aa")] * 32)},
    "sequences in sequences": {"normalizer": sequence(*[sequence(replace("a", "aa"))] * 7)},
    "one long text": {"normalizer": replace("a", "a" * 101)},
    "two long texts": {"normalizer": sequence(replace("aa", "a" * 22), replace("a", "a" * 10))},
    "one that shortens first": {
        "normalizer": sequence(replace("b" * 100, ""), replace("a", "a" * 101))
    },
    "an expression": {"normalizer": expression("", "a" * 50)},
    "an empty text": {"normalizer": replace("", "a" * 50)},
    "bytes twice": {"normalizer": sequence({"type": "ByteLevel"}, {"type": "ByteLevel"})},
    "Chinese characters twice": {
        "normalizer": sequence({"type": "BertNormalizer"}, {"type": "BertNormalizer"})
    },
    "a table": {"normalizer": charsmap("a", "b" * 101, "c")},
    "two tables": {"normalizer": sequence(charsmap("a"), sequence(charsmap("a")))},
    "a rule without a type": {
        "normalizer": sequence({"pattern": {"String": "a"}, "content": "aa"})
    },
    "a part without a type": {"decoder": {"pattern": {"String": "a"}, "content": "aa"}},
    "prepended": {"normalizer": sequence(*[{"type": "Prepend", "prepend": "a"}] * 7)},
    "decoded": {"decoder": sequence(*[replace("a", "aa")] * 7, key="decoders")},
    "tokens": {"post_processor": template(98)},
    "ids of one token": {"post_processor": sequence(template(1, ids=26), key="processors")},
    "a character before each": {
        "pre_tokenizer": sequence(*[SPLIT, METASPACE] * 7, key="pretokenizers")
    },
    "a space between tokens": {"decoder": sequence(*[WORD_PIECE] * 7, key="decoders")},
    "tokens of many rules": {"post_processor": sequence(*[BERT] * 34, key="processors")},
    "many rules": {"normalizer": sequence(*[{"type": "Lowercase"}] * MAX_RULES)},
}
# Files that are rejected for other reasons than texts that grow.
OTHER_KEYS = {
    "bytes twice": "tokenizer.rules.repeated",
    "Chinese characters twice": "tokenizer.rules.repeated",
    "a table": "tokenizer.rules.long_replacement",
    "two tables": "tokenizer.rules.repeated",
    "a rule without a type": "tokenizer.rules.no_type",
    "a part without a type": "tokenizer.rules.no_type",
    "tokens": "tokenizer.rules.added_tokens",
    "ids of one token": "tokenizer.rules.added_tokens",
    "tokens of many rules": "tokenizer.rules.added_tokens",
    "many rules": "tokenizer.rules.too_many",
}
USUAL = {
    "Llama 2": {"normalizer": LLAMA_2, "decoder": sequence(replace("▁", " "), key="decoders")},
    "Albert": {"normalizer": ALBERT, "decoder": None},
    "nothing": {},
    "tokens": {"post_processor": template(97)},
    "ids of one token": {"post_processor": template(1, ids=25)},
    "XLM-R": {
        "normalizer": sequence(charsmap("a", "ü" * 16), expression(" {2,}", "▁")),
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
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
    "pieces at the bound": {
        "pre_tokenizer": sequence(*[SPLIT, METASPACE] * 6, key="pretokenizers"),
        "post_processor": sequence(*[BERT] * 33, key="processors"),
        "normalizer": sequence(*[{"type": "Lowercase"}] * (MAX_RULES - 1)),
    },
    "a table at the bound": {"normalizer": charsmap("b" * 100)},
    "an expression at the bound": {"normalizer": expression("", "a" * 49)},
    "at the bound": {"normalizer": replace("a", "a" * 100)},
    "of another part": {"normalizer": LLAMA_2, "decoder": replace("a", "a" * 100)},
}


def fault_of(folder: Path) -> Fault:
    fault = tokenizer_fault(folder)
    assert fault is not None
    return fault


def write(folder: Path, rules: Any, name: str = "tokenizer.json") -> Path:
    (folder / name).write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", GROWING)
def test_what_makes_too_much_is_refused(tmp_path: Path, kind: str) -> None:
    rules = GROWING[kind]
    part = next(iter(rules))
    fault = fault_of(write(tmp_path, rules))
    key = OTHER_KEYS.get(kind, "tokenizer.rules.longer_text")
    check_fault([fault], key, f"{tmp_path / 'tokenizer.json'}: its {part} ")


@pytest.mark.parametrize("kind", USUAL)
def test_what_tokenizers_do_passes(tmp_path: Path, kind: str) -> None:
    assert tokenizer_fault(write(tmp_path, USUAL[kind])) is None


def test_other_places_and_spellings(tmp_path: Path) -> None:
    """A file of another name is checked too; JSON may escape letters."""
    write(tmp_path, {})
    write(tmp_path, GROWING["one long text"], "my_tokenizer.4.0.0.json")
    fault = fault_of(tmp_path)
    check_fault([fault], "tokenizer.rules.longer_text", "my_tokenizer.4.0.0.json")
    (tmp_path / "my_tokenizer.4.0.0.json").unlink()
    text = json.dumps(GROWING["one long text"]).replace('"Replace"', r'"Repl\u0061ce"')
    assert json.loads(text) == GROWING["one long text"]
    (tmp_path / "tokenizer.json").write_text(text)
    assert tokenizer_fault(tmp_path) is not None
    write(tmp_path, ["Replace", {"type": "Replace"}])
    assert tokenizer_fault(tmp_path) is None, "the library refuses it"


@pytest.mark.parametrize(
    "name", ["tokenizer.4.0.0.json", "tokenizer.4.0.0.json.bak", "a/tokenizer.4.0.0.json"]
)
def test_another_file_in_place_of_the_checked_one_is_refused(tmp_path: Path, name: str) -> None:
    """transformers reads the newest of these files that its version supports."""
    folder = write_tiny_tokenizer(tmp_path / "model")
    rules = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / name).parent.mkdir(exist_ok=True)
    write(folder, {**rules, "normalizer": replace("a", "b")}, name)
    change(folder / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.json"])
    plain = encode_all(load_tokenizer(folder), ["tea"])
    change(folder / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.json", name])
    followed = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert encode_all(followed, ["tea"]) != plain, "transformers reads the other file"
    values = (f"fast_tokenizer_files names {name},", "tokenizer.json")
    with raises_error("tokenizer.file.not_the_checked_one", *values):
        load_tokenizer(folder)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}))


@pytest.mark.parametrize("key", ["vocab_file", "merges_file", "vocab", "merges", "gguf_file"])
def test_a_path_out_of_the_folder_is_refused_where_transformers_would_open_it(
    tmp_path: Path, key: str
) -> None:
    folder = write_tiny_tokenizer(tmp_path / "model")
    outside = tmp_path / "secret.model"
    outside.write_text("x")
    change(folder / "tokenizer_config.json", **{key: str(outside)})
    assert tokenizer_fault(folder) is None, "tokenizer.json is read in its place"
    (folder / "tokenizer.json").unlink()
    config = folder / "tokenizer_config.json"
    values = (f"{config}: {key} is '{outside}'", f"outside of {folder};")
    check_fault([fault_of(folder)], "tokenizer.file.outside", *values)
    change(folder / "tokenizer_config.json", **{key: "../secret.model"})
    check_fault([fault_of(folder)], "tokenizer.file.outside", f"{key} is '../secret.model'")
    (folder / "own.model").write_text("x")
    for harmless in ("own.model", str(tmp_path / "nothing.model"), "a" * 5000, "\0"):
        change(folder / "tokenizer_config.json", **{key: harmless})
        assert tokenizer_fault(folder) is None


def test_added_tokens_have_bounds(tmp_path: Path) -> None:
    token = {"content": "x"}
    many = {str(number): token for number in range(10_001)}
    for name, key, count, most in (
        ("tokenizer.json", "added_tokens", 200_001, 200_000),
        ("tokenizer_config.json", "extra_special_tokens", 10_001, 10_000),
        ("special_tokens_map.json", "additional_special_tokens", 10_001, 10_000),
    ):
        tokens = many if key == "extra_special_tokens" else [token] * count
        fault = fault_of(write(tmp_path, {key: tokens}, name))
        values = (f"{tmp_path / name}: {key} ", f"{count} tokens", most)
        check_fault([fault], "tokenizer.file.too_many_tokens", *values)
        (tmp_path / name).unlink()
    name = "special_tokens_map.json"
    fault = fault_of(write(tmp_path, many, name))
    values = (f"{tmp_path / name}: ", "10001 keys", 10_000)
    check_fault([fault], "tokenizer.file.too_many_keys", *values)
    (tmp_path / name).unlink()
    write(tmp_path, {"added_tokens_decoder": many}, "tokenizer_config.json")
    assert tokenizer_fault(write(tmp_path, many, "added_tokens.json")) is None


def test_a_loaded_tokenizer_is_checked_for_any_source_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny_tokenizer(tmp_path)).backend_tokenizer
    assert loaded_fault(tokenizer) is None
    tokenizer.normalizer = Sequence([Replace("a", "aa")] * 7)
    fault = loaded_fault(tokenizer)
    assert fault is not None
    check_fault([fault], "tokenizer.rules.longer_text", "its normalizer ", 100)
    tokenizer.normalizer = Sequence([Replace("a", "aa")] * 6)
    tokenizer.add_tokens(["y" * 10_000])
    assert loaded_fault(tokenizer) is None
    tokenizer.add_tokens(["y" * 10_001])
    fault = loaded_fault(tokenizer)
    assert fault is not None
    check_fault([fault], "tokenizer.token.too_long", 10_001, 10_000)


def test_it_is_not_loaded(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text(encoding="utf-8"))
    plain = encode_all(load_tokenizer(folder), ["tea"])
    write(folder, {**rules, "normalizer": sequence(replace("a", "aa"))})
    assert encode_all(load_tokenizer(folder), ["tea"]) != plain, "the rules are followed"
    write(folder, {**rules, "normalizer": sequence(*[replace("a", "aa")] * 32)})
    with raises_error("tokenizer.rules.longer_text", f"{path}: its normalizer ", 100):
        load_tokenizer(folder)
    path.write_text('{"normalizer": ["Replace", ')
    with raises_error("tokenizer.file.invalid", folder):
        load_tokenizer(folder)


def test_a_long_token_is_not_loaded(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    rules = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    rules["model"]["vocab"]["y" * 10_001] = 128
    with raises_error("tokenizer.token.too_long", folder, 10_001):
        load_tokenizer(write(folder, rules))


def test_a_panic_of_the_library_becomes_an_error(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path)
    rules = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    values = (folder, "Cannot parse precompiled_charsmap")
    with raises_error("tokenizer.folder.not_loadable", *values):
        load_tokenizer(write(folder, {**rules, "normalizer": broken}))
