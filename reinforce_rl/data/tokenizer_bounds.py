"""Bounds on what a tokenizer may make of a text; its file comes with a model and may be anybody's.

The `tokenizers` library follows the rules of tokenizer.json without bounds of its own: thirty rules that each write a
character twice make a billion characters of one.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reinforce_rl.utils.untrusted_files import link_root, parse_json, read_bounded

MAX_GROWTH = 100  # times, of a text's characters
MAX_ADDED_TOKENS = 100  # around a text
_MAX_BYTES = 256 << 20
# transformers loads a file whose name contains "tokenizer." if tokenizer_config.json names it under this key.
_FILES = "fast_tokenizer_files"
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")  # rules of a sequence
# They make several characters of some; a second one would do it again.
_ONCE = ("ByteLevel", "BertNormalizer", "Precompiled")
_MAX_REPLACEMENT_BYTES = 100  # of a Precompiled rule; U+FDFA, the longest of NFKC, becomes 33 bytes


def tokenizer_fault(folder: Path) -> str | None:
    """Say which tokenizer file of a model's folder makes too much of a text; None if none does.

    Raises OSError or ValueError if one cannot be read.
    """
    for path in sorted(folder.glob("*tokenizer*.json")):
        if not path.exists():  # a link to nothing
            continue
        rules = parse_json(read_bounded(path, max_bytes=_MAX_BYTES, within=link_root(folder)))
        if isinstance(rules, dict) and (fault := _fault_of(rules)):
            return f"{path}: {fault}"
    return None


def _fault_of(rules: dict[str, Any]) -> str | None:
    if any("/" in str(name) for name in _list(rules.get(_FILES))):
        return f"its {_FILES} name a file of another folder"
    for part in _PARTS:
        if fault := _fault_of_part(list(_rules_of(rules.get(part)))):
            return f"its {part} {fault}"
    return None


def _fault_of_part(rules: list[dict[str, Any]]) -> str | None:
    growth = 1.0
    added_tokens = 0
    counts = Counter(str(rule.get("type")) for rule in rules)
    for rule in rules:
        # The library would guess the type by the other keys.
        if not isinstance(rule.get("type"), str):
            return "has a rule without a type"
        if rule["type"] == "Precompiled" and _longest_replacement(rule) > _MAX_REPLACEMENT_BYTES:
            return f"makes more than {_MAX_REPLACEMENT_BYTES} bytes of a character"
        growth *= _growth(rule)
        added_tokens += _added_tokens(rule)
    if growth > MAX_GROWTH:
        return f"makes a text more than {MAX_GROWTH} times as long"
    if added_tokens > MAX_ADDED_TOKENS:
        return f"adds more than {MAX_ADDED_TOKENS} tokens to a text"
    repeated = [kind for kind in _ONCE if counts[kind] > 1]
    return f"has {repeated[0]} {counts[repeated[0]]} times, expected once" if repeated else None


def _rules_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer, and the rules of its sequences."""
    if not isinstance(part, dict):
        return
    yield part
    for key in _LISTS:
        for rule in _list(part.get(key)):
            yield from _rules_of(rule)


def _growth(rule: dict[str, Any]) -> float:
    """Return how many times as long a rule may make a text."""
    if rule["type"] == "Prepend":
        return 1 + len(str(rule.get("prepend", "")))
    if rule["type"] != "Replace":
        return 1
    content = len(str(rule.get("content", "")))
    pattern = rule.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    # It may match before each character and at the end.
    return 1 + 2 * content


def _longest_replacement(rule: dict[str, Any]) -> int:
    """Return the bytes of the longest text of a SentencePiece table: size of its trie, trie, texts that end in NUL."""
    table = base64.b64decode(str(rule.get("precompiled_charsmap", "")), validate=True)
    if len(table) < 4:
        return 0
    (trie_bytes,) = struct.unpack_from("<I", table)
    return max(map(len, table[4 + trie_bytes :].split(b"\0")))


def _added_tokens(rule: dict[str, Any]) -> int:
    if rule["type"] != "TemplateProcessing":
        return 0
    pieces = [piece for name in ("single", "pair") for piece in _list(rule.get(name))]
    special = rule.get("special_tokens")
    tokens = special.values() if isinstance(special, dict) else ()
    ids = [len(_list(token.get("ids"))) for token in tokens if isinstance(token, dict)]
    return len(pieces) * max(ids, default=1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
