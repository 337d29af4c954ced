"""Reads NeMo-Aligner's data: conversations as one text or by speaker.

Converts them into messages, pairs and rated answers.

A text is `<extra_id_0>System\\n...\\n<extra_id_1>User\\n...\\n<extra_id_1>Assistant\\n...`, perhaps
with `<extra_id_1>` or `<extra_id_2>` at its end. A chat record has `system`, `conversations` of
`{"from", "value", "label"}`, and `mask`, the name of the speaker who is not trained: the user.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.data.jsonl import (
    LineFaults,
    Message,
    Record,
    check_messages,
    check_text,
    describe_type,
    messages_of_text,
    parse_hh_conversation,
    text_of,
    write_jsonl,
)
from reinforce_rl.data.readers import AS_NAMED, ColumnMissing, Columns, files_of, read_records
from reinforce_rl.errors import DataError, Fault

UNRATED = -100  # value of a label without a rating
# The order of the numbers of `label` in NeMo-Aligner's own data, from
# examples/nlp/data/steerlm/common.py.
STEERLM_ATTRIBUTES = (
    "quality",
    "toxicity",
    "humor",
    "creativity",
    "helpfulness",
    "correctness",
    "coherence",
    "complexity",
    "verbosity",
)

_START = "<extra_id_0>System\n"
_MARKER = re.compile(r"(?:\A|(?<=\n))<extra_id_([012])>([^\n]*)(?:\n|\Z)")
_END = re.compile(r"\s*<extra_id_[12]>\s*\Z")
_ROLES = {"System": "system", "User": "user", "Assistant": "assistant"}
_PLAIN_MARKER = re.compile(r"(?:\A|\n)(User|Assistant): ?")
_ADVICE = "Correct or remove these lines. Nothing was written."


def is_nemo_text(value: object) -> bool:
    return isinstance(value, str) and value.startswith(_START)


def parse_nemo_text(text: str) -> list[Message]:
    """Split a text into messages with stripped contents.

    An empty system turn and an open answer give no message.

    Raises:
        DataError: a speaker has another name, or the text holds SteerLM's labels, for which a
            message has no place.
    """
    markers = list(_MARKER.finditer(text))
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    messages: list[Message] = []
    for marker, end in zip(markers, ends, strict=True):
        number, name = marker.groups()
        content = text[marker.end() : end].strip()
        if number == "2" and (name.strip() or content):
            labels = name.strip()[:40]
            raise DataError(
                f"holds SteerLM's labels (<extra_id_2>{labels}), which have no place in a message",
                key="data.nemo.labels",
            )
        if not name.strip() and not content:  # an end marker
            continue
        role = _ROLES.get(name.strip())
        if role is None:
            raise DataError(
                f"has the speaker {name[:40]!r}; expected one of {', '.join(_ROLES)}",
                key="data.nemo.unknown_speaker",
            )
        messages.append({"role": role, "content": content})
    if messages[0] == {"role": "system", "content": ""}:
        messages = messages[1:]
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        return messages[:-1]
    return messages


def messages_of_chat(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record with `conversations` and `mask`, with their labels.

    `system` is not read.
    """
    turns = value["conversations"]
    mask = value["mask"]
    if not isinstance(turns, list):
        raise DataError(
            f"conversations is {describe_type(turns)}; expected a list of turns",
            key="data.nemo.turns_not_a_list",
        )
    speakers = list(
        dict.fromkeys(str(turn.get("from")) for turn in turns if isinstance(turn, dict))
    )
    if mask not in speakers:
        raise DataError(
            f"mask is {mask!r}; expected the user's name, one of {', '.join(speakers) or 'none'}",
            key="data.nemo.unknown_mask",
        )
    if len(speakers) > 2:
        raise DataError(
            f"conversations has the speakers {', '.join(speakers)}; expected {mask} and one other",
            key="data.nemo.too_many_speakers",
        )
    renamed = [
        {**turn, "from": "human" if turn.get("from") == mask else "gpt"}
        if isinstance(turn, dict)
        else turn
        for turn in turns
    ]
    messages = check_messages(renamed, "conversations", ("user", "assistant"))
    return [
        {**message, "label": turn.get("label")}
        for message, turn in zip(messages, turns, strict=True)
    ]


