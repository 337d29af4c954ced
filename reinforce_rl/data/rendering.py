"""Renders conversations with a tokenizer's chat template.

Policy, reward model, evaluation and chat use the same rendering.

The result equals `tokenizer.apply_chat_template` of the same messages, tools and arguments.
"""

from __future__ import annotations

import inspect
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reinforce_rl.data import jsonl
from reinforce_rl.data.conversation import (
    DATE_FUNCTION,
    KWARGS_KEY,
    TOOLS_KEY,
    Conversation,
    kwargs_faults,
)
from reinforce_rl.data.template_bounds import TemplateBoundError, bound_chat_templates
from reinforce_rl.data.tokenizer import encode_all
from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.untrusted_files import MAX_JSON_BYTES, read_bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = "probe of the template"
_AS_TEXT = {"tokenize": False, "add_generation_prompt": True}
_ADVICE_OF_ROLE = {
    "system": "put its text into the first user message",
    "user": "use a model whose template writes it",
    "tool": "use a model whose template writes it, or put its text into a user message",
}


@dataclass(frozen=True)
class TemplateOptions:
    """Options of a run for rendering conversations."""

    # Template arguments. A record's arguments override them.
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None  # YYYY-MM-DD, today's date for templates; None: the day of the call
    sanitize_control_tokens: bool = False  # as in transformers: control tokens in content are text
    section: str = "model.data."  # configuration prefix of these options, for messages

    @property
    def identity(self) -> dict[str, Any]:
        """The options with a value, by the names of their keys."""
        options = {
            KWARGS_KEY: dict(self.kwargs),
            "chat_template_date": self.date,
            "sanitize_control_tokens": self.sanitize_control_tokens,
        }
        return {name: option for name, option in options.items() if option}


DEFAULT_OPTIONS = TemplateOptions()


