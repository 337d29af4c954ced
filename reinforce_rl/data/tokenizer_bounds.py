"""Bounds on what a tokenizer may make of a text; its file comes with a model and may be anybody's.

The `tokenizers` library follows the rules of tokenizer.json without bounds of its own: thirty rules that each write a
character twice make a billion of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reinforce_rl.utils.untrusted_files import link_root, parse_json, read_bounded

MAX_GROWTH = 100  # times, of a text's characters
MAX_ADDED_TOKENS = 100  # around a text
_MAX_BYTES = 256 << 20
# A file without these words and without escaped letters, which could spell them, has no rule that adds anything.
_ADDING = re.compile(rb'"(?:Replace|Prepend|TemplateProcessing)"|\\u00[4-7]')


def tokenizer_fault(folder: Path) -> str | None:
    """Say which tokenizer file of a model's folder makes too much of a text; None if none does.

    Raises OSError or ValueError if one cannot be read.
    """
    for path in sorted(folder.glob("tokenizer*.json")):
        if not path.exists():  # a link to nothing
            continue
        data = read_bounded(path, max_bytes=_MAX_BYTES, within=link_root(folder))
        if not _ADDING.search(data):
            continue
        rules = parse_json(data)
        if not isinstance(rules, dict):
            continue
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            growth = 1.0
            for rule in _rules_in(rules.get(part)):
                growth *= _growth(rule)
                if growth > MAX_GROWTH:
                    return f"{path}: its {part} makes a text more than {MAX_GROWTH} times as long"
        if _added_tokens(rules.get("post_processor")) > MAX_ADDED_TOKENS:
            return f"{path}: its post_processor adds more than {MAX_ADDED_TOKENS} tokens to a text"
    return None


def _rules_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield each object in a value of JSON, and the value."""
    stack = [value]
    while stack:
        current = stack.pop()
        if isinstance(current, dict):
            yield current
            stack.extend(current.values())
        elif isinstance(current, list):
            stack.extend(current)


def _growth(rule: dict[str, Any]) -> float:
    """Return how many times as long a rule makes a text of a character at most."""
    if rule.get("type") == "Prepend":
        return 1 + len(str(rule.get("prepend", "")))
    if rule.get("type") != "Replace":
        return 1
    content = len(str(rule.get("content", "")))
    pattern = rule.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    return 1 + content  # a regular expression may match between two characters


def _added_tokens(processor: Any) -> int:
    count = 0
    for rule in _rules_in(processor):
        if rule.get("type") != "TemplateProcessing":
            continue
        pieces = [piece for name in ("single", "pair") for piece in _list(rule.get(name))]
        special = rule.get("special_tokens")
        ids = [len(_list(token.get("ids"))) for token in _rules_in(special) if "ids" in token]
        count += len(pieces) * max(ids, default=1)
    return count


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