def prepare_pairs(
    inputs: Iterable[str | Path], output: str | Path, columns: Columns = AS_NAMED
) -> str:
    """Write `pairs.jsonl` for `train-rm`, and return a sentence with the counts.

    Reads lines of `text`, the chosen and then the rejected conversation of each prompt, or lines of
    `prompt` with `chosen_response` and `rejected_response`.

    Raises:
        DataError: a file cannot be read or written, lines are invalid (all are counted, the first
            are listed), or chosen and rejected do not take turns.
    """
    faults = LineFaults()
    rows: list[dict[str, Any]] = []
    count = 0
    for file in _files(inputs, output, "pairs.jsonl"):
        before = len(faults)
        parsed = list(read_records(file, _half_or_pair, faults, columns))
        count += len(parsed)
        rows += [pair for _, pair in parsed if "chosen" in pair]
        halves = [(where, half["messages"]) for where, half in parsed if "chosen" not in half]
        if len(faults) == before:  # a missing line would shift all pairs after it
            rows += _joined(file, halves, faults)
    faults.raise_if_any(_ADVICE)
    write_jsonl({Path(output) / "pairs.jsonl": rows})
    return f"read {count} lines, written {len(rows)} pairs"


def prepare_ratings(
    inputs: Iterable[str | Path],
    output: str | Path,
    attributes: Sequence[str] = (),
    columns: Columns = AS_NAMED,
) -> str:
    """Write `ratings.jsonl` for `train-rm`, and return a sentence with the counts.

    Reads lines of `text` and `label`, a list of numbers, or chat records with a label such as
    `quality:4,toxicity:0` at each answer.

    Args:
        attributes: names of the numbers of `label`, in order.

    Raises:
        DataError: a file cannot be read or written, or lines are invalid (all are counted, the
            first are listed).
    """
    twice = [name for name, count in Counter(attributes).items() if count > 1]
    if twice:
        raise DataError(
            f"--attributes names {', '.join(twice)} twice; name each number of label once",
            key="prepare.attributes.named_twice",
        )
    faults = LineFaults()
    rows: list[dict[str, Any]] = []
    count = 0
    for file in _files(inputs, output, "ratings.jsonl"):
        for ratings in read_records(
            file, lambda record: list(_ratings_of(record.value, attributes)), faults, columns
        ):
            count += 1
            rows += ratings
    faults.raise_if_any(_ADVICE)
    if not rows:
        raise DataError(
            f"none of {count} lines has a rated answer; nothing was written",
            key="prepare.ratings.none",
        )
    write_jsonl({Path(output) / "ratings.jsonl": rows})
    return f"read {count} lines, written {len(rows)} rated answers"


def with_system(messages: list[dict[str, Any]], system: object) -> list[dict[str, Any]]:
    """Return the messages after a system message.

    Raises DataError if they begin with another system message.
    """
    if system is None or (isinstance(system, str) and not system.strip()):
        return messages
    content = check_text(system, "system").strip()
    if messages and messages[0]["role"] == "system":
        if text_of(messages[0]).strip() != content:
            raise DataError(
                "system and the first message are two different system messages; keep one of them",
                key="data.system.two",
            )
        return messages
    return [{"role": "system", "content": content}, *messages]


def _files(inputs: Iterable[str | Path], output: str | Path, name: str) -> Iterator[Path]:
    target = Path(output) / name
    for file in [file for path in inputs for file in files_of(path)]:
        if file.resolve() == target.resolve():
            raise DataError(
                f"{file} is both read and written; choose another output folder",
                key="prepare.output.is_an_input",
            )
        yield file


def _half_or_pair(record: Record) -> tuple[str, dict[str, Any]]:
    """Return a line's location with its pair, or with the conversation that is half of a pair."""
    value = record.value
    if "chosen_response" in value and "rejected_response" in value and "prompt" in value:
        prompt = _conversation(value["prompt"], "prompt")
        answers = {
            key: _answer(value[f"{key}_response"], f"{key}_response")
            for key in ("chosen", "rejected")
        }
        return record.where, {"prompt": prompt, **answers}
    if "text" not in value:
        raise ColumnMissing(
            value, "text, or prompt with chosen_response and rejected_response", "--field text"
        )
    return record.where, {"messages": _answered(value)}


def _joined(
    file: Path, halves: Sequence[tuple[str, list[Message]]], faults: LineFaults
) -> Iterator[dict[str, Any]]:
    """Join every two conversations to a pair, up to the first two that answer different prompts."""
    for (where, chosen), (_, rejected) in zip(halves[::2], halves[1::2], strict=False):
        if chosen[:-1] != rejected[:-1]:
            sentence = (
                "this line and the next answer different prompts; expected the chosen and then the "
                "rejected answer to one prompt, line by line"
            )
            faults.add(where, Fault(sentence, key="data.pairs.different_prompts"))
            return
        yield {
            "prompt": chosen[:-1],
            "chosen": chosen[-1]["content"],
            "rejected": rejected[-1]["content"],
        }
    if len(halves) % 2:
        sentence = (
            f"the last of {len(halves)} lines, which is an odd number; expected two lines a prompt"
        )
        faults.add(halves[-1][0], Fault(sentence, key="data.pairs.odd_number"))


