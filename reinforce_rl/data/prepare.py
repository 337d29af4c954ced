"""Prompt files made from preference pairs or conversations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reinforce_rl.data.data_prefix import SPLITS
from reinforce_rl.data.jsonl import (
    HH_NAMES,
    LineFaults,
    Message,
    Record,
    check_messages,
    check_text,
    messages_of_text,
    parse_hh_conversation,
    prompt_key,
    render_hh_prompt,
    write_jsonl,
)
from reinforce_rl.data.readers import AS_NAMED, ColumnMissing, Columns, files_of, read_records
from reinforce_rl.errors import DataError

_Row = dict[str, Any]
_PROMPT_KEYS = ("prompt", "text", "messages", "conversations", "chosen", "rejected")


@dataclass(frozen=True)
class PrepareOptions:
    # "messages" writes `{"messages": [...]}`, "prompt" writes `{"prompt": ...}` in the HH form.
    form: Literal["messages", "prompt"] = "messages"
    num_validation: int | None = None  # at least 1; None takes `validation_fraction` instead
    validation_fraction: float = 0.1  # of the kept prompts; at least one prompt
    seed: int = 0  # draws the validation prompts, and those that `limit` keeps
    max_turns: int | None = None  # user turns of a prompt
    max_characters: int | None = None  # of a prompt, over all its turns
    limit: int | None = None  # prompts to keep in all, drawn by the seed


@dataclass(frozen=True)
class PrepareCounts:
    """Counts of the lines read: `read == train + validation + sum(skipped.values())`."""

    read: int
    train: int
    validation: int
    skipped: dict[str, int]

    def __str__(self) -> str:
        lines = [f"read {self.read}, kept {self.train + self.validation}, skipped {sum(self.skipped.values())}"]
        lines += [f"  skipped {count}: {reason}" for reason, count in self.skipped.items()]
        return "\n".join([*lines, f"  train {self.train}, validation {self.validation}"])


def prepare_prompts(
    inputs: Iterable[str | Path], output: str | Path, options: PrepareOptions, columns: Columns = AS_NAMED
) -> PrepareCounts:
    """Read pairs or conversations and write `train.jsonl` and `validation.jsonl` into `output`.

    A record holds `prompt` or `text`, or `messages` or `conversations`, or `chosen` and `rejected`; a value is an HH
    string or a list of messages, and a prompt may be any other string, taken as one user message. The last assistant
    turn of `messages`, `chosen` and `rejected` is the answer and is dropped. Other fields are kept. Of prompts that
    are equal up to case and white space, the first is kept.

    Raises:
        DataError: a file cannot be read or written, invalid lines (all counted, the first listed), or too few prompts.
    """
    paths, targets = list(map(Path, inputs)), [Path(output) / f"{name}.jsonl" for name in SPLITS[:2]]
    for file in (file for path in paths for file in files_of(path)):
        if file.resolve() in [target.resolve() for target in targets]:
            raise DataError(f"{file} is both read and written; choose another output folder")
    skipped: Counter[str] = Counter()
    kept: dict[str, _Row] = {}  # rows to write, by `prompt_key`

    def keep(line: Record) -> None:
        messages, reason = _prompt_of(line.value)
        reason = reason or _unfit(messages, options)
        key = prompt_key(messages)
        if reason or key in kept:
            skipped[reason or "duplicate of an earlier prompt"] += 1
            return
        prompt = {"messages": messages} if options.form == "messages" else {"prompt": render_hh_prompt(messages)}
        kept[key] = {**prompt, **{name: item for name, item in line.value.items() if name not in _PROMPT_KEYS}}

    faults = LineFaults()
    read = sum(1 for path in paths for _ in read_records(path, keep, faults, columns))
    faults.raise_if_any("Correct or remove these lines. Nothing was written.")
    splits = _split(list(kept.values()), options)
    train, validation = map(len, splits)
    if len(kept) > train + validation:
        skipped["over --limit"] = len(kept) - train - validation
    write_jsonl(dict(zip(targets, splits, strict=True)))
    return PrepareCounts(read, train, validation, dict(skipped.most_common()))


def _prompt_of(value: dict[str, Any]) -> tuple[list[Message], str]:
    for key in ("prompt", "text"):
        if key in value:
            return _conversation(value[key], key, messages_of_text), ""
    for key in ("messages", "conversations"):
        if key in value:
            return _without_answer(value, key), ""
    if "chosen" in value and "rejected" in value:
        chosen, rejected = (_without_answer(value, key) for key in ("chosen", "rejected"))
        return chosen, "" if chosen == rejected else "chosen and rejected answer different prompts"
    raise ColumnMissing(value, "prompt, text, messages, or chosen and rejected", "--field prompt")


def _conversation(value: object, key: str, read_text: Callable[[str], list[Message]]) -> list[Message]:
    if not isinstance(value, str):
        messages = check_messages(value, key, tuple(HH_NAMES))
        return [{"role": message["role"], "content": message["content"].strip()} for message in messages]
    check_text(value, key)
    try:
        return read_text(value)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def _without_answer(value: dict[str, Any], key: str) -> list[Message]:
    messages = _conversation(value[key], key, parse_hh_conversation)
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def _unfit(messages: list[Message], options: PrepareOptions) -> str:
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "user":
        return "no user turn at the end"
    if any(role != ("user", "assistant")[index % 2] for index, role in enumerate(roles)):
        return "user and assistant do not take turns"
    if not all(message["content"] for message in messages):
        return "a turn is empty"
    if options.max_turns is not None and roles.count("user") > options.max_turns:
        return "more than --max-turns user turns"
    characters = sum(len(message["content"]) for message in messages)
    if options.max_characters is not None and characters > options.max_characters:
        return "more than --max-characters characters"
    return ""


def _split(rows: list[_Row], options: PrepareOptions) -> tuple[list[_Row], list[_Row]]:
    """Return the rows of training and of validation, in order."""
    order = list(range(len(rows)))
    random.Random(options.seed).shuffle(order)
    order = order[: options.limit]
    wanted = options.num_validation or max(1, round(len(order) * options.validation_fraction))
    if wanted >= len(order):
        raise DataError(
            f"{len(order)} prompts are left after filtering, too few for {wanted} of validation and at least one of "
            "training; nothing was written. Loosen the filters or lower --num-validation"
        )
    validation, train = sorted(order[:wanted]), sorted(order[wanted:])
    return [rows[i] for i in train], [rows[i] for i in validation]
