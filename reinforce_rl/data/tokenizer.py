"""Load a tokenizer, and fingerprint it so that actor and reward server can compare theirs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reinforce_rl.data.tokenizer_bounds import loaded_fault, tokenizer_fault
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.untrusted_files import (
    UnreadableFileError,
    check_model_files,
    read_model_json,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEEDS_CODE = "trust_remote_code"  # part of transformers' messages about a folder with code
# A panic of the tokenizers library, which is written in Rust. It is not an Exception.
_PANIC = "PanicException"


@dataclass(frozen=True)
class TokenizerInfo:
    """Fingerprint of a tokenizer. Token ids may be exchanged only between equal tokenizers."""

    vocab_size: int  # added tokens included
    vocab_sha256: str  # over all (token, id) pairs
    eos_id: int | None
    # None without a template. Not part of `differences`: only token ids are exchanged, not rendered
    # text.
    chat_template_sha256: str | None

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerInfo:
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        template = getattr(tokenizer, "chat_template", None)
        return cls(
            vocab_size=len(tokenizer),
            vocab_sha256=hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
            eos_id=token_id(tokenizer.eos_token_id),
            chat_template_sha256=hashlib.sha256(template.encode()).hexdigest()
            if isinstance(template, str)
            else None,
        )

    def differences(self, other: TokenizerInfo) -> list[str]:
        """Return a sentence per difference that changes the meaning of token ids."""
        values = (
            ("vocabulary size", self.vocab_size, other.vocab_size),
            ("vocabulary hash", self.vocab_sha256, other.vocab_sha256),
            ("end-of-sequence id", self.eos_id, other.eos_id),
        )
        different = [
            (name, str(ours), str(theirs)) for name, ours, theirs in values if ours != theirs
        ]
        return [f"{name} {ours[:12]} here, {theirs[:12]} there" for name, ours, theirs in different]


def token_id(value: object) -> int | None:
    """Narrow a tokenizer's special id, which transformers types as almost anything, to an int."""
    return value if isinstance(value, int) else None


def decode_all(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    *,
    skip_special_tokens: bool = False,
) -> list[str]:
    """Return the text of each row of token ids, with every space of the tokens.

    A folder's `clean_up_tokenization_spaces`, which is made for WordPiece and set by Llama 3, would
    turn "x != y" into "x!= y".
    """
    if not rows:  # transformers would return one text
        return []
    texts = tokenizer.batch_decode(
        [list(row) for row in rows],
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return [str(text) for text in texts]


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts and add no special tokens."""
    # With `verbose`, transformers would warn about its own length limit. Callers check theirs.
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    return cast("list[list[int]]", encoded["input_ids"])


def encode_plain(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_bos: bool | None = None
) -> list[list[int]]:
    """Tokenise prompts that were not rendered by a chat template.

    Args:
        add_bos: begin with the begin-of-sequence token. None does what `tokenizer(text)` does.
            There is never a second begin-of-sequence token, and no end-of-sequence token, since
            nothing would follow it.
    """
    rows = encode_all(tokenizer, texts)
    prefix = _prefix(tokenizer) if add_bos is None else []
    if add_bos:
        prefix = [cast(int, tokenizer.bos_token_id)]
    return [ids if ids[: len(prefix)] == prefix else [*prefix, *ids] for ids in rows]


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that a tokenizer adds before every text."""
    encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
    ids = cast("list[int]", encoded["input_ids"])
    mask = cast("list[int]", encoded["special_tokens_mask"])
    count = next((index for index, is_special in enumerate(mask) if not is_special), 0)
    return list(ids[:count])


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding id; 0 without a pad token, as padding is never read."""
    return token_id(tokenizer.pad_token_id) or 0


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local Hugging Face folder.

    It is never loaded from a hub, and code in the folder is never run.

    Raises:
        ConfigError: the folder is missing or holds no tokenizer, a file of it is not a regular file
            of this folder, or the tokenizer needs code of its own or makes a text many times as
            long.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):  # Path.is_dir would raise if the path may not be read
        sentence = f"tokenizer folder {folder} does not exist; expected a Hugging Face model folder"
        raise ConfigError([Fault(sentence, key="tokenizer.folder.missing")])
    try:
        check_model_files(folder)
        fault = tokenizer_fault(folder)
        names = _names_of_config(folder)
    except UnreadableFileError as error:
        raise ConfigError([Fault(str(error), key=error.key)]) from error
    except OSError as error:
        raise ConfigError([Fault(str(error), key="tokenizer.file.unreadable")]) from error
    except ValueError as error:
        sentence = f"{folder} holds no tokenizer: {error}"
        raise ConfigError([Fault(sentence, key="tokenizer.file.invalid")]) from error
    if fault:
        raise ConfigError([Fault(f"{fault}; it is not used", key=fault.key)])
    try:
        tokenizer = _from_pretrained(folder, names)
    except BaseException as error:  # transformers' errors vary
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise ConfigError([_loading_fault(folder, str(error))]) from error
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        sentence = (
            f"the tokenizer in {folder} is a {type(tokenizer).__name__}, whose rules cannot be "
            "checked; expected one of the tokenizers library, which tokenizer.json holds"
        )
        raise ConfigError([Fault(sentence, key="tokenizer.rules.not_known")])
    try:
        fault = loaded_fault(backend)
    except ValueError as error:
        sentence = f"the rules of the tokenizer in {folder} cannot be checked: {error}"
        raise ConfigError([Fault(sentence, key="tokenizer.rules.unreadable")]) from error
    if fault:
        sentence = f"the tokenizer in {folder}: {fault}; it is not used"
        raise ConfigError([Fault(sentence, key=fault.key)])
    return tokenizer


def _loading_fault(folder: Path, reason: str) -> Fault:
    """Describe why transformers cannot load a tokenizer, from the message of its error."""
    if _NEEDS_CODE in reason:
        return Fault(
            f"{folder} holds a tokenizer that needs custom code (auto_map), which is not executed; "
            "expected a tokenizer class of transformers",
            key="tokenizer.folder.needs_code",
        )
    return Fault(
        f"{folder} holds no tokenizer that transformers can load: {reason}",
        key="tokenizer.folder.not_loadable",
    )


def _names_of_config(folder: Path) -> dict[str, str]:
    """Return the names in config.json that choose a tokenizer's class; empty without the file.

    Raises OSError or ValueError if the file cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        return {}
    values = read_model_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    chosen = {key: values.get(key) for key in ("model_type", "tokenizer_class")}
    return {key: value for key, value in chosen.items() if isinstance(value, str)}


def _from_pretrained(folder: Path, names: dict[str, str]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer would read config.json, follow it to another file, and make lists as long as the
    # file says. Version 4 still does so afterwards if tokenizer_config.json names no class.
    config = _config_class(names.get("model_type", ""))(name_or_path=str(folder), **names)
    try:
        return AutoTokenizer.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
        )
    except ValueError as error:
        if "TokenizersBackend" not in str(error):  # the name of the class below in version 5
            raise
        return PreTrainedTokenizerFast.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


def _config_class(model_type: str) -> Any:
    """Return the configuration class by which AutoTokenizer chooses the tokenizer's class."""
    from transformers import CONFIG_MAPPING, TOKENIZER_MAPPING, PretrainedConfig

    # `get` would read the mapping's base dictionary, which stays empty.
    if model_type not in CONFIG_MAPPING:
        return PretrainedConfig
    config_class = CONFIG_MAPPING[model_type]
    # A few models without a tokenizer ask the hub for a part of their configuration.
    return config_class if config_class in TOKENIZER_MAPPING else PretrainedConfig
