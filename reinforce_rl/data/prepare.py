"""Make prompt-only train and validation files from preference pairs or conversations, in HH form or as messages.

HH form is one string: "\\n\\nHuman: ...\\n\\nAssistant: ...\\n\\nHuman: ...\\n\\nAssistant:".
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reinforce_rl.data.jsonl import LineFaults, describe_type, read_jsonl, write_jsonl_files
from reinforce_rl.errors import ConfigError, DataError

Message = dict[str, str]
Kept = tuple[list[Message], dict[str, Any]]  # and the line's other fields
_PROMPT_KEYS = ("prompt", "text", "messages", "chosen", "rejected")

_HH_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_HH_NAMES = {role: name for name, role in _HH_ROLES.items()}

SKIP_DUPLICATE = "duplicate of an earlier prompt"
SKIP_DIFFERENT = "chosen and rejected answer different prompts"
SKIP_EMPTY_TURN = "a turn is empty"
SKIP_NOT_ALTERNATING = "user and assistant do not take turns"
SKIP_NO_QUESTION = "no user turn at the end"
SKIP_TURNS = "more than --max-turns user turns"
SKIP_CHARACTERS = "more than --max-characters characters"
SKIP_LIMIT = "over --limit"


@dataclass(frozen=True)
class PrepareOptions:
    # "messages" writes `{"messages": [...]}`, "prompt" writes `{"prompt": ...}` in the HH form.
    form: Literal["messages", "prompt"] = "messages"
    num_validation: int | None = None  # None takes `validation_fraction` instead
    validation_fraction: float = 0.1  # of the kept prompts, in (0, 1); at least one prompt
    seed: int = 0  # draws the validation prompts, and those that `limit` keeps
    max_turns: int | None = None  # user turns of a prompt
    max_characters: int | None = None  # of a prompt, over all its turns
    limit: int | None = None  # prompts to keep in all, drawn by the seed

    def __post_init__(self) -> None:
        faults = []
        if self.form not in ("messages", "prompt"):
            faults.append(f"form is {self.form!r}; expected messages or prompt")
        if not 0 < self.validation_fraction < 1:
            faults.append(f"validation_fraction is {self.validation_fraction}; expected above 0 and below 1")
        for name in ("num_validation", "max_turns", "max_characters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name} is {value}; expected at least 1")
        if self.limit is not None and self.limit < 2:
            faults.append(f"limit is {self.limit}; expected at least 2, one prompt for each file")
        if faults:
            raise ConfigError(faults)


@dataclass(frozen=True)
class PrepareCounts:
    """Counts of the lines read: `read == train + validation + sum(skipped.values())`."""

    read: int
    train: int
    validation: int
    skipped: dict[str, int]

    def __str__(self) -> str:
        skipped = sum(self.skipped.values())
        lines = [f"read {self.read}, kept {self.train + self.validation}, skipped {skipped}"]
        lines += [f"  skipped {count}: {reason}" for reason, count in self.skipped.items()]
        return "\n".join([*lines, f"  train {self.train}, validation {self.validation}"])


def parse_hh_conversation(text: str) -> list[Message]:
    """Split an HH conversation into messages with roles "user" and "assistant", contents stripped.

    An open "Assistant:" at the end gives no message. Repeated roles and empty turns stay as they are.

    Raises:
        DataError: the text does not begin with "Human:" or "Assistant:".
    """
    markers = list(_HH_MARKER.finditer(text))
    if not markers or markers[0].start() != 0:
        raise DataError(f"expected a conversation that begins with '\\n\\nHuman:', found {text[:40]!r}")
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    messages = [
        {"role": _HH_ROLES[marker.group(1)], "content": text[marker.end() : end].strip()}
        for marker, end in zip(markers, ends, strict=True)
    ]
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return messages


def messages_of_text(text: str) -> list[Message]:
    """Parse an HH prompt, or return any other text as one user message."""
    if text.lstrip().startswith("Human:"):
        return parse_hh_conversation(text)
    return [{"role": "user", "content": text.strip()}]


def render_hh_prompt(messages: list[Message]) -> str:
    """Inverse of `parse_hh_conversation` for a prompt; ends with the open "Assistant:"."""
    turns = [f"\n\n{_HH_NAMES[message['role']]}: {message['content']}" for message in messages]
    return "".join(turns) + "\n\nAssistant:"


def prepare_prompts(inputs: Iterable[str | Path], output: str | Path, options: PrepareOptions) -> PrepareCounts:
    """Read pairs or conversations and write `train.jsonl` and `validation.jsonl` into `output`.

    A line holds `prompt` or `text`, or `chosen` and `rejected`, or `messages`; a value is an HH string or a list of
    messages, and a prompt may be any other string, taken as one user message. The last assistant turn of `chosen` and
    `rejected` is the answer and is dropped. Other fields are kept. Of prompts that are equal up to case and white
    space, the first is kept.

    Raises:
        ConfigError: a file cannot be read or written.
        DataError: invalid lines (all counted, the first listed), or too few prompts for two files.
    """
    paths = [Path(path) for path in inputs]
    targets = {name: Path(output) / f"{name}.jsonl" for name in ("train", "validation")}
    overwritten = [path for path in paths if path.resolve() in {target.resolve() for target in targets.values()}]
    if overwritten:
        raise ConfigError([f"{path} is both read and written; choose another output folder" for path in overwritten])

    faults = LineFaults()
    skipped: Counter[str] = Counter()
    kept: dict[tuple[tuple[str, str], ...], Kept] = {}
    read = 0
    for path in paths:
        for line in read_jsonl(path):
            read += 1
            if line.value is None:
                faults.add(path, line.number, line.fault)
                continue
            try:
                messages, reason = _prompt_of(line.value)
            except DataError as error:
                faults.add(path, line.number, str(error))
                continue
            reason = reason or _unfit(messages, options)
            key = tuple((message["role"], " ".join(message["content"].casefold().split())) for message in messages)
            if not reason and key in kept:
                reason = SKIP_DUPLICATE
            if reason:
                skipped[reason] += 1
            else:
                kept[key] = messages, {name: item for name, item in line.value.items() if name not in _PROMPT_KEYS}
    faults.raise_if_any("Correct or remove these lines. Nothing was written.")

    train, validation = _split(list(kept.values()), options)
    if len(kept) > len(train) + len(validation):
        skipped[SKIP_LIMIT] = len(kept) - len(train) - len(validation)
    write_jsonl_files(
        {
            targets["train"]: [_row(*prompt, options.form) for prompt in train],
            targets["validation"]: [_row(*prompt, options.form) for prompt in validation],
        }
    )
    return PrepareCounts(read, len(train), len(validation), dict(skipped.most_common()))


def _row(messages: list[Message], others: dict[str, Any], form: str) -> dict[str, Any]:
    return {"messages": messages, **others} if form == "messages" else {"prompt": render_hh_prompt(messages), **others}


def _prompt_of(value: dict[str, Any]) -> tuple[list[Message], str]:
    for key in ("prompt", "text"):
        if key in value:
            return _conversation(value[key], key, messages_of_text), ""
    if "messages" in value:
        return _without_answer(_conversation(value["messages"], "messages")), ""
    if "chosen" in value and "rejected" in value:
        chosen = _without_answer(_conversation(value["chosen"], "chosen"))
        rejected = _without_answer(_conversation(value["rejected"], "rejected"))
        return chosen, "" if chosen == rejected else SKIP_DIFFERENT
    found = ", ".join(value) or "no key"
    raise DataError(f"found {found}; expected prompt, text, messages, or chosen and rejected. Rename the prompt's key")


def _conversation(value: object, key: str, read_text: Callable[[str], list[Message]] | None = None) -> list[Message]:
    if isinstance(value, str):
        check_encodable(value, key)
        try:
            return (read_text or parse_hh_conversation)(value)
        except DataError as error:
            raise DataError(f"{key}: {error}") from error
    if not isinstance(value, list):
        raise DataError(f"{key} is {describe_type(value)}, expected a string or a list of messages")
    messages = []
    for index, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _HH_NAMES or not isinstance(content, str):
            raise DataError(f"{key}[{index}] is no message with a role user or assistant and a string as content")
        check_encodable(content, f"{key}[{index}].content")
        messages.append({"role": role, "content": content.strip()})
    if not messages:
        raise DataError(f"{key} is empty")
    return messages


def check_encodable(text: str, key: str) -> None:
    """Raise a `DataError` for a text that UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{key} holds half of a surrogate pair ({text[error.start]!r})") from error


