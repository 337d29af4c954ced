"""Tool calls in the text of an answer, in the formats of the model families.

transformers' `parse_response` is not used: its description of a format differs between the releases
that this package allows, few tokenizers have one, and a call that is not JSON fails the whole
answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.errors import ConfigError, DataError, Fault

# Name of a call that could not be read, beside which the history has no other place for its reply.
UNREADABLE = "unreadable"
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other
_ID = re.compile(rf"[A-Za-z0-9]{{{_ID_LENGTH}}}")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Answer:
    """An answer of the policy, read."""

    content: str  # without its calls; with thoughts, except those of harmony's analysis channel
    calls: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's form; arguments are objects
    # What is wrong, by the id of a call that could not be read.
    faults: Mapping[str, str] = field(default_factory=dict)
    thinking: str = ""  # harmony's analysis
    has_channels: bool = False  # harmony's: its text is more than its content

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thinking:
            message["thinking"] = self.thinking
        if self.calls:
            message["tool_calls"] = [dict(call) for call in self.calls]
        return message


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: Mapping[str, Any]
    id: str | None = None  # that the policy wrote
    fault: str = ""


@dataclass(frozen=True)
class _Read:
    content: str
    calls: list[_Call]
    thinking: str = ""
    has_channels: bool = False


def read_answer(text: str, tool_format: str, key: int) -> Answer:
    """Return an answer's content and calls.

    Args:
        text: decoded with its special tokens, without the one that ended it.
        tool_format: one of `TOOL_FORMATS`.
        key: of the ids of calls; equal keys give equal ids.
    """
    parts = TOOL_FORMATS[tool_format](text)
    calls = []
    faults: dict[str, str] = {}
    ids: set[str] = set()
    for index, call in enumerate(parts.calls):
        call_id = call.id
        if call_id is None or call_id in ids:
            call_id = _id_of(key, index)
        ids.add(call_id)
        function = {"name": call.name, "arguments": call.arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
        if call.fault:
            faults[call_id] = call.fault
    return Answer(parts.content, tuple(calls), faults, parts.thinking, parts.has_channels)


def _id_of(key: int, index: int) -> str:
    digest = hashlib.sha256(f"{key}/{index}".encode()).digest()
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:_ID_LENGTH])


# The formats


def _hermes(text: str) -> _Read:
    """Read <tool_call>{"name", "arguments"}</tool_call>, of Hermes, Qwen and SmolLM2.

    SmolLM2 writes a list of calls between the tags.
    """
    begin = _end_of_thoughts(text)
    contents = [text[:begin]]
    calls: list[_Call] = []
    while (start := text.find("<tool_call>", begin)) >= 0:
        contents.append(text[begin:start])
        start += len("<tool_call>")
        read, begin = _calls_at(text, start, until="</tool_call>")
        calls += read
        closing = re.compile(r"\s*</tool_call>").match(text, begin)
        begin = closing.end() if closing else begin
    contents.append(text[begin:])
    return _Read("".join(contents).strip() if calls else text, calls)


def _llama3(text: str) -> _Read:
    """Read {"name", "parameters"}, which is the whole answer or follows <|python_tag|>.

    Several calls are separated by a semicolon, a comma or white space.
    """
    before, tag, behind = text.partition("<|python_tag|>")
    if not tag:
        before = ""
        behind = text
        if not re.match(r'\s*\{\s*"(type|name|function)"\s*:', text):
            return _Read(text, [])
    calls: list[_Call] = []
    begin = 0
    separator = re.compile(r"[\s;,]*(<\|python_tag\|>)?\s*")
    while begin < len(behind) and (behind[begin] == "{" or not calls):
        read, begin = _calls_at(behind, begin, until="<|python_tag|>")
        calls += read
        match = separator.match(behind, begin)
        begin = match.end() if match else begin
    contents = [part.strip() for part in (before, behind[begin:])]
    return _Read("\n".join(part for part in contents if part), calls)


def _mistral(text: str) -> _Read:
    """Read [TOOL_CALLS][{"name", "arguments", "id"}], or [TOOL_CALLS]NAME[ARGS]{...} of 2025."""
    content, *texts = text.split("[TOOL_CALLS]")
    if not texts:
        return _Read(text, [])
    calls: list[_Call] = []
    named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\](\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
    for calls_text in texts:
        match = named.match(calls_text)
        if match is None:
            read, _ = _calls_at(calls_text, 0, until="")
            calls += read
        else:
            calls.append(_call_of(match[1], calls_text[match.end() :], match[2]))
    return _Read(content.strip(), calls)


def _harmony(text: str) -> _Read:
    """Read gpt-oss's messages: <|channel|>NAME to=functions.TOOL<|message|>TEXT<|call|>."""
    thoughts = []
    contents = []
    calls: list[_Call] = []
    for part in re.split(r"<\|(?:end|call|return|start)\|>", text):
        header, has_message, body = part.partition("<|message|>")
        if not has_message:
            continue
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if recipient:
            calls.append(_call_of(recipient[1].removeprefix("functions."), body))
        elif "<|channel|>analysis" in header:
            thoughts.append(body)
        else:
            contents.append(body)
    if not (thoughts or contents or calls):
        return _Read(text, [])
    if calls:
        # The template of gpt-oss takes one text beside a call, as analysis.
        return _Read("", calls, "\n".join((*thoughts, *contents)), True)
    return _Read("\n".join(contents), [], "\n".join(thoughts), True)


