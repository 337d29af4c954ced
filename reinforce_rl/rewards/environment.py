"""What an environment is: it answers the policy's answers until the episode ends.

An environment is named as a reward function is, by a dotted name. A function is called with each
answer of an episode,

    def calculator(answer: str, record: dict, rng: random.Random) -> str | None: ...

and a class makes an object for each episode, which is called with each answer:

    class GuessANumber:
        def __init__(self, record: dict, rng: random.Random): ...
        def __call__(self, answer: str) -> str | None: ...

Both may take keyword arguments, from `environment.kwargs`. An episode runs in a process of its own.

Where the policy calls tools in its model's own form, the environment is a `Tools`.
"""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

Message = Mapping[str, Any]
ENVIRONMENT_FAILED = "the environment failed: "  # begins the fault of an episode
# Roles of messages that an environment may write.
ROLES = ("user", "tool", "system")


@dataclass(frozen=True)
class Reply:
    """What an environment says to an answer; it may also return `messages` alone.

    `messages` are a text, which is a user's, one message as in OpenAI's form, such as
    {"role": "tool", "content": "4"}, a list of messages, or None, which ends the episode.
    """

    messages: str | Message | Sequence[Message] | None = None
    reward: float = 0.0  # of this turn; an episode's reward is the sum over its turns
    is_end: bool = False  # the episode ends, whatever the messages are


class ToolError(Exception):
    """Raised by a tool: what is wrong with a call, for the policy to read."""


class Tools:
    """An environment of tools, which run the calls in the policy's answers.

    A tool is a function whose annotations and docstring describe it, or an object with its schema
    beside a method of that name:

        def multiply(a: int, b: int) -> int:
            \"""Multiply two integers.

            Args:
                a: the first
                b: the second
            \"""
            return a * b

        class Calculator(Tools):
            tools = [multiply]

            def __init__(self, record: dict, rng: random.Random):
                self._value = record["value"]

            def __call__(self, answer: str) -> Reply:
                return Reply(reward=float(str(self._value) in answer), is_end=True)

    The tools are described to the policy where a record has no `tools` of its own. Calls get a
    message each, of the role tool: what the tool returned, as a text or JSON, or what is wrong with
    the call. An answer without calls is given to `__call__`, which ends the episode by default.
    """

    tools: ClassVar[Sequence[Callable[..., object] | Mapping[str, Any]]] = ()

    def __init__(self, record: dict[str, Any], rng: random.Random):
        pass

    def __call__(self, answer: str) -> str | Message | Sequence[Message] | Reply | None:
        return None

    @classmethod
    def definitions(cls) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's form.

        Raises ValueError, the end of a sentence behind the setting and its value.
        """
        definitions = []
        for tool in cls.tools:
            name = _name_of(tool)
            method = getattr(cls, name, None)
            if isinstance(tool, Mapping):
                if not callable(method):
                    raise ValueError(
                        f"whose tool {name} is a schema alone; expected a method of that name"
                    )
                definitions.append(_definition(tool))
                continue
            described = MethodType(tool, cls) if method is tool else tool  # without `self`
            try:
                # Imported here, as most environments have no tools.
                from transformers.utils.chat_template_utils import get_json_schema

                definitions.append(get_json_schema(described))
            except Exception as error:  # such as for an argument without a type
                raise ValueError(f"whose tool {name} has no schema: {error}") from error
        return definitions

    def answer_calls(
        self, calls: Sequence[Mapping[str, Any]], faults: Mapping[str, str]
    ) -> list[Message]:
        """Run calls in order; return a message each.

        Args:
            calls: in OpenAI's form, with arguments as objects.
            faults: what is wrong with a call that could not be read, by its id.
        """
        messages = []
        for call in calls:
            function = call["function"]
            if call["id"] in faults:
                content = f"This call could not be read: {faults[call['id']]}"
            else:
                content = self._result(function["name"], function["arguments"])
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "name": function["name"],
                    "content": content,
                }
            )
        return messages

    def _result(self, name: str, arguments: Mapping[str, Any]) -> str:
        tools = {_name_of(tool): tool for tool in self.tools}
        if name not in tools:
            return f"There is no tool {name!r}; there are {', '.join(tools)}."
        function: Any = getattr(self, name, tools[name])
        try:
            validated = _validated(function, arguments)
        except (TypeError, ValidationError) as error:
            return f"The arguments of {name} do not fit: {_reason(error)}"
        try:
            returned = function(**validated)
        except ToolError as error:
            return str(error)
        return returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False)


def _name_of(tool: Callable[..., object] | Mapping[str, Any]) -> str:
    if isinstance(tool, Mapping):
        return str(tool.get("function", tool).get("name"))
    return tool.__name__


def _definition(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in OpenAI's form."""
    if "function" in tool:
        return {"type": "function", **tool}
    return {"type": "function", "function": dict(tool)}


def _validated(function: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments, validated and converted to a function's annotated types.

    Raises TypeError or ValidationError if they do not fit.
    """
    inspect.signature(function).bind(**arguments)
    types = get_type_hints(function)
    validated = {}
    for name, value in arguments.items():
        if name in types:
            value = TypeAdapter(types[name]).validate_python(value)
        validated[name] = value
    return validated


def _reason(error: TypeError | ValidationError) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{detail['input']!r}: {detail['msg']}" for detail in error.errors(include_url=False)
        )
    return str(error)


def normalized(reply: object) -> dict[str, Any]:
    """Return a reply as messages (a list), reward and is_end.

    Raises TypeError or ValueError, which say what was returned and what is expected.
    """
    if not isinstance(reply, Reply):
        reply = Reply(reply)  # type: ignore[arg-type]
    messages = reply.messages
    if messages is None:
        messages = []
    elif isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, Mapping):
        messages = [messages]
    elif not isinstance(messages, list | tuple):
        raise TypeError(
            f"returned a {type(messages).__name__}; expected a text, a message, a list of messages "
            "or None"
        )
    for message in messages:
        _check_message(message)
    reward = float(reply.reward)
    if not math.isfinite(reward):
        raise ValueError(f"returned a reward of {reward}; expected a finite number")
    is_end = bool(reply.is_end) or not messages
    return {"messages": [dict(message) for message in messages], "reward": reward, "is_end": is_end}


def _check_message(message: object) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"returned a list with a {type(message).__name__}; expected messages, such as "
            '{"role": "tool", "content": "4"}'
        )
    if message.get("role") not in ROLES:
        raise ValueError(
            f"returned a message with role {message.get('role')!r}; expected {', '.join(ROLES)}"
        )
    if not isinstance(message.get("content"), str):
        kind = type(message.get("content")).__name__
        raise TypeError(f"returned a message whose content is a {kind}; expected a text")
    try:
        message["content"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            "returned a message that is not valid Unicode: it has half of a surrogate pair"
        ) from error
