"""Tokens between answers equal those of the whole conversation, and answers are kept as drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.chat_templates import DEEPSEEK, LLAMA3, MISTRAL, QWEN3, QWEN25, write_chat_tokenizer
from helpers.errors import raises_error

from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer, TemplateOptions
from reinforce_rl.data.turns import next_turn

QUESTION = {"role": "user", "content": "what is 2+2"}
ANSWERS = ("let me see: 2+2", "it is 4", "yes")
REPLIES = ({"role": "tool", "content": "4"}, {"role": "user", "content": "sure"})
ENDS = {"llama3": "<|eot_id|>", "qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>"}
TEMPLATES = {"llama3": LLAMA3, "qwen2.5": QWEN25, "qwen3": QWEN3}


def renderer_of(folder: Path, template: str, **kwargs: object) -> ChatRenderer:
    return ChatRenderer(write_chat_tokenizer(folder, template), TemplateOptions(kwargs=kwargs))


def stop_of(renderer: ChatRenderer, name: str) -> int:
    (stop_id,) = renderer.encode(ENDS[name])
    return stop_id


@pytest.mark.parametrize("name", ["llama3", "qwen2.5"])
def test_an_episode_is_the_rendered_conversation(name, tmp_path):
    renderer = renderer_of(tmp_path, TEMPLATES[name])
    conversation = Conversation((QUESTION,))
    tokens = renderer.prompt(conversation)
    stop_id = stop_of(renderer, name)
    for answer, reply in zip(ANSWERS, REPLIES, strict=False):
        tokens += [*renderer.encode(answer), stop_id]
        turn = next_turn(renderer, conversation, answer, [reply], stop_id=stop_id)
        assert not turn.history
        tokens += turn.tokens
        conversation = turn.conversation
        # The tokenizer knows single characters, so it has no choice.
        assert tokens == renderer.prompt(conversation)
    assert [message["role"] for message in conversation.messages] == [
        *("user", "assistant", "tool", "assistant", "user"),
    ]


def test_the_answers_own_text_plays_no_part(tmp_path):
    """A template strips contents; the policy's white space stays as it was drawn."""
    renderer = renderer_of(tmp_path, LLAMA3)
    stop_id = stop_of(renderer, "llama3")
    conversation = Conversation((QUESTION,))
    plain, spaced = (
        next_turn(renderer, conversation, text, REPLIES[:1], stop_id=stop_id)
        for text in ("it is 4", "  it is 4 \n")
    )
    assert plain.tokens == spaced.tokens
    assert not spaced.history


def test_an_end_that_the_template_does_not_write_is_followed_by_its_own(tmp_path):
    renderer = renderer_of(tmp_path, QWEN25)
    other_stop = renderer.encode("<|eot_id|>")[0]
    turn = next_turn(renderer, Conversation((QUESTION,)), "4", REPLIES[:1], stop_id=other_stop)
    assert turn.tokens[0] == stop_of(renderer, "qwen2.5")


class TestThoughts:
    THOUGHT = "<think>\nhm\n</think>\n\n4"

    def test_a_template_that_drops_them_begins_a_new_row(self, tmp_path):
        renderer = renderer_of(tmp_path, QWEN3)
        stop_id = stop_of(renderer, "qwen3")
        turn = next_turn(
            renderer, Conversation((QUESTION,)), self.THOUGHT, REPLIES[1:], stop_id=stop_id
        )
        assert turn.history
        assert "hm" not in renderer.prompt_text(turn.conversation)

    def test_answers_without_them_continue(self, tmp_path):
        renderer = renderer_of(tmp_path, QWEN3, enable_thinking=False)
        stop_id = stop_of(renderer, "qwen3")
        turn = next_turn(renderer, Conversation((QUESTION,)), "4", REPLIES[1:], stop_id=stop_id)
        assert not turn.history

    def test_a_template_that_opens_them_alone(self, tmp_path):
        renderer = renderer_of(tmp_path, DEEPSEEK)
        (stop_id,) = renderer.encode("<|end_of_sentence|>")
        thought = next_turn(
            renderer, Conversation((QUESTION,)), "hm</think>4", REPLIES[1:], stop_id=stop_id
        )
        assert thought.history


def test_a_system_message_that_moves_begins_a_new_row(tmp_path):
    renderer = renderer_of(tmp_path, MISTRAL)
    (stop_id,) = renderer.encode("<|end_of_sentence|>")
    system = {"role": "system", "content": "be brief"}
    conversation = Conversation((system, QUESTION))
    turn = next_turn(renderer, conversation, "4", REPLIES[1:], stop_id=stop_id)
    assert turn.history


def test_half_a_surrogate_pair_is_refused(tmp_path):
    """A tokenizer would raise a TypeError, which would end the run."""
    renderer = renderer_of(tmp_path, LLAMA3)
    reply = {"role": "tool", "content": "half: \ud83d"}
    with raises_error("data.text.half_a_character"):
        next_turn(renderer, Conversation((QUESTION,)), "it is 4", [reply], stop_id=None)


def test_a_template_without_answers_is_refused(tmp_path):
    users_only = "{% for message in messages if message.role != 'assistant' %}{{ message.content }}"
    renderer = renderer_of(tmp_path, users_only + "{% endfor %}")
    with raises_error("chat_template.answer.left_out"):
        next_turn(renderer, Conversation((QUESTION,)), "4", REPLIES[1:], stop_id=5)