class ChatRenderer:
    """A tokenizer's chat template with a run's options.

    Raises:
        ConfigError: this version of transformers does not support an option, or the template does
            not read an argument.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: TemplateOptions = DEFAULT_OPTIONS
    ):
        bound_chat_templates()
        self.tokenizer = tokenizer
        self.options = options
        self._frozen_date = _date_macro(options)
        faults = kwargs_faults(options.kwargs, f"{options.section}{KWARGS_KEY}")
        if options.sanitize_control_tokens and not _can_sanitize(tokenizer):
            import transformers

            sentence = (
                f"{options.section}sanitize_control_tokens is true, but in transformers "
                f"{transformers.__version__} apply_chat_template has no such argument; install a "
                "release that has it, such as 5.23"
            )
            faults.append(Fault(sentence, key="chat_template.sanitize.not_supported"))
        if tokenizer.chat_template:
            for name in self.unread(options.kwargs):
                sentence = (
                    f"{options.section}{KWARGS_KEY}.{name} has no effect: the chat template of "
                    f"{tokenizer.name_or_path} does not read {name}"
                )
                faults.append(Fault(sentence, key="chat_template.argument.not_read"))
        if faults:
            raise ConfigError(faults)

    def unread(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Return the arguments that no chat template of this tokenizer names."""
        templates = self.tokenizer.chat_template or ""
        text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
        return [name for name in kwargs if not re.search(rf"\b{re.escape(name)}\b", text)]

    @property
    def reads_tools(self) -> bool:
        """True if the chat template has a place for tools."""
        templates = self.tokenizer.chat_template or ""
        if isinstance(templates, dict):
            return any(_reads_tools(template) for template in templates.values())
        return _reads_tools(templates)

    # Texts

    def prompt_text(self, conversation: Conversation) -> str:
        """Render a conversation up to the beginning of the assistant's answer.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: the template refuses the conversation, or has no place for a part of it.
        """
        return self._render(conversation, add_generation_prompt=True)

    def answered_text(
        self, conversation: Conversation, answer: Mapping[str, Any], *, is_finished: bool = True
    ) -> str:
        """Render a conversation with the assistant's answer. Raises the errors of `prompt_text`.

        An answer that is not finished, as it was truncated, has no end of turn.
        """
        text = self._render(_with_answer(conversation, answer))
        return text if is_finished else text.removesuffix(self.end_of_turn(conversation))

    def end_of_turn(self, conversation: Conversation) -> str:
        """Return the text that the template writes after the last answer, such as `<|im_end|>`."""
        probe = {"role": "assistant", "content": _PROBE}
        _, is_there, end = self._render(_with_answer(conversation, probe)).rpartition(_PROBE)
        return end if is_there else ""

    # Token ids

    def prompt(self, conversation: Conversation) -> list[int]:
        """Tokenise `prompt_text`."""
        if not self.options.sanitize_control_tokens:
            return self.encode(self.prompt_text(conversation))
        return self._sanitized(conversation, add_generation_prompt=True)

    def answered(
        self, conversation: Conversation, answer: Mapping[str, Any], *, is_finished: bool = True
    ) -> list[int]:
        """Tokenise `answered_text`."""
        if not self.options.sanitize_control_tokens:
            return self.encode(self.answered_text(conversation, answer, is_finished=is_finished))
        ids = self._sanitized(_with_answer(conversation, answer))
        if is_finished:
            return ids
        end = self.encode(self.end_of_turn(conversation))
        return ids[: -len(end)] if end and ids[-len(end) :] == end else ids

    def encode(self, text: str) -> list[int]:
        """Tokenise rendered text, which already holds its special tokens."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return encode_all(self.tokenizer, texts)

    def _sanitized(
        self, conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> list[int]:
        # For its check: it raises if the template leaves out a message.
        self._render(conversation, add_generation_prompt=add_generation_prompt)
        ids = self._apply(
            conversation,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            sanitize_control_tokens=True,
            tokenizer_kwargs={"verbose": False},
        )
        return list(ids)

    # The template

    def _render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation.

        Raises DataError if the template leaves out a message, as Qwen's templates leave out a
        developer's. Answers are not checked: templates leave out the reasoning of earlier answers.
        """
        as_text = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
        text = self._apply(conversation, **as_text)
        for index, message in enumerate(conversation.messages):
            role = message["role"]
            content = jsonl.text_of(message)
            if role == "assistant" or content.strip() in text:
                continue
            # The template may write the content in another form: Llama's template writes a tool's
            # content as JSON, and SmolLM3's reads "/no_think" as an argument.
            probed = list(conversation.messages)
            probed[index] = {**message, "content": f"{content}\n{_PROBE}"}
            if _PROBE not in self._apply(replace(conversation, messages=tuple(probed)), **as_text):
                advice = _ADVICE_OF_ROLE.get(role, "give it another role, such as system")
                raise DataError(
                    f"the chat template leaves out the {role} message, number {index}; {advice}",
                    key="chat_template.message.left_out",
                )
        return text

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        template = self._template(conversation)
        messages = [self._message(message) for message in conversation.messages]
        if not any("tool_calls" in message for message in messages):
            return self._call(template, messages, conversation, options)
        if "tool_calls" not in template:
            raise DataError(
                "a message has tool_calls, which the chat template does not write",
                key="chat_template.tool_calls.not_written",
            )
        refusals: list[DataError] = []
        # Most templates want arguments as objects, as vLLM passes them, and no content beside
        # calls, as transformers passes them. DeepSeek-V3's joins arguments as texts, and needs a
        # content.
        for content in (None, ""):
            for is_object in (True, False):
                form = [_with_calls(message, content, is_object) for message in messages]
                try:
                    rendered = self._call(template, form, conversation, options)
                    text = (
                        self._call(template, form, conversation, _AS_TEXT)
                        if options["tokenize"]
                        else rendered
                    )
                    if is_object and _has_python_form(text, form):
                        raise DataError(
                            "the chat template writes tool_calls in Python syntax; expected JSON",
                            key="chat_template.tool_calls.python_form",
                        )
                    return rendered
                except DataError as error:
                    refusals.append(error)
        raise refusals[0]

    def _template(self, conversation: Conversation) -> str:
        tokenizer = self.tokenizer
        if not tokenizer.chat_template:
            sentence = (
                f"the tokenizer of {tokenizer.name_or_path} has no chat template, which messages "
                "and model.data.apply_chat_template=true need; use the folder of a chat model, or "
                "plain prompts without that setting"
            )
            raise ConfigError([Fault(sentence, key="chat_template.template.missing")])
        tools = [dict(tool) for tool in conversation.tools]
        try:
            template = tokenizer.get_chat_template(None, tools or None)
        except ValueError as error:  # several named templates, and none is the default
            sentence = f"the tokenizer of {tokenizer.name_or_path}: {error}"
            fault = Fault(sentence, key="chat_template.template.several")
            raise ConfigError([fault]) from error
        if tools and not _reads_tools(template):
            raise DataError(
                f"{TOOLS_KEY} has {len(tools)} tools, which the chat template does not read; use a "
                "model whose template does, or give the column another name: "
                "+model.data.fields.rename.NAME=tools",
                key="chat_template.tools.not_read",
            )
        return self._frozen_date + template if DATE_FUNCTION in template else template

    def _call(
        self,
        template: str,
        messages: list[dict[str, Any]],
        conversation: Conversation,
        options: Mapping[str, Any],
    ) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                # With an empty list, Llama's template would write its introduction of tools.
                tools=[dict(tool) for tool in conversation.tools] or None,
                chat_template=template,
                **{**self.options.kwargs, **conversation.kwargs},
                **options,
            )
        except TemplateBoundError as error:
            # A ConfigError, since the next conversation would take as long.
            sentence = (
                f"the chat template of {self.tokenizer.name_or_path} {error} for a conversation of "
                f"{len(messages)} messages; it is damaged or hostile: use another model's folder "
                "or correct the template"
            )
            fault = Fault(sentence, key="chat_template.bound.exceeded")
            raise ConfigError([fault]) from error
        except Exception as error:
            # Such as for roles that do not alternate. A template may raise anything.
            reason = quoted(error)  # the message may have any length
            raise DataError(
                f"the chat template refuses these messages: {reason}",
                key="chat_template.messages.refused",
            ) from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template reads."""
        # In Parquet and `datasets` every message has the keys of all messages, with null values.
        given = {name: value for name, value in message.items() if value is not None}
        content = given.get("content")
        if isinstance(content, list) and self._content_form == "text":
            given["content"] = jsonl.text_of(given)
        elif isinstance(content, str) and self._content_form == "parts":
            given["content"] = [{"type": "text", "text": content}]
        if not given.get("tool_calls", True):  # an empty list has no calls
            del given["tool_calls"]
        return given

    @cached_property
    def _content_form(self) -> Literal["text", "parts", "both"]:
        """The form of content that the template reads.

        Templates of models with images read lists of parts; some read nothing else.
        """
        by_text = self._probed(_PROBE)
        by_parts = self._probed([{"type": "text", "text": _PROBE}])
        if _PROBE not in by_text and _PROBE in by_parts:
            return "parts"
        return "both" if by_text == by_parts else "text"

    def _probed(self, content: Any) -> str:
        """Render a user message with this content; "" if the template refuses it."""
        template = self._template(Conversation(()))
        try:
            return self._call(
                template, [{"role": "user", "content": content}], Conversation(()), _AS_TEXT
            )
        except DataError:
            return ""


def reads_date(folder: str | Path) -> bool:
    """Tell whether a chat template of a Hugging Face folder contains today's date."""
    folder = Path(folder)
    files = [
        folder / "tokenizer_config.json",
        *folder.glob("chat_template*"),
        *folder.glob("*chat_templates/*.jinja"),
    ]
    needle = DATE_FUNCTION.encode()
    return any(
        file.is_file() and needle in read_bounded(file, max_bytes=MAX_JSON_BYTES) for file in files
    )


