"""Bounds on the output of a tokenizer, whose file comes with a model and is untrusted.

The `tokenizers` library applies the rules of tokenizer.json without bounds of its own: thirty rules
that each write a character twice turn one character into a billion.
"""

from __future__ import annotations

import base64
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import Fault
from reinforce_rl.utils.untrusted_files import leads_out, link_root, parse_json, read_bounded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_GROWTH = 100  # factor by which rules may lengthen a text, in characters
MAX_ADDED_TOKENS = 100  # around a text
MAX_RULES = 1000  # per part; each takes a pass over every text
MAX_TOKEN_LENGTH = 10_000  # characters
_MAX_BYTES = 256 << 20
_FILE = "tokenizer.json"
# transformers loads one of the files that this key of tokenizer_config.json names, chosen by its
# own version.
_FILES = "fast_tokenizer_files"
# Keys of tokenizer_config.json whose paths transformers opens, even outside the folder, if there is
# no tokenizer.json.
_PATHS = ("vocab_file", "merges_file", "vocab", "merges", "gguf_file")
# Longest lists and objects. Loading takes 0.2 ms for each token of the first two, and quadratic
# time in the length of the last two.
_LONGEST = {
    "added_tokens": 200_000,
    "added_tokens_decoder": 200_000,
    "extra_special_tokens": 10_000,
    "additional_special_tokens": 10_000,
}
_MAX_KEYS = 10_000  # per file; each may name a special token
_ADDED_TOKENS_FILE = "added_tokens.json"  # its keys are tokens
_CLASS = "tokenizer_class"
# transformers accepts any of its class names as a tokenizer's class, so it could build a model or
# ask whether to run code of the folder. Of the names of this form only Auto and Rag are not
# tokenizers: they load others. Its backends SentencePiece and MistralCommon are not of the
# tokenizers library.
_CLASS_NAME = re.compile(
    r"(?!(?:Auto|Rag)Tokenizer)\w*Tokenizer(?:Fast)?"
    r"|(?:Tokenizers|Python)Backend"
)
_COMPOSED = "rag"  # the model_type of RagTokenizer
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")  # rules of a sequence
# These turn some characters into several, and a second rule would do it again.
_ONCE = ("ByteLevel", "BertNormalizer", "Precompiled")
_ADD_A_CHARACTER = ("Metaspace", "WordPiece")  # to each piece, which may be one character
# Tokens that a rule adds to a pair of texts.
_AROUND = {"BertProcessing": 3, "RobertaProcessing": 4}
_SHOWN = 200  # characters of a value in a message
_MAX_REPLACEMENT_BYTES = 100  # of a Precompiled rule; U+FDFA, the longest of NFKC, becomes 33 bytes


def tokenizer_fault(folder: Path) -> Fault | None:
    """Describe a tokenizer file of a model's folder that exceeds a bound or leads elsewhere.

    Returns None without one. Raises OSError or ValueError if a file cannot be read.
    """
    for path in sorted([*folder.glob("*token*.json"), folder / "config.json"]):
        if not path.exists():  # a broken link
            continue
        values = parse_json(read_bounded(path, max_bytes=_MAX_BYTES, within=link_root(folder)))
        if not isinstance(values, dict):
            continue
        fault = _fault_of_class(values)
        if path.name != "config.json":
            fault = fault or _fault_of_names(values, path) or _fault_of(values)
        if fault:
            return Fault(f"{path}: {fault}", key=fault.key)
    return None


def loaded_fault(tokenizer: Tokenizer) -> Fault | None:
    """Describe a bound that a loaded tokenizer exceeds; None if it exceeds none.

    Its rules may come from a file of another form, such as a SentencePiece model.
    """
    rules: dict[str, Any] = {}
    for part in _PARTS:
        rule: Any = getattr(tokenizer, part)
        if rule is not None:
            rules[part] = parse_json(rule.__getstate__())
    if fault := _fault_of(rules):
        return fault
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_TOKEN_LENGTH:
        return Fault(
            f"it has a token of {longest} characters; expected at most {MAX_TOKEN_LENGTH}",
            key="tokenizer.token.too_long",
        )
    return None


def _fault_of_class(values: dict[str, Any]) -> Fault | None:
    if values.get("model_type") == _COMPOSED:
        return Fault(
            f"model_type is {_COMPOSED!r}, whose tokenizer loads others; expected one tokenizer",
            key="tokenizer.model.several_tokenizers",
        )
    name = values.get(_CLASS)
    if name is None or (isinstance(name, str) and _CLASS_NAME.fullmatch(name)):
        return None
    return Fault(
        f"{_CLASS} is {str(name)[:_SHOWN]!r}; expected a tokenizer's class, such as LlamaTokenizer",
        key="tokenizer.class.unknown",
    )


