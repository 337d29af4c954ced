"""Prompt data sets from JSONL files, tokenised at load."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch.utils.data import Dataset

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.jsonl import (
    JsonLine,
    LineFaults,
    blending_weights,
    describe_type,
    read_jsonl,
    resolve_data_prefix,
)
from reinforce_rl.data.sampler import Blend
from reinforce_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TooLong = Literal["refuse", "skip"]
PROMPT_KEYS = ("prompt", "text", "messages")
ROLES = ("system", "user", "assistant", "tool")
TOKENISE_AT_ONCE = 1024  # lines; bounds the memory of a batch in the tokenizer


@dataclass(frozen=True)
class _Rendered:
    line: JsonLine
    text: str
    messages: tuple[dict[str, Any], ...]  # empty if no template rendered it


class PromptDataset(Dataset[Prompt]):
    """Prompts in file and line order; `dataset[i].id == i`.

    Args:
        skipped: number of over-long prompts left out at load.
        blend: draws of each file per epoch; None draws each prompt once.

    Raises:
        DataError: there is no prompt, or an id is not its index.
    """

    def __init__(self, prompts: Sequence[Prompt], *, skipped: int = 0, blend: Blend | None = None):
        if not prompts:
            left_out = f" ({skipped} over-long ones were skipped; raise model.encoder_seq_length)" if skipped else ""
            raise DataError(f"the data set holds no prompt{left_out}")
        for index, prompt in enumerate(prompts):
            if prompt.id != index:
                raise DataError(f"the prompt at index {index} has id {prompt.id}; expected {index}")
        self._prompts = list(prompts)
        self.skipped = skipped
        self.blend = blend
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the texts in order; detects a resume on other data."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for prompt in self._prompts:
                text = prompt.text.encode("utf-8")
                digest.update(len(text).to_bytes(8, "big"))  # length prefix, so that joined texts are unambiguous
                digest.update(text)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @classmethod
    def from_jsonl(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        files: str | Path | Iterable[str | Path],
        *,
        max_prompt_tokens: int | None,
        too_long: TooLong = "refuse",
        apply_chat_template: bool = False,
        add_bos: bool = False,
        weights: Sequence[float] | None = None,
    ) -> PromptDataset:
        """Load prompts from JSONL files.

        A line holds exactly one of `prompt` (string), `text` (string) and `messages` (a list of `{"role", "content"}`
        that does not end with an assistant's), rendered by the chat template with its generation prompt. All other
        fields become the prompt's metadata. Blank lines are ignored.

        Args:
            max_prompt_tokens: None for no limit.
            too_long: "refuse" raises for a longer prompt, "skip" drops it and counts it in `skipped`; none is cut.
            apply_chat_template: render a `prompt` or `text` as a single user message.
            add_bos: prepend the begin-of-sequence id to prompts that no chat template rendered, in `tokens` only.
            weights: one per file, see `Blend`; None draws each prompt once per epoch.

        Raises:
            ConfigError: an option is wrong or a file cannot be read.
            DataError: invalid lines (all counted, the first listed), or no prompt is left.
        """
        paths = [Path(files)] if isinstance(files, (str, Path)) else [Path(file) for file in files]
        _check_options(tokenizer, paths, max_prompt_tokens, too_long, add_bos)
        faults = LineFaults()
        rendered = []
        for path in paths:
            for line in read_jsonl(path):
                try:
                    rendered.append(_render(line, tokenizer, apply_chat_template))
                except _LineFault as fault:
                    faults.add(path, line.number, str(fault))

        prompts: list[Prompt] = []
        path_of: list[Path] = []
        skipped: list[tuple[JsonLine, int]] = []
        refused = False
        for item, tokens in zip(rendered, _tokenise(rendered, tokenizer, add_bos), strict=True):
            if not tokens:
                faults.add(item.line.path, item.line.number, "the tokenizer makes no token of this prompt")
            elif max_prompt_tokens is None or len(tokens) <= max_prompt_tokens:
                metadata = {key: value for key, value in _value(item.line).items() if key not in PROMPT_KEYS}
                prompts.append(Prompt(len(prompts), item.text, tokens, metadata, item.messages))
                path_of.append(item.line.path)
            elif too_long == "skip":
                skipped.append((item.line, len(tokens)))
            else:
                refused = True
                reason = (
                    f"prompt of {len(tokens)} tokens, more than the {max_prompt_tokens} that leave room for a response"
                )
                faults.add(item.line.path, item.line.number, reason)
        advice = "Correct or remove these lines."
        if refused:
            advice += (
                " For over-long prompts, raise model.encoder_seq_length, lower "
                "model.reinforce.length_params.max_length, or set model.data.too_long=skip to leave them out."
            )
        faults.raise_if_any(advice)
        if skipped:
            line, length = skipped[0]
            logger.warning(
                "skipped %d of %d prompts, longer than %s tokens; the first is %s:%d with %d tokens",
                *(len(skipped), len(rendered), max_prompt_tokens, line.path, line.number, length),
            )
        if not prompts and not skipped:
            raise DataError(f"no prompt in {', '.join(map(str, paths))}: every line is blank")
        if weights is None:
            return cls(prompts, skipped=len(skipped))
        sizes = Counter(path_of)
        blend = Blend(tuple(sizes[path] for path in paths), tuple(weights))
        return cls(prompts, skipped=len(skipped), blend=blend)


@dataclass(frozen=True)
class RLHFDatasets:
    """Data sets of a run; `validation` and `test` are None if not configured."""

    train: PromptDataset
    validation: PromptDataset | None = None
    test: PromptDataset | None = None


def build_train_valid_test_rlhf_datasets(
    tokenizer: PreTrainedTokenizerBase,
    data_prefix: Mapping[str, Any],
    *,
    max_prompt_tokens: int | None,
    too_long: TooLong = "refuse",
    apply_chat_template: bool = False,
    add_bos: bool = False,
) -> RLHFDatasets:
    """Load the train, validation and test prompts; other arguments as for `PromptDataset.from_jsonl`.

    Args:
        data_prefix: a path or list of paths for train, validation and test; the last two are optional. Train may have
            a weight before each path.

    Raises:
        ConfigError: keys or files are wrong; all faults together, before any file is read.
        DataError: as `PromptDataset.from_jsonl`, for all splits together.
    """
    files, weights = resolve_data_prefix(data_prefix), blending_weights(data_prefix)
    datasets: dict[str, PromptDataset] = {}
    errors: list[DataError] = []
    for split, paths in files.items():
        if not paths:
            continue
        try:
            datasets[split] = PromptDataset.from_jsonl(
                tokenizer,
                paths,
                max_prompt_tokens=max_prompt_tokens,
                too_long=too_long,
                apply_chat_template=apply_chat_template,
                add_bos=add_bos,
                weights=weights if split == "train" else None,
            )
        except DataError as error:  # the next split may have faults of its own
            errors.append(error)
    if errors:
        raise DataError("\n".join(map(str, errors)))
    return RLHFDatasets(datasets["train"], datasets.get("validation"), datasets.get("test"))


class _LineFault(Exception):
    """A line that cannot become a prompt; only raised and caught in this file."""


def _check_options(
    tokenizer: PreTrainedTokenizerBase,
    paths: list[Path],
    max_prompt_tokens: int | None,
    too_long: str,
    add_bos: bool,
) -> None:
    faults = [f"prompt file {path} does not exist" for path in paths if not path.is_file()]
    if not paths:
        faults.append("no prompt file is given; expected one or more JSONL files")
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        faults.append(f"max_prompt_tokens is {max_prompt_tokens}; expected at least 1, or null for no limit")
    if too_long not in ("refuse", "skip"):
        faults.append(f"too_long is {too_long!r}; expected refuse or skip")
    if add_bos and tokenizer.bos_token_id is None:
        faults.append("add_bos is true, but the tokenizer has no begin-of-sequence token; set add_bos=false")
    if faults:
        raise ConfigError(faults)


def _value(line: JsonLine) -> dict[str, Any]:
    if line.value is None:
        raise _LineFault(line.fault)
    return line.value


def _render(line: JsonLine, tokenizer: PreTrainedTokenizerBase, apply_chat_template: bool) -> _Rendered:
    value = _value(line)
    keys = [key for key in PROMPT_KEYS if key in value]
    if len(keys) != 1:
        found = " and ".join(keys or value) or "no key"
        raise _LineFault(f"found {found}; expected exactly one of prompt, text and messages")
    content = value[keys[0]]
    if keys[0] == "messages":
        messages = _check_messages(content)
    else:
        if not isinstance(content, str):
            hint = "; a conversation belongs under messages" if isinstance(content, list) else ""
            raise _LineFault(f"{keys[0]} is {describe_type(content)}, expected a string{hint}")
        if not content.strip():
            raise _LineFault(f"{keys[0]} is empty")
        messages = [{"role": "user", "content": content}] if apply_chat_template else None
    text = content if messages is None else _apply_template(messages, tokenizer)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _LineFault(f"{keys[0]} holds half of a surrogate pair ({error.object[error.start]!r})") from error
    return _Rendered(line, text, tuple(messages or ()))


def _check_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise _LineFault(f"messages is {describe_type(messages)}, expected a list")
    if not messages:
        raise _LineFault("messages is empty")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _LineFault(f"messages[{index}] is {describe_type(message)}, expected an object")
        if message.get("role") not in ROLES:
            raise _LineFault(f"messages[{index}].role is {message.get('role')!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise _LineFault(
                f"messages[{index}].content is {describe_type(message.get('content'))}, expected a string"
            )
    if messages[-1]["role"] == "assistant":
        raise _LineFault("messages ends with an assistant message; a prompt ends where the assistant shall answer")
    if not messages[-1]["content"].strip():
        raise _LineFault("the last message is empty")
    return messages


def _apply_template(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError(
            [
                f"the tokenizer of {tokenizer.name_or_path} has no chat template, which messages and model.data."
                "apply_chat_template=true need; take the folder of a chat model, or plain prompts without it"
            ]
        )
    try:
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:  # e.g. a template that requires alternating roles
        raise _LineFault(f"the chat template refuses these messages: {error}") from error


def _tokenise(
    rendered: list[_Rendered], tokenizer: PreTrainedTokenizerBase, add_bos: bool
) -> Iterable[tuple[int, ...]]:
    bos = tokenizer.bos_token_id
    for start in range(0, len(rendered), TOKENISE_AT_ONCE):
        items = rendered[start : start + TOKENISE_AT_ONCE]
        # Not verbose: transformers would warn about its own length limit; the caller checks ours.
        encoded = tokenizer([item.text for item in items], add_special_tokens=False, verbose=False)
        for item, ids in zip(items, cast("list[list[int]]", encoded["input_ids"]), strict=True):
            if add_bos and not item.messages and ids[:1] != [bos]:
                ids = [bos, *ids]
            yield tuple(ids)