def _with_answer(conversation: Conversation, answer: Mapping[str, Any]) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, answer))


def _reads_tools(template: str) -> bool:
    return bool(re.search(r"\btools\b", template))


def _can_sanitize(tokenizer: PreTrainedTokenizerBase) -> bool:
    return "sanitize_control_tokens" in inspect.signature(tokenizer.apply_chat_template).parameters


def _date_macro(options: TemplateOptions) -> str:
    """Return a macro to put before a template, which hides transformers' global `strftime_now`.

    transformers accepts no function as a template argument, and has no other way to set the date.
    """
    if options.date is None:
        return ""
    try:
        day = date.fromisoformat(options.date)
    except ValueError as error:
        key = f"{options.section}chat_template_date"
        sentence = f"{key} is {options.date!r}; expected a date such as 2026-01-31"
        raise ConfigError([Fault(sentence, key="chat_template.date.invalid")]) from error
    # Replace "%%" first: the "%" that it stands for must not begin another directive.
    filters = ['replace("%%", "\\0")']
    for letter in string.ascii_letters:
        padded = day.strftime(f"%{letter}")
        if padded == f"%{letter}":
            continue
        bare = day.strftime(f"%-{letter}")
        filters.append(f'replace("%-{letter}", {json.dumps(bare, ensure_ascii=False)})')
        filters.append(f'replace("%{letter}", {json.dumps(padded, ensure_ascii=False)})')
    filters.append('replace("\\0", "%")')
    body = "{{ format|" + "|".join(filters) + " }}"
    return f"{{%- macro {DATE_FUNCTION}(format) -%}}{body}{{%- endmacro %}}\n"


def _with_calls(message: dict[str, Any], content: str | None, is_object: bool) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects or as JSON.

    `content` is its content if it has none.
    """
    if "tool_calls" not in message:
        return message
    calls = [_with_arguments(call, is_object) for call in message["tool_calls"]]
    default = {} if content is None else {"content": content}
    return {**default, **message, "tool_calls": calls}


def _with_arguments(call: Mapping[str, Any], is_object: bool) -> dict[str, Any]:
    if "function" in call:  # in Hermes' form it is left out
        return {**call, "function": _with_arguments(call["function"], is_object)}
    given = call.get("arguments") or {}
    if isinstance(given, str) and is_object:
        given = (json.loads(given) if given.strip() else None) or {}
    elif not isinstance(given, str) and not is_object:
        given = json.dumps(given, ensure_ascii=False)
    return {**call, "arguments": given}


def _has_python_form(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a text holds an object of arguments in Python's form: {'city': 'Rome'}."""
    calls = [
        call.get("function", call) for message in messages for call in message.get("tool_calls", ())
    ]
    return any(call["arguments"] and str(call["arguments"]) in text for call in calls)
