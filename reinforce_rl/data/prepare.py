"""Prompt files made from preference pairs or conversations."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reinforce_rl.data.conversation import KWARGS_KEY, TOOLS_KEY
from reinforce_rl.data.data_prefix import SPLITS
from reinforce_rl.data.jsonl import (
    HH_NAMES,
    ROLES,
    LineFaults,
    Record,
    check_messages,
    check_text,
    messages_of_json,
    messages_of_text,
    parse_hh_conversation,
    prompt_key,
    refuse_messages_as_text,
    render_hh_prompt,
    text_of,
    write_jsonl,
)
from reinforce_rl.data.nemo_aligner import (
    is_nemo_text,
    messages_of_chat,
    parse_nemo_text,
    with_system,
)
from reinforce_rl.data.readers import AS_NAMED, ColumnMissing, Columns, files_of, read_records
from reinforce_rl.errors import DataError

_Row = dict[str, Any]
_Messages = list[dict[str, Any]]
_PROMPT_KEYS = ("prompt", "text", "messages", "conversations", "chosen", "rejected")


@dataclass(frozen=True)
class PrepareOptions:
    # "messages" writes `{"messages": [...]}`, "prompt" writes `{"prompt": ...}` in the HH form.
    form: Literal["messages", "prompt"] = "messages"
    num_validation: int | None = None  # at least 1; None uses `validation_fraction` instead
    validation_fraction: float = 0.1  # of the kept prompts; at least one prompt
    seed: int = 0  # of the draw of validation prompts, and of the prompts that `limit` keeps
    max_turns: int | None = None  # user turns of a prompt
    max_characters: int | None = None  # of a prompt, over all its turns
    limit: int | None = None  # prompts to keep in total, drawn by the seed


@dataclass(frozen=True)
class PrepareCounts:
    """Counts of the lines read: `read == train + validation + sum(skipped.values())`."""

    read: int
    train: int
    validation: int
    skipped: dict[str, int]

    def __str__(self) -> str:
        lines = [
            f"read {self.read}, kept {self.train + self.validation}, "
            f"skipped {sum(self.skipped.values())}"
        ]
        lines += [f"  skipped {count}: {reason}" for reason, count in self.skipped.items()]
        return "\n".join([*lines, f"  train {self.train}, validation {self.validation}"])


def prepare_prompts(
    inputs: Iterable[str | Path],
    output: str | Path,
    options: PrepareOptions,
    columns: Columns = AS_NAMED,
) -> PrepareCounts:
    """Read pairs or conversations and write `train.jsonl` and `validation.jsonl` into `output`.

    A record holds `prompt` or `text`, or `messages` or `conversations`, or `chosen` and `rejected`.
    A value is an HH string, NeMo-Aligner's text, or a list of messages; a prompt may be any other
    string, which becomes one user message. Except in a prompt, the last assistant turn is the
    answer and is dropped. `system` beside `conversations`, or named by `columns`, becomes a system
    message. Other fields are kept. Of prompts that are equal up to case and white space, the first
    is kept.

    Raises:
        DataError: a file cannot be read or written, lines are invalid (all are counted, the first
            are listed), or there are too few prompts.
    """
    paths = list(map(Path, inputs))
    targets = [Path(output) / f"{name}.jsonl" for name in SPLITS[:2]]
    for file in (file for path in paths for file in files_of(path)):
        if file.resolve() in [target.resolve() for target in targets]:
            raise DataError(
                f"{file} is both read and written; choose another output folder",
                key="prepare.output.is_an_input",
            )
    skipped: Counter[str] = Counter()
    kept: dict[str, _Row] = {}  # rows to write, by `prompt_key`

    def keep(line: Record) -> None:
        messages, reason = _prompt_of(line.value, columns)
        reason = reason or _unfit(messages, options)
        # A chat template renders these too, so prompts that differ in them are not equal.
        others = [message.get("tool_calls") for message in messages]
        others += [line.value.get(name) for name in (TOOLS_KEY, KWARGS_KEY)]
        key = prompt_key(messages) + json.dumps(others, default=str)
        if reason or key in kept:
            skipped[reason or "duplicate of an earlier prompt"] += 1
            return
        prompt = (
            {"messages": messages}
            if options.form == "messages"
            else {"prompt": render_hh_prompt(messages)}
        )
        read_keys = (
            (*_PROMPT_KEYS, "system", "mask") if _has_system(line.value, columns) else _PROMPT_KEYS
        )
        kept[key] = {
            **prompt,
            **{name: item for name, item in line.value.items() if name not in read_keys},
        }

    faults = LineFaults()
    read = sum(1 for path in paths for _ in read_records(path, keep, faults, columns))
    faults.raise_if_any("Correct or remove these lines. Nothing was written.")
    splits = _split(list(kept.values()), options)
    train, validation = map(len, splits)
    if len(kept) > train + validation:
        skipped["over --limit"] = len(kept) - train - validation
    write_jsonl(dict(zip(targets, splits, strict=True)))
    return PrepareCounts(read, train, validation, dict(skipped.most_common()))


def _prompt_of(value: dict[str, Any], columns: Columns) -> tuple[_Messages, str]:
    """Return the messages up to the answer, and the reason to skip them; "" to keep them."""
    messages, reason = _messages_of(value)
    if _has_system(value, columns):
        messages = with_system(messages, value.get("system"))
    return messages, reason


def _has_system(value: dict[str, Any], columns: Columns) -> bool:
    is_sharegpt = value.get("conversations") is not None and value.get("messages") is None
    return "system" in columns.names or is_sharegpt


def _messages_of(record: dict[str, Any]) -> tuple[_Messages, str]:
    # Null means no prompt: data sets that were joined have every column in every record.
    value = {
        key: item for key, item in record.items() if item is not None or key not in _PROMPT_KEYS
    }
    for key in ("prompt", "text"):
        if key in value:
            if key == "prompt":
                advice = (
                    "messages are read with --field messages=prompt, "
                    "a plain text with --field text=prompt"
                )
                refuse_messages_as_text(value[key], key, advice)
            messages = _conversation(value[key], key, messages_of_text)
            if is_nemo_text(value[key]):  # `text` may be a prompt, or a whole conversation
                messages = _without_answer(messages)
            return messages, _turns_fault(value[key], messages)
    for key in ("messages", "conversations"):
        if key == "conversations" and key in value and "mask" in value:
            turns = messages_of_chat(value)
            plain = [{"role": turn["role"], "content": turn["content"].strip()} for turn in turns]
            return _without_answer(plain), ""
        if key in value:
            conversation = messages_of_json(value[key], key)
            messages = _without_answer(_conversation(conversation, key, parse_hh_conversation))
            return messages, _turns_fault(conversation, messages)
    if "chosen" in value and "rejected" in value:
        sides = {key: messages_of_json(value[key], key) for key in ("chosen", "rejected")}
        chosen, rejected = (
            _without_answer(_conversation(side, key, parse_hh_conversation))
            for key, side in sides.items()
        )
        if chosen != rejected:
            return chosen, "chosen and rejected answer different prompts"
        return chosen, _turns_fault(sides["chosen"], chosen)
    present = [key for key in _PROMPT_KEYS if key in record]
    if present:
        raise DataError(
            f"null in {' and '.join(present)}; expected a prompt in one of them",
            key="data.prompt.null",
        )
    raise ColumnMissing(value, "prompt, text, messages, or chosen and rejected", "--field prompt")


def _conversation(value: object, key: str, read_text: Callable[[str], Sequence[Any]]) -> _Messages:
    if not isinstance(value, str):
        messages = check_messages(value, key, ROLES, texts_only=False)
        return [_stripped(message) for message in messages]
    check_text(value, key)
    try:
        return list(parse_nemo_text(value) if is_nemo_text(value) else read_text(value))
    except DataError as error:
        raise DataError(f"{key}: {error}", key=error.key) from error


def _stripped(message: dict[str, Any]) -> dict[str, Any]:
    """Drop white space around a text. Lists of parts, and null beside tool calls, are kept."""
    content = message.get("content")
    return {**message, "content": content.strip()} if isinstance(content, str) else message


def _without_answer(messages: _Messages) -> _Messages:
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def _turns_fault(value: object, messages: _Messages) -> str:
    """Describe what is wrong with turns that come from one text; "" if nothing is.

    The text of a turn may contain the markers of turns.
    """
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if isinstance(value, str) and any(
        role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)
    ):
        return "user and assistant do not take turns"
    return ""


def _unfit(messages: _Messages, options: PrepareOptions) -> str:
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] == "assistant":
        return "nothing to answer at the end"
    if options.form == "prompt" and any(
        message["role"] not in HH_NAMES or message.get("tool_calls") for message in messages
    ):
        return "turns other than Human and Assistant, which --format messages keeps"
    for message in messages:
        # An assistant's turn may be only a call, a tool may return nothing, and an empty system
        # message is intended.
        may_be_empty = message["role"] in ("system", "tool") or message.get("tool_calls")
        if not text_of(message).strip() and not may_be_empty:
            return "a turn is empty"
    if not text_of(messages[-1]).strip() and messages[-1]["role"] != "tool":
        return "a turn is empty"
    if options.max_turns is not None and roles.count("user") > options.max_turns:
        return "more than --max-turns user turns"
    characters = sum(len(text_of(message)) for message in messages)
    if options.max_characters is not None and characters > options.max_characters:
        return "more than --max-characters characters"
    return ""


def _split(rows: list[_Row], options: PrepareOptions) -> tuple[list[_Row], list[_Row]]:
    """Return the rows of training and of validation, each in the order of `rows`."""
    order = list(range(len(rows)))
    random.Random(options.seed).shuffle(order)
    order = order[: options.limit]
    wanted = options.num_validation or max(1, round(len(order) * options.validation_fraction))
    if wanted >= len(order):
        raise DataError(
            f"{len(order)} prompts are left after filtering; expected more than the {wanted} of "
            "validation, as training needs at least one. Nothing was written. Loosen the filters "
            "or lower --num-validation",
            key="prepare.prompts.too_few",
        )
    validation = sorted(order[:wanted])
    train = sorted(order[wanted:])
    return [rows[i] for i in train], [rows[i] for i in validation]