def _ratings_of(value: Mapping[str, Any], attributes: Sequence[str]) -> Iterator[dict[str, Any]]:
    if "conversations" in value and "mask" in value:
        messages = messages_of_chat(value)
        plain = [
            {"role": message["role"], "content": message["content"].strip()} for message in messages
        ]
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and message["label"]:
                yield {
                    "prompt": with_system(plain[:index], value.get("system")),
                    "response": plain[index]["content"],
                    "attributes": _named_labels(message["label"], f"conversations[{index}].label"),
                }
        return
    if "label" not in value or "text" not in value:
        raise ColumnMissing(value, "text with label, or conversations with mask", "--field text")
    messages = _answered(value)
    yield {
        "prompt": messages[:-1],
        "response": messages[-1]["content"],
        "attributes": _listed_labels(value["label"], attributes),
    }


def _listed_labels(label: object, attributes: Sequence[str]) -> dict[str, float]:
    if not isinstance(label, list):
        raise DataError(
            f"label is {describe_type(label)}; expected a list of numbers",
            key="data.label.not_a_list",
        )
    if len(label) != len(attributes):
        hint = (
            f"; its own data has {','.join(STEERLM_ATTRIBUTES)}"
            if len(label) == len(STEERLM_ATTRIBUTES)
            else ""
        )
        given = (
            f"--attributes names {len(attributes)}: {','.join(attributes)}"
            if attributes
            else "none is named"
        )
        raise DataError(
            f"label has {len(label)} numbers, but {given}; "
            f"name each in order: --attributes a,b,c{hint}",
            key="data.label.wrong_number",
        )
    for number in label:
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not math.isfinite(number)
        ):
            raise DataError(
                f"label holds {number!r}; expected finite numbers, {UNRATED} for no rating",
                key="data.label.not_finite",
            )
    return {
        name: number for name, number in zip(attributes, label, strict=True) if number != UNRATED
    }


def _named_labels(label: object, key: str) -> dict[str, float]:
    """Read `quality:4,toxicity:0`."""
    ratings: dict[str, float] = {}
    for entry in check_text(label, key).split(","):
        name, _, text = entry.rpartition(":")
        name = name.strip()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not name or not math.isfinite(number) or name in ratings:
            raise DataError(
                f"{key} is {label!r}; expected NAME:NUMBER,NAME:NUMBER, finite and no name twice",
                key="data.label.invalid",
            )
        ratings[name] = number
    return {name: number for name, number in ratings.items() if number != UNRATED}


def _answered(value: Mapping[str, Any]) -> list[Message]:
    messages = _conversation(value["text"], "text", is_whole=True)
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError(
            "text does not end with an answer of the assistant; expected a prompt and an answer",
            key="data.text.no_answer_at_end",
        )
    if len(messages) == 1:
        raise DataError(
            "text holds an answer only; expected a prompt before it",
            key="data.text.no_prompt",
        )
    return messages


def _conversation(value: object, key: str, *, is_whole: bool = False) -> list[Message]:
    """Return the messages of a list or of a text.

    A text in no known form is one user message, unless `is_whole` asks for a whole conversation.
    """
    if isinstance(value, list):
        messages = check_messages(value, key, ("system", "user", "assistant"))
        return [
            {"role": message["role"], "content": message["content"].strip()} for message in messages
        ]
    text = check_text(value, key)
    if is_nemo_text(text):
        return parse_nemo_text(text)
    if not is_whole:
        return messages_of_text(text)
    if _PLAIN_MARKER.match(text):
        _, *pieces = _PLAIN_MARKER.split(text)
        roles = [_ROLES[name] for name in pieces[::2]]
        return [
            {"role": role, "content": content.strip()}
            for role, content in zip(roles, pieces[1::2], strict=True)
        ]
    try:
        return parse_hh_conversation(text)
    except DataError as error:
        raise DataError(
            f"{key} begins with {text[:40]!r}; expected a conversation, which begins with "
            f"{_START.strip()}, User: or Human:",
            key=error.key,
        ) from error


def _answer(value: object, key: str) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    answer = _END.sub("", check_text(content, key)).strip()
    if not answer:
        raise DataError(f"{key} is empty; expected an answer", key="data.answer.empty")
    return answer
