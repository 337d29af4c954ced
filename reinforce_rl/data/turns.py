"""The tokens between two answers of a conversation: what the chat template and others wrote.

Answers are never decoded and tokenised again, as that may give other tokens than the policy drew
(verl#6719, NVIDIA-NeMo/Gym#1416). The template renders the conversation with a marker in place of
the last answer; only the text behind the marker is tokenised:

    prompt   <|user|> 2 + 2? <|end|> <|assistant|>
    answer                                         <call> 2 + 2 <|end|>
    between                                                             <|tool|> 4 <|end|> ...

An answer with tool calls has the marker as the argument of its calls, and `between` begins at the
end of its turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforce_rl.data import jsonl
from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
from reinforce_rl.data.tokenizer import decode_all
from reinforce_rl.data.tool_calls import Answer
from reinforce_rl.errors import DataError

_THOUGHT = "<think>"
_END_OF_THOUGHT = "</think>"
_MARKER = f"answer {secrets.token_hex(8)}"  # in no text of a data set or an environment


@dataclass(frozen=True)
class NextTurn:
    """The turn after an answer."""

    conversation: Conversation  # up to the next answer
    tokens: list[int]  # between the last token of the answer and the first of the next
    # Empty if the template writes what came before as the policy has read and written it.
    # Otherwise, as where it leaves out earlier thoughts, a new context begins: the conversation as
    # the template writes it now is these tokens, then `tokens`.
    history: list[int]


def next_turn(
    renderer: ChatRenderer,
    conversation: Conversation,
    answer: str,
    replies: Sequence[Mapping[str, Any]],
    *,
    stop_id: int | None,
    parsed: Answer | None = None,
) -> NextTurn:
    """Return the turn that follows an answer and the messages that reply to it.

    Args:
        conversation: the messages before the answer.
        answer: its text, without the token that ended it.
        replies: at least one message of a role other than assistant.
        stop_id: the token that ended the answer; it is in the answer's tokens already. None if
            a text ended it.
        parsed: the answer's content, thoughts and tool calls, where it may have calls.

    Raises:
        DataError: the template refuses the messages or leaves out answers.
    """
    forms = [_answer(answer)]
    if parsed is not None and (parsed.calls or parsed.has_channels):
        # Llama's template refuses several calls in a message, and others do not write any; they
        # render a tool's message behind the text as well.
        forms.insert(0, parsed.message)
    refusals: list[DataError] = []
    for form in forms:
        try:
            return _next_turn(renderer, conversation, form, replies, stop_id)
        except DataError as error:
            refusals.append(error)
    raise refusals[0]


def _next_turn(
    renderer: ChatRenderer,
    conversation: Conversation,
    answer: Mapping[str, Any],
    replies: Sequence[Mapping[str, Any]],
    stop_id: int | None,
) -> NextTurn:
    following = _with_messages(conversation, answer, *replies)
    text = renderer.prompt_text(_with_messages(conversation, _marked(answer), *replies))
    calls = answer.get("tool_calls", ())
    if text.count(_MARKER) != max(len(calls), 1):
        raise DataError(
            f"the chat template writes an answer {text.count(_MARKER)} times before "
            f"{replies[-1]['role']} messages; expected once. Use a model whose template keeps "
            "the assistant's turns",
            key="chat_template.answer.left_out",
        )
    before, _, between = text.rpartition(_MARKER)
    prompt = renderer.prompt_text(conversation)
    if calls:
        between = between[_end_of_calls(renderer, conversation, between, stop_id) :]
        has_same_history = before.startswith(_without_opened_thought(prompt))
    else:
        has_same_history = _is_opened(prompt, before)
    tokens = renderer.encode(jsonl.check_text(between, "the text between two answers"))
    # Most templates end a turn with the token that ends an answer. Tokenised together, the text
    # behind it gets no space that a SentencePiece tokenizer puts before a text.
    if stop_id is not None and tokens[:1] == [stop_id]:
        tokens = tokens[1:]
    thought = answer.get("thinking") or _thought_of(answer["content"])
    keeps_thought = not thought or thought in renderer.prompt_text(following)
    if has_same_history and keeps_thought:
        return NextTurn(following, tokens, [])
    jsonl.check_text(renderer.prompt_text(following), "the conversation")
    context = renderer.prompt(following)
    start = len(context) - _common_end(context, tokens)
    return NextTurn(following, context[start:], context[:start])


def _common_end(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the tokens at the end of both, at least the first of `prompt` left out.

    Tokenised with what stands before it, a text's first token may differ.
    """
    size = 0
    while size < min(len(prompt) - 1, len(tokens)) and prompt[-1 - size] == tokens[-1 - size]:
        size += 1
    return size


def _marked(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer with the marker as its content, or as the argument of each of its calls."""
    if "tool_calls" not in answer:
        return {**answer, "content": _MARKER}
    calls = [
        {**call, "function": {**call["function"], "arguments": {"marker": _MARKER}}}
        for call in answer["tool_calls"]
    ]
    return {**answer, "tool_calls": calls}


def _end_of_calls(
    renderer: ChatRenderer, conversation: Conversation, text: str, stop_id: int | None
) -> int:
    """Return where the end of an answer's turn is in what the template writes behind a marker.

    The text between is the rest of the call, which the policy has written in its own way.
    """
    ends = [renderer.end_of_turn(conversation).strip()]
    if stop_id is not None:
        ends.append(decode_all(renderer.tokenizer, [[stop_id]])[0])
    positions = [text.find(end) for end in ends if end]
    positions = [position for position in positions if position >= 0]
    if not positions:
        raise DataError(
            "the chat template writes no end of turn after an answer's tool calls; expected "
            f"{' or '.join(repr(end) for end in ends)}. Use a model whose template ends the "
            "assistant's turns",
            key="chat_template.tool_calls.no_end",
        )
    # The first one, since the replies behind it may contain such texts too.
    return min(positions)


def _thought_of(answer: str) -> str:
    thought, _, _ = answer.rpartition(_END_OF_THOUGHT)
    return thought.rpartition(_THOUGHT)[2].strip()


def _without_opened_thought(prompt: str) -> str:
    for text in (_END_OF_THOUGHT, _THOUGHT):
        prompt = prompt.rstrip().removesuffix(text)
    return prompt.rstrip()


def _is_opened(prompt: str, before: str) -> bool:
    """Whether a prompt is the text before an answer, or that with the beginning of a thought.

    Templates that open a thought for the next answer do not write it before earlier ones. Some
    put a space before earlier answers, which the next one begins with by itself.
    """
    before = before.rstrip()
    opening = prompt.removeprefix(before)
    return prompt.startswith(before) and opening.split() in (
        [],
        [_THOUGHT],
        [_THOUGHT, _END_OF_THOUGHT],
    )


def _answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _with_messages(conversation: Conversation, *messages: Mapping[str, Any]) -> Conversation:
    return replace(conversation, messages=(*conversation.messages, *messages))
