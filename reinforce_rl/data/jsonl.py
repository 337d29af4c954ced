"""Records of prompts: check their values, read the HH form, and write them as JSONL.

HH form is one string: "\\n\\nHuman: ...\\n\\nAssistant: ...\\n\\nHuman: ...\\n\\nAssistant:".
Torch-free, to run at config time.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.errors import DataError, Fault
from reinforce_rl.utils.files import not_written, write_atomically

Message = dict[str, Any]

MAX_LISTED_FAULTS = 10
ROLES = ("system", "developer", "user", "assistant", "tool")

_MESSAGES_OF_PYTHON = re.compile(r"\s*\[\s*\{\s*'(?:role|content|from|value)'\s*:")

_TEXT_PART = '{"type": "text", "text": ...}'
_TOOL_CALL = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'

_HH_MARKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    **{role: role for role in ROLES},
}
HH_NAMES = {role: name for name, role in _HH_ROLES.items()}


@dataclass(frozen=True)
class Record:
    where: str  # "FILE:LINE", or "FILE, row N" if rows are not lines; from 1
    value: dict[str, Any]


class LineFaults(list[Fault]):
    """Faulty lines or rows, reported together in one `DataError`."""

    # Faults of records without a column, which all records of the file lack: no line can be
    # corrected.
    columns = 0

    def add(self, where: str, reason: DataError | Fault) -> None:
        self.append(Fault(f"  {where}: {reason}", key=reason.key))

    def raise_if_any(self, advice: str) -> None:
        """Raise a `DataError` that lists the first faults and ends with `advice`, if there are any.

        The error has the key of the first fault.
        """
        if not self:
            return
        unlisted = (
            [f"  ... and {len(self) - MAX_LISTED_FAULTS} more"]
            if len(self) > MAX_LISTED_FAULTS
            else []
        )
        head = f"{len(self)} line{'s' if len(self) != 1 else ''} of the data cannot be used:"
        lines = [head, *self[:MAX_LISTED_FAULTS], *unlisted]
        if len(self) > self.columns:
            lines.append(advice)
        raise DataError("\n".join(lines), key=self[0].key)


def write_jsonl(files: Mapping[Path, Iterable[Mapping[str, Any]]]) -> None:
    """Write JSONL files. None replaces an existing file before all are on disk.

    Raises DataError if one cannot be written.
    """
    ready = {path: path.with_name(f".{path.name}.new") for path in files}
    path = Path()
    try:
        for path, rows in files.items():
            write_atomically(
                ready[path], "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            )
        for path, new in ready.items():
            new.replace(path)
    except OSError as error:
        raise DataError(not_written(path, error), key="data.file.not_written") from error
    finally:
        for new in ready.values():
            with contextlib.suppress(OSError):
                new.unlink()


# Values of a line. Their errors name the key only.


def describe_type(value: object) -> str:
    """Return the JSON name of a value's type with its article, for messages."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def check_text(value: object, key: str) -> str:
    """Return the value, a string that UTF-8 can encode; raise a `DataError` for any other."""
    if not isinstance(value, str):
        raise DataError(
            f"{key} is {describe_type(value)}; expected a string",
            key="data.text.not_a_string",
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{key} holds half of a surrogate pair ({value[error.start]!r}); expected UTF-8",
            key="data.text.half_a_character",
        ) from error
    return value


def messages_of_json(value: object, key: str) -> object:
    """Return the messages that a text holds as JSON; any other value unchanged.

    CSV and some Parquet files hold messages this way.

    Raises a `DataError` for Python's form of a list, which pandas writes into CSV.
    """
    if not isinstance(value, str):
        return value
    if _MESSAGES_OF_PYTHON.match(value):
        raise DataError(
            f"{key} is a list of messages in Python syntax, {value[:40]!r}; expected JSON. Write "
            "it as JSON (json.dumps) or, in Parquet and JSONL, as a list",
            key="data.messages.python_form",
        )
    messages = _parsed_messages(value)
    return value if messages is None else messages


def refuse_messages_as_text(value: object, key: str, advice: str) -> None:
    """Raise a `DataError` for a text that holds a list of messages, in JSON or in Python's form."""
    if not isinstance(value, str):
        return
    if _MESSAGES_OF_PYTHON.match(value) or _parsed_messages(value) is not None:
        raise DataError(
            f"{key} is a string that holds a list of messages, {value[:40]!r}; {advice}",
            key="data.text.holds_messages",
        )


def _parsed_messages(text: str) -> list[dict[str, Any]] | None:
    if not text.lstrip().startswith("["):
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_list = isinstance(parsed, list) and bool(parsed)
    if not is_list or not all(
        isinstance(item, dict) and item.keys() & {"role", "from"} for item in parsed
    ):
        return None
    return parsed