def _without_answer(messages: list[Message]) -> list[Message]:
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def _unfit(messages: list[Message], options: PrepareOptions) -> str:
    roles = [message["role"] for message in messages]
    if not roles or roles[-1] != "user":
        return SKIP_NO_QUESTION
    if any(role != ("user", "assistant")[index % 2] for index, role in enumerate(roles)):
        return SKIP_NOT_ALTERNATING
    if not all(message["content"] for message in messages):
        return SKIP_EMPTY_TURN
    if options.max_turns is not None and roles.count("user") > options.max_turns:
        return SKIP_TURNS
    characters = sum(len(message["content"]) for message in messages)
    if options.max_characters is not None and characters > options.max_characters:
        return SKIP_CHARACTERS
    return ""


def _split(prompts: list[Kept], options: PrepareOptions) -> tuple[list[Kept], list[Kept]]:
    order = list(range(len(prompts)))
    random.Random(options.seed).shuffle(order)
    order = order[: options.limit]
    wanted = options.num_validation
    if wanted is None:
        wanted = max(1, round(len(order) * options.validation_fraction))
    if wanted >= len(order):
        raise DataError(
            f"{len(order)} prompts are left after filtering, too few for {wanted} of validation and at least one of "
            "training; nothing was written. Loosen the filters or lower --num-validation"
        )
    validation, train = sorted(order[:wanted]), sorted(order[wanted:])
    return [prompts[i] for i in train], [prompts[i] for i in validation]