def _fault_of_names(values: dict[str, Any], path: Path) -> Fault | None:
    """Describe a tokenizer file that names an unchecked file or has too many keys or tokens.

    Args:
        values: parsed JSON of `path`.
        path: one of the tokenizer's files.

    Returns:
        None if there is no fault.
    """
    folder = path.parent
    others = [str(name) for name in _list(values.get(_FILES)) if name != _FILE]
    if others:
        return Fault(
            f"{_FILES} names {others[0][:_SHOWN]}, which transformers may read in place of "
            f"{_FILE}; remove this key, or replace the other file by that one",
            key="tokenizer.file.not_the_checked_one",
        )
    for key in _PATHS:
        name = values.get(key)
        if isinstance(name, str) and not (folder / _FILE).is_file() and _is_outside(name, folder):
            return Fault(
                f"{key} is {name[:_SHOWN]!r}, a file outside of {folder}; expected one inside",
                key="tokenizer.file.outside",
            )
    bound = _LONGEST["added_tokens"] if path.name == _ADDED_TOKENS_FILE else _MAX_KEYS
    if len(values) > bound:
        return Fault(
            f"it has {len(values)} keys; expected at most {bound}",
            key="tokenizer.file.too_many_keys",
        )
    for key, longest in _LONGEST.items():
        tokens = values.get(key)
        if isinstance(tokens, list | dict) and len(tokens) > longest:
            return Fault(
                f"{key} has {len(tokens)} tokens; expected at most {longest}",
                key="tokenizer.file.too_many_tokens",
            )
    return None


def _is_outside(name: str, folder: Path) -> bool:
    try:
        return (folder / name).exists() and leads_out(folder / name, link_root(folder))
    except (OSError, ValueError, RuntimeError):
        # Not a path, or a loop of links: nothing can be opened there.
        return False


def _fault_of(rules: dict[str, Any]) -> Fault | None:
    for part in _PARTS:
        if fault := _fault_of_part(list(_rules_of(rules.get(part)))):
            return Fault(f"its {part} {fault}", key=fault.key)
    return None


def _fault_of_part(rules: list[dict[str, Any]]) -> Fault | None:
    if len(rules) > MAX_RULES:
        return Fault(
            f"has {len(rules)} rules; expected at most {MAX_RULES}",
            key="tokenizer.rules.too_many",
        )
    growth = 1.0
    added_tokens = 0
    counts = Counter(str(rule.get("type")) for rule in rules)
    for rule in rules:
        # Without a type, the library would guess it from the other keys.
        if not isinstance(rule.get("type"), str):
            return Fault("has a rule without a type", key="tokenizer.rules.no_type")
        if rule["type"] == "Precompiled" and _longest_replacement(rule) > _MAX_REPLACEMENT_BYTES:
            return Fault(
                f"makes more than {_MAX_REPLACEMENT_BYTES} bytes of a character",
                key="tokenizer.rules.long_replacement",
            )
        growth *= _growth(rule)
        added_tokens += _added_tokens(rule)
    if growth > MAX_GROWTH:
        return Fault(
            f"makes a text more than {MAX_GROWTH} times as long",
            key="tokenizer.rules.longer_text",
        )
    if added_tokens > MAX_ADDED_TOKENS:
        return Fault(
            f"adds more than {MAX_ADDED_TOKENS} tokens to a text",
            key="tokenizer.rules.added_tokens",
        )
    repeated = [kind for kind in _ONCE if counts[kind] > 1]
    if repeated:
        return Fault(
            f"has {repeated[0]} {counts[repeated[0]]} times; expected it once",
            key="tokenizer.rules.repeated",
        )
    return None


def _rules_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer, and the rules of its sequences at any depth."""
    if not isinstance(part, dict):
        return
    yield part
    for key in _LISTS:
        for rule in _list(part.get(key)):
            yield from _rules_of(rule)


def _growth(rule: dict[str, Any]) -> float:
    """Return the factor by which a rule may lengthen a text."""
    if rule["type"] == "Prepend":
        return 1 + len(str(rule.get("prepend", "")))
    if rule["type"] in _ADD_A_CHARACTER:
        return 2
    if rule["type"] != "Replace":
        return 1
    content = len(str(rule.get("content", "")))
    pattern = rule.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    # A regular expression may match before each character and at the end.
    return 1 + 2 * content


def _longest_replacement(rule: dict[str, Any]) -> int:
    """Return the number of bytes of the longest replacement in a SentencePiece table.

    The table holds the size of its trie, the trie, and texts that end in NUL.
    """
    table = base64.b64decode(str(rule.get("precompiled_charsmap", "")), validate=True)
    if len(table) < 4:
        return 0
    (trie_bytes,) = struct.unpack_from("<I", table)
    return max(map(len, table[4 + trie_bytes :].split(b"\0")))


def _added_tokens(rule: dict[str, Any]) -> int:
    if rule["type"] != "TemplateProcessing":
        return _AROUND.get(rule["type"], 0)
    pieces = [piece for name in ("single", "pair") for piece in _list(rule.get(name))]
    special = rule.get("special_tokens")
    tokens = special.values() if isinstance(special, dict) else ()
    ids = [len(_list(token.get("ids"))) for token in tokens if isinstance(token, dict)]
    return len(pieces) * max(ids, default=1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
