"""A record's conversation: its messages, tools and template arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforce_rl.data import jsonl
from reinforce_rl.errors import DataError, Fault

TOOLS_KEY = "tools"
KWARGS_KEY = "chat_template_kwargs"
DATE_FUNCTION = "strftime_now"  # the function by which templates get today's date

# Parameters of `apply_chat_template` that determine what it renders and returns.
_RESERVED = (
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    DATE_FUNCTION,
)


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template, in the form of OpenAI and transformers."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # template arguments of this record

    @classmethod
    def of_record(
        cls, messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any]
    ) -> Conversation:
        """Add the tools and template arguments of a record.

        Raises DataError, which names the column.
        """
        return cls(
            tuple(messages), read_tools(record.get(TOOLS_KEY)), read_kwargs(record.get(KWARGS_KEY))
        )


def read_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Return tools in OpenAI's form, from a list of objects or its JSON.

    Null and an empty text mean no tools.
    """
    tools = _parsed(value, TOOLS_KEY)
    if tools is None:
        return ()
    expected = "expected a list of objects, or its JSON"
    advice = "A column of another meaning needs another name: +model.data.fields.rename.NAME=tools"
    if not isinstance(tools, list):
        raise DataError(
            f"{TOOLS_KEY} is {jsonl.describe_type(tools)}; {expected}. {advice}",
            key="data.tools.not_a_list",
        )
    parsed = [_parsed(tool, f"{TOOLS_KEY}[{index}]") for index, tool in enumerate(tools)]
    for index, tool in enumerate(parsed):
        if not isinstance(tool, dict):
            kind = jsonl.describe_type(tool)
            raise DataError(
                f"{TOOLS_KEY}[{index}] is {kind}; {expected}. {advice}",
                key="data.tools.not_an_object",
            )
    return tuple(parsed)


def read_kwargs(value: object) -> dict[str, Any]:
    """Return template arguments, from an object or its JSON.

    Null means no arguments, and arguments that are null are left out.
    """
    kwargs = _parsed(value, KWARGS_KEY)
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        kind = jsonl.describe_type(kwargs)
        raise DataError(
            f"{KWARGS_KEY} is {kind}; expected an object of template arguments, or its JSON",
            key="data.template_arguments.not_an_object",
        )
    given = {name: argument for name, argument in kwargs.items() if argument is not None}
    faults = kwargs_faults(given, KWARGS_KEY)
    if faults:
        raise DataError("; ".join(faults), key=faults[0].key)
    return given


def kwargs_faults(kwargs: Mapping[str, Any], key: str) -> list[Fault]:
    """Return a sentence for each argument that cannot be passed to a template."""
    faults: list[Fault] = []
    for name, argument in kwargs.items():
        if name in _RESERVED:
            sentence = f"{key}.{name} is {argument!r}, but this program sets {name}; leave it out"
            faults.append(Fault(sentence, key="chat_template.argument.reserved"))
        elif not _is_json(argument):
            kind = type(argument).__name__
            sentence = f"{key}.{name} is of type {kind}; expected a JSON value"
            faults.append(Fault(sentence, key="chat_template.argument.not_json"))
    return faults


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _parsed(value: object, key: str) -> Any:
    """Parse the JSON in which CSV, Parquet and `datasets` store nested values."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{key} is {value[:60]!r}, which is not JSON: {error}",
            key="data.value.not_json",
        ) from error
