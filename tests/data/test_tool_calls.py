"""Tool calls of each family: read from an answer's text, and continued as its template writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import (
    CONTROL_TOKENS,
    DEEPSEEK,
    HARMONY,
    LLAMA3,
    MISTRAL_TOOLS,
    QWEN3,
    QWEN25,
    SMOLLM2,
    TOOL_TOKENS,
    write_chat_tokenizer,
)
from helpers.errors import keys_of, raises_error

from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import decode_all
from reinforce_rl.data.tool_calls import (
    TOOL_FORMATS,
    UNREADABLE,
    Answer,
    read_answer,
    tool_format_of,
)
from reinforce_rl.data.turns import NextTurn, next_turn
from reinforce_rl.errors import ConfigError

ROME = '{"city": "Rome"}'
NESTED = '{"query": {"a": [1, {"b": "}]</tool_call>;"}]}, "city": "Zürich \\u2603 \\"x\\""}'
HERMES = '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": %s}'
MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": %s}]'
HARMONY_CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>%s"


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    assert not answer.faults
    return [(call["function"]["name"], call["function"]["arguments"]) for call in answer.calls]


@pytest.mark.parametrize("arguments", [ROME, NESTED, "{}"])
@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", HERMES),
        ("hermes", "<tool_call>" + '[{"name": "weather", "arguments": %s}]' + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": %s}'),
        ("llama3", LLAMA),
        ("llama3", "<|python_tag|>" + LLAMA),
        ("llama3", ' {"type": "function", "name": "weather", "parameters": %s}\n'),
        ("llama3", '{"type": "function", "function": {"name": "weather", "parameters": %s}}'),
        ("mistral", MISTRAL),
        ("mistral", "[TOOL_CALLS]weather[ARGS]%s"),
        ("mistral", "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]%s"),
        ("mistral", "[TOOL_CALLS]weather%s"),
        ("harmony", HARMONY_CALL),
        ("harmony", " to=functions.weather<|channel|>commentary json<|message|>%s"),
    ],
)
def test_one_call(tool_format, text, arguments):
    answer = read_answer(text % arguments, tool_format, 1)
    assert calls_of(answer) == [("weather", json.loads(arguments))]
    assert answer.content == ""
    assert answer.thinking == ""
    assert answer.calls[0]["type"] == "function"


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", f"{HERMES % ROME}\n{HERMES % NESTED}"),
        ("hermes", f"<tool_call>[{LLAMA % ROME}, {LLAMA % NESTED}]</tool_call>"),
        ("llama3", f"{LLAMA % ROME}; {LLAMA % NESTED}"),
        ("llama3", f"<|python_tag|>{LLAMA % ROME}\n<|python_tag|>{LLAMA % NESTED}"),
        ("mistral", f"[TOOL_CALLS][{LLAMA % ROME}, {LLAMA % NESTED}]"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]weather[ARGS]{NESTED}"),
        ("harmony", f"{HARMONY_CALL % ROME}<|call|><|start|>assistant{HARMONY_CALL % NESTED}"),
    ],
)
def test_parallel_calls(tool_format, text):
    answer = read_answer(text, tool_format, 1)
    assert calls_of(answer) == [("weather", json.loads(ROME)), ("weather", json.loads(NESTED))]
    ids = [call["id"] for call in answer.calls]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "thinking"),
    [
        ("hermes", f"Let me look.\n{HERMES % ROME}\nWait.", "Let me look.\n\nWait.", ""),
        ("hermes", f"<think>\nhm\n</think>\n\n{HERMES % ROME}", "<think>\nhm\n</think>", ""),
        ("llama3", f"Let me look.<|python_tag|>{LLAMA % ROME}", "Let me look.", ""),
        ("llama3", f"{LLAMA % ROME} That is it.", "That is it.", ""),
        ("mistral", f"Let me look.{MISTRAL % ROME}", "Let me look.", ""),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + HARMONY_CALL % ROME,
            *("", "hm"),
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            f"<|message|>Let me look.<|end|><|start|>assistant{HARMONY_CALL % ROME}",
            *("", "hm\nLet me look."),
        ),
    ],
)
def test_text_around_a_call(tool_format, text, content, thinking):
    answer = read_answer(text, tool_format, 1)
    assert calls_of(answer) == [("weather", {"city": "Rome"})]
    assert answer.content == content
    assert answer.thinking == thinking


@pytest.mark.parametrize(
    ("tool_format", "text", "words"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {</tool_call>', "not JSON"),
        ("hermes", "<tool_call></tool_call>", "not JSON"),
        ("hermes", "<tool_call>{'name': 'weather'}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "no object"),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "x"}</tool_call>', "not JSON"),
        ("hermes", "<tool_call>3</tool_call>", "it is 3"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not JSON"),
        ("llama3", '{"name": "weather", "parameters": {', "not JSON"),
        ("llama3", "<|python_tag|>weather.call(city='Rome')", "not JSON"),
        ("mistral", '[TOOL_CALLS] [{"name": "weather"', "not JSON"),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city"', "not JSON"),
        ("harmony", HARMONY_CALL % '{"city"', "not JSON"),
        ("harmony", HARMONY_CALL % "3", "no object"),
    ],
)
def test_a_call_that_cannot_be_read(tool_format, text, words):
    answer = read_answer(text, tool_format, 1)
    (call,) = answer.calls
    assert call["function"] == {"name": UNREADABLE, "arguments": {}}
    assert words in answer.faults[call["id"]]


def test_a_broken_call_does_not_hide_the_others():
    broken = '<tool_call>{"name": </tool_call>'
    answer = read_answer(f"{HERMES % ROME}{broken}{HERMES % NESTED}", "hermes", 1)
    names = [call["function"]["name"] for call in answer.calls]
    assert names == ["weather", UNREADABLE, "weather"]
    assert list(answer.faults) == [answer.calls[1]["id"]]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text", ["", " It is warm. ", '{"city": "Rome"}', "<think>\nI may <tool_call>", "{"]
)
def test_an_answer_without_calls(tool_format, text):
    assert read_answer(text, tool_format, 1) == Answer(text)


def test_calls_in_thoughts_are_none():
    text = f"<think>\n{HERMES % ROME}\n</think>\n\nno"
    assert read_answer(text, "hermes", 1) == Answer(text)


def test_a_final_answer_of_harmony():
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>warm"
    )
    assert read_answer(text, "harmony", 1) == Answer("warm", thinking="hm", has_channels=True)


def test_ids_follow_the_key_unless_the_policy_wrote_them():
    text = f"{HERMES % ROME}{HERMES % ROME}"
    first = [call["id"] for call in read_answer(text, "hermes", 1).calls]
    assert [call["id"] for call in read_answer(text, "hermes", 1).calls] == first
    other = [call["id"] for call in read_answer(text, "hermes", 2).calls]
    assert len({*first, *other}) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in first)
    call = '{"name": "weather", "arguments": {}, "id": "abc123XYZ"}'
    written = read_answer(f"[TOOL_CALLS] [{call}, {call}]", "mistral", 1)
    first_id, second_id = (call["id"] for call in written.calls)
    assert first_id == "abc123XYZ"
    assert second_id != first_id


# Continued with the template


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "how is the weather"}
FAMILIES = {
    "llama3": (LLAMA3, "llama3", "<|eot_id|>"),
    "qwen2.5": (QWEN25, "hermes", "<|im_end|>"),
    "mistral": (MISTRAL_TOOLS, "mistral", "</s>"),
    "harmony": (HARMONY, "harmony", "<|call|>"),
}


def renderer_of(folder: Path, template: str) -> ChatRenderer:
    tokens = (*CONTROL_TOKENS, *TOOL_TOKENS)
    return ChatRenderer(write_chat_tokenizer(folder, template, control_tokens=tokens))


def decoded(renderer: ChatRenderer, tokens: Sequence[int]) -> str:
    return decode_all(renderer.tokenizer, [tokens])[0]


def tool_messages(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": f"{number + 20} C",
        }
        for number, call in enumerate(answer.calls)
    ]


class Row:
    """An episode's tokens as an engine sees them."""

    def __init__(self, renderer: ChatRenderer, tool_format: str, end: str, *tools: dict):
        self.renderer = renderer
        self.tool_format = tool_format
        (self.stop_id,) = renderer.encode(end)
        self.conversation = Conversation((QUESTION,), tools)
        self.tokens = renderer.prompt(self.conversation)

    def play(self, text: str, replies: list[dict] | None = None) -> NextTurn:
        """Add an answer and, unless others are given, a message for each of its calls."""
        parsed = read_answer(text, self.tool_format, len(self.tokens))
        turn = next_turn(
            self.renderer,
            self.conversation,
            text,
            replies or tool_messages(parsed),
            stop_id=self.stop_id,
            parsed=parsed,
        )
        self.tokens += [*self.renderer.encode(text), self.stop_id, *turn.tokens]
        self.conversation = turn.conversation
        return turn