TOOL_FORMATS: dict[str, Callable[[str], _Read]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "harmony": _harmony,
}


def _end_of_thoughts(text: str) -> int:
    """Return where the thoughts of an answer end, which may mention calls."""
    _, end, behind = text.rpartition("</think>")
    if "<think>" in behind:  # cut
        return len(text)
    return len(text) - len(behind) if end else 0


def _calls_at(text: str, begin: int, *, until: str) -> tuple[list[_Call], int]:
    """Read a JSON object or list of calls; return them and where they end.

    What is not JSON reaches to `until`, or to the end of the text.
    """
    begin = len(text) - len(text[begin:].lstrip())
    try:
        # Its end is the JSON's own, since a text of an argument may hold any sign.
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        end = text.find(until, begin) if until else -1
        end = len(text) if end < 0 else end
        return [_unreadable(f"it is not JSON: {error}")], end
    values = value if isinstance(value, list) else [value]
    return [_call_of_value(value) for value in values], end


def _call_of_value(value: object) -> _Call:
    expected = 'expected an object with "name" and "arguments"'
    if not isinstance(value, dict):
        return _unreadable(f"it is {json.dumps(value, ensure_ascii=False)[:80]}; {expected}")
    function = value.get("function")
    if isinstance(function, dict):  # OpenAI's form
        value = {**value, **function}
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name:
        return _unreadable(f"it has no name; {expected}")
    if isinstance(arguments, str):
        return _call_of(name, arguments, value.get("id"))
    if not isinstance(arguments, dict):
        return _unreadable(f"the arguments of {name} are no object")
    return _Call(name, arguments, _written_id(value.get("id")))


def _call_of(name: str, arguments: str, written_id: object = None) -> _Call:
    """Return a call whose arguments are a JSON text."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        return _unreadable(f"the arguments of {name} are not JSON: {error}")
    if not isinstance(value, dict):
        return _unreadable(f"the arguments of {name} are no object")
    return _Call(name, value, _written_id(written_id))


def _written_id(value: object) -> str | None:
    return value if isinstance(value, str) and _ID.fullmatch(value) else None


def _unreadable(fault: str) -> _Call:
    return _Call(UNREADABLE, {}, fault=fault)


# The format of a model


def tool_format_of(renderer: ChatRenderer, setting: str) -> str:
    """Return the format of a chat template's calls, or the one that `setting` names.

    Raises ConfigError if it is "auto" and the template writes no calls of a known format.
    """
    if setting != "auto":
        return setting
    probe = {"name": "probe", "arguments": {"probe": 1}}
    for call_format, text in _probed(renderer, probe):
        try:
            calls = TOOL_FORMATS[call_format](text).calls
        except ValueError:
            continue
        if any(call.name == probe["name"] and not call.fault for call in calls):
            return call_format
    sentence = (
        f"the chat template of {renderer.tokenizer.name_or_path} writes no tool calls in a format "
        "that can be found out, but the environment has tools. Name the format in which this "
        f"model calls tools: environment.tool_format={'|'.join(TOOL_FORMATS)}, and describe the "
        "tools in the system message if the template does not, or use a model that was trained "
        "on tools"
    )
    raise ConfigError([Fault(sentence, key="environment.tool_format.unknown")])


def _probed(renderer: ChatRenderer, function: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each format with the text of an answer that calls a function."""
    question = Conversation(({"role": "user", "content": "probe"},))
    call = {"id": _id_of(0, 0), "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = renderer.prompt_text(question)
        text = renderer.answered_text(question, answer)
    except DataError:
        return
    # Some templates begin the answer's own text before its end of the prompt, such as a thought.
    common = 0
    while common < min(len(prompt), len(text)) and prompt[common] == text[common]:
        common += 1
    written = text[common:]
    for call_format in TOOL_FORMATS:
        yield call_format, written