def check_messages(
    value: object,
    key: str,
    roles: Sequence[str],
    expected: str = "a string or a list of messages",
    *,
    texts_only: bool = True,
) -> list[dict[str, Any]]:
    """Return a list of `{"role", "content"}`, also from ShareGPT's `{"from", "value"}`.

    Raises a `DataError` for anything else, or if the list is empty.

    Without `texts_only`, a content may be a list of text parts, or null beside `tool_calls`, as in
    OpenAI's form.
    """
    if not isinstance(value, list):
        raise DataError(
            f"{key} is {describe_type(value)}; expected {expected}",
            key="data.messages.not_a_list",
        )
    if not value:
        raise DataError(f"{key} is an empty list; expected messages", key="data.messages.empty")
    if all(
        isinstance(message, dict) and "from" in message and "role" not in message
        for message in value
    ):
        value = [
            {
                "role": _SHAREGPT_ROLES.get(str(message["from"]).lower(), message["from"]),
                "content": message.get("value"),
            }
            for message in value
        ]
    for index, message in enumerate(value):
        where = f"{key}[{index}]"
        if not isinstance(message, dict):
            raise DataError(
                f"{where} is {describe_type(message)}; expected an object",
                key="data.message.not_an_object",
            )
        if message.get("role") not in roles:
            raise DataError(
                f"{where}.role is {message.get('role')!r}; expected one of {', '.join(roles)}",
                key="data.message.unknown_role",
            )
        if texts_only:
            check_text(message.get("content"), f"{where}.content")
        else:
            _check_content(message, where)
            _check_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    return value


def _check_content(message: Mapping[str, Any], where: str) -> None:
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return
    if not isinstance(content, list):
        check_text(content, f"{where}.content")
        return
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not isinstance(part, dict):
            raise DataError(
                f"{place} is {describe_type(part)}; expected an object such as {_TEXT_PART}",
                key="data.content.part_not_an_object",
            )
        if part.get("type") != "text":
            raise DataError(
                f"{place} is a part of type {part.get('type')!r}; expected text only, {_TEXT_PART}",
                key="data.content.part_not_text",
            )
        check_text(part.get("text"), f"{place}.text")
    if not content:
        raise DataError(
            f"{where}.content is an empty list; expected a string, or parts such as {_TEXT_PART}",
            key="data.content.empty",
        )


def _check_tool_calls(calls: object, where: str) -> None:
    """Check tool calls in OpenAI's form.

    Arguments are an object or its JSON, and `function` may be left out.
    """
    if calls is None:
        return
    if not isinstance(calls, list):
        raise DataError(
            f"{where} is {describe_type(calls)}; expected a list of calls",
            key="data.tool_calls.not_a_list",
        )
    for index, call in enumerate(calls):
        place = f"{where}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{place} names no function; expected {_TOOL_CALL}",
                key="data.tool_calls.no_function",
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{place} has the arguments {arguments[:60]!r}, which are not JSON: {error}",
                    key="data.tool_calls.arguments_not_json",
                ) from error
        if arguments is not None and not isinstance(arguments, dict):
            kind = describe_type(arguments)
            raise DataError(
                f"{place} has arguments that are {kind}; expected an object, or its JSON",
                key="data.tool_calls.arguments_not_an_object",
            )


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text; parts are joined by line ends, as in vLLM, and null is empty."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def check_prompt(messages: Sequence[Mapping[str, Any]], key: str) -> None:
    """Raise a `DataError` if a conversation does not end with a question."""
    if messages and messages[-1]["role"] == "assistant":
        raise DataError(
            f"{key} ends with an assistant message; expected a prompt, which ends before the "
            "assistant's answer. reinforce-rl prepare removes the answer",
            key="data.prompt.ends_with_an_answer",
        )
    if not messages or not (text_of(messages[-1]).strip() or messages[-1]["role"] == "tool"):
        raise DataError(
            f"{key} is empty, or its last message is; expected a question",
            key="data.prompt.empty",
        )


def parse_hh_conversation(text: str) -> list[Message]:
    """Split an HH conversation into messages with roles "user" and "assistant", contents stripped.

    An open "Assistant:" at the end gives no message. Repeated roles and empty turns stay as they
    are.

    Raises:
        DataError: the text does not begin with "Human:" or "Assistant:".
    """
    markers = list(_HH_MARKER.finditer(text))
    if not markers or markers[0].start() != 0:
        raise DataError(
            f"found {text[:40]!r}; expected a conversation that begins with '\\n\\nHuman:'",
            key="data.conversation.no_speaker",
        )
    ends = [marker.start() for marker in markers[1:]] + [len(text)]
    messages = [
        {"role": _HH_ROLES[marker.group(1)], "content": text[marker.end() : end].strip()}
        for marker, end in zip(markers, ends, strict=True)
    ]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def messages_of_text(text: str) -> list[Message]:
    """Parse an HH prompt, or return any other text as one user message."""
    if text.lstrip().startswith("Human:"):
        return parse_hh_conversation(text)
    return [{"role": "user", "content": text.strip()}]


def render_hh_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """Render a prompt in HH form, the inverse of `parse_hh_conversation`.

    The text ends with the open "Assistant:".
    """
    turns = [f"\n\n{HH_NAMES[message['role']]}: {text_of(message)}" for message in messages]
    return "".join(turns) + "\n\nAssistant:"


def prompt_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a key of a prompt that ignores case and white space."""
    return json.dumps([(m["role"], " ".join(text_of(m).casefold().split())) for m in messages])