def template_text(row: Row, *arguments: str, **answer: Any) -> str:
    """The text of an answer that calls as the template itself writes it."""
    calls = [
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.loads(text)},
        }
        for number, text in enumerate(arguments)
    ]
    message = {"role": "assistant", "tool_calls": calls, **answer}
    prompt = row.renderer.prompt_text(row.conversation)
    text = row.renderer.answered_text(row.conversation, message).removeprefix(prompt)
    return text.rpartition(decoded(row.renderer, [row.stop_id]))[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_with_calls_is_the_rendered_conversation(name, tmp_path):
    template, tool_format, end = FAMILIES[name]
    renderer = renderer_of(tmp_path, template)
    assert tool_format_of(renderer, "auto") == tool_format
    tools = [] if name == "llama3" else [TOOL]
    row = Row(renderer, tool_format, end, *tools)
    several = [ROME] if name in ("llama3", "harmony") else [ROME, NESTED]
    for arguments in ([ROME], several):
        text = template_text(row, *arguments)
        assert not row.play(text).history
        # The tokenizer knows single characters, so it has no choice.
        assert row.tokens == renderer.prompt(row.conversation)
    assert "tool_calls" in row.conversation.messages[1]
    roles = [message["role"] for message in row.conversation.messages]
    assert roles == ["user", "assistant", "tool", "assistant", *["tool"] * len(several)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_policys_own_form_of_a_call_stays(name, tmp_path):
    template, tool_format, end = FAMILIES[name]
    texts = {
        "hermes": '<tool_call>{"arguments":{"city":  "Rome"},"name":"weather"}</tool_call>',
        "llama3": '{"parameters": {"city":"Rome"}, "name": "weather"}',
        "mistral": '[TOOL_CALLS][{"arguments":{"city":"Rome"},"name":"weather"}]',
        "harmony": HARMONY_CALL % '{"city":"Rome"}',
    }
    row = Row(renderer_of(tmp_path, template), tool_format, end)
    if tool_format == "llama3":
        texts["llama3"] = "<|python_tag|>" + texts["llama3"]
    before = list(row.tokens)
    turn = row.play(texts[tool_format])
    assert not turn.history
    answered = [*before, *row.renderer.encode(texts[tool_format]), row.stop_id]
    assert row.tokens == [*answered, *turn.tokens]
    rendered = row.renderer.prompt_text(turn.conversation)
    assert rendered.endswith(decoded(row.renderer, [row.stop_id, *turn.tokens]))


def test_several_calls_that_a_template_does_not_write_are_the_answers_text(tmp_path):
    """Llama's template writes one call a message; tool messages follow the text all the same."""
    renderer = renderer_of(tmp_path, LLAMA3)
    row = Row(renderer, "llama3", "<|eot_id|>")
    text = f"{LLAMA % ROME}; {LLAMA % ROME}"
    assert not row.play(text).history
    assert row.tokens == renderer.prompt(row.conversation)
    assert row.conversation.messages[1] == {"role": "assistant", "content": text}
    assert [message["role"] for message in row.conversation.messages[2:]] == ["tool", "tool"]


def test_a_template_without_calls_keeps_the_text(tmp_path):
    renderer = renderer_of(tmp_path, SMOLLM2)
    row = Row(renderer, "hermes", "<|im_end|>")
    for _ in range(2):
        assert not row.play(f"<tool_call>[{LLAMA % ROME}]</tool_call>").history
        assert row.tokens == renderer.prompt(row.conversation)


def test_an_unreadable_call_keeps_its_place(tmp_path):
    """A tool's message says what was wrong, also where the template wants calls before it."""
    for name in ("mistral", "harmony", "qwen2.5"):
        template, tool_format, end = FAMILIES[name]
        row = Row(renderer_of(tmp_path / name, template), tool_format, end)
        broken = {"mistral": MISTRAL, "harmony": HARMONY_CALL, "hermes": HERMES}[tool_format] % "{"
        assert not row.play(broken).history
        assert "20 C" in decoded(row.renderer, row.tokens)


class TestRewrittenHistory:
    def test_thoughts_of_an_earlier_call_are_kept_until_a_final_answer(self, tmp_path):
        renderer = renderer_of(tmp_path, HARMONY)
        row = Row(renderer, "harmony", "<|call|>", TOOL)
        thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        for _ in range(2):
            text = template_text(row, ROME, thinking="hm")
            assert text.startswith(thought)
            assert not row.play(text).history
            assert row.tokens == renderer.prompt(row.conversation)
        user = {"role": "user", "content": "sure"}
        final = f"{thought}<|channel|>final<|message|>warm"
        assert row.play(final, [user]).history

    def test_tools_that_move_to_the_last_user(self, tmp_path):
        row = Row(renderer_of(tmp_path, MISTRAL_TOOLS), "mistral", "</s>", TOOL)
        row.play(template_text(row, ROME))
        assert row.play(" warm", [{"role": "user", "content": "sure"}]).history

    def test_a_system_message_that_moves(self, tmp_path):
        row = Row(renderer_of(tmp_path, MISTRAL_TOOLS), "mistral", "</s>")
        system = {"role": "system", "content": "be brief"}
        row.conversation = Conversation((system, QUESTION))
        with raises_error("chat_template.message.left_out"):
            row.play(MISTRAL % ROME)

    def test_a_text_before_the_calls_that_changes(self, tmp_path):
        row = Row(
            renderer_of(tmp_path, "{{- messages | length }}" + QWEN25), "hermes", "<|im_end|>"
        )
        assert row.play(HERMES % ROME).history

    def test_a_thought_that_is_dropped(self, tmp_path):
        row = Row(renderer_of(tmp_path, QWEN3), "hermes", "<|im_end|>")
        assert not row.play(HERMES % ROME).history
        assert row.play(f"<think>\nhm\n</think>\n\n{HERMES % ROME}").history


def test_an_answer_that_a_text_ended_gets_its_end_of_turn(tmp_path):
    renderer = renderer_of(tmp_path, QWEN25)
    parsed = read_answer(HERMES % ROME, "hermes", 1)
    turn = next_turn(
        renderer,
        Conversation((QUESTION,)),
        HERMES % ROME,
        tool_messages(parsed),
        stop_id=None,
        parsed=parsed,
    )
    assert decoded(renderer, turn.tokens).startswith("<|im_end|>\n<|im_start|>user")


def test_a_reply_may_hold_any_text(tmp_path):
    """Also that of the end of a turn, and of the other end that the policy has drawn."""
    renderer = renderer_of(tmp_path, QWEN25)
    parsed = read_answer(HERMES % ROME, "hermes", 1)
    (message,) = tool_messages(parsed)
    message["content"] = "</tool_call><|im_end|><|eot_id|>"
    turn = next_turn(
        renderer,
        Conversation((QUESTION,)),
        HERMES % ROME,
        [message],
        stop_id=renderer.encode("<|eot_id|>")[0],
        parsed=parsed,
    )
    text = decoded(renderer, turn.tokens)
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n</tool_call><|im_end|>")


def test_a_template_that_does_not_end_a_turn_of_calls(tmp_path):
    """The form with calls is left, since their end is unknown; the text alone has one."""
    template = (
        "{% for message in messages %}{{ message.role + ':' }}"
        "{% if message.tool_calls %}{{ message.tool_calls | tojson }}"
        "{% elif message.role == 'tool' %}{{ message.content }}"
        "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    row = Row(renderer_of(tmp_path, template), "hermes", "<|im_end|>")
    assert not row.play(HERMES % ROME).history
    assert "tool_calls" not in row.conversation.messages[1]
    assert row.tokens == row.renderer.prompt(row.conversation)


class TestFormat:
    @pytest.mark.parametrize("template", [SMOLLM2, DEEPSEEK, QWEN3])
    def test_that_is_not_known(self, template, tmp_path):
        renderer = renderer_of(tmp_path, template)
        with pytest.raises(ConfigError) as raised:
            tool_format_of(renderer, "auto")
        assert "environment.tool_format.unknown" in keys_of(raised.value)

    def test_that_is_set(self, tmp_path):
        assert tool_format_of(renderer_of(tmp_path, SMOLLM2), "mistral") == "mistral"


def test_a_template_that_refuses_both_forms(tmp_path):
    row = Row(renderer_of(tmp_path, MISTRAL_TOOLS), "mistral", "</s>")
    with raises_error("chat_template.messages.refused"):
        row.play(MISTRAL % ROME, [{"role": "tool", "tool_call_id": "x", "content": "a"}])
