"""The tokens between two answers of a conversation: what the chat template and others wrote.

Answers are never decoded and tokenised again, as that may give other tokens than the policy drew
(verl#6719, NVIDIA-NeMo/Gym#1416). The template renders the conversation with a marker in place of
the last answer; only the text behind the marker is tokenised:

    prompt   <|user|> 2 + 2? <|end|> <|assistant|>
    answer                                         <call> 2 + 2 <|end|>
    between                                                             <|tool|> 4 <|end|> ...
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforce_rl.data.conversation import Conversation
from reinforce_rl.data.rendering import ChatRenderer
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

    @property
    def continues(self) -> bool:
        return not self.history


def next_turn(
    renderer: ChatRenderer,
    conversation: Conversation,
    answer: str,
    replies: Sequence[Mapping[str, Any]],
    *,
    stop_id: int | None,
) -> NextTurn:
    """Return the turn that follows an answer and the messages that reply to it.

    Args:
        conversation: the messages before the answer.
        answer: its text, without the token that ended it.
        replies: at least one message of a role other than assistant.
        stop_id: the token that ended the answer; it is in the answer's tokens already. None if
            a text ended it.

    Raises:
        DataError: the template refuses the messages or leaves out answers.
    """
    following = _with_messages(conversation, _answer(answer), *replies)
    marked = _with_messages(conversation, _answer(_MARKER), *replies)
    text = renderer.prompt_text(marked)
    if text.count(_MARKER) != 1:
        raise DataError(
            f"the chat template writes an answer {text.count(_MARKER)} times before "
            f"{replies[-1]['role']} messages; expected once. Use a model whose template keeps "
            "the assistant's turns",
            key="chat_template.answer.left_out",
        )
    before, _, between = text.partition(_MARKER)
    tokens = renderer.encode(between)
    # Most templates end a turn with the token that ends an answer. Tokenised together, the text
    # behind it gets no space that a SentencePiece tokenizer puts before a text.
    if stop_id is not None and tokens[:1] == [stop_id]:
        tokens = tokens[1:]
    has_same_history = _is_opened(renderer.prompt_text(conversation), before)
    thought = _thought_of(answer)
    keeps_thought = not thought or thought in renderer.prompt_text(following)
    if has_same_history and keeps_thought:
        return NextTurn(following, tokens, [])
    prompt = renderer.prompt(following)
    size = _common_end(prompt, tokens)
    return NextTurn(following, prompt[len(prompt) - size :], prompt[: len(prompt) - size])


def _common_end(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """Count the tokens at the end of both, at least the first of `prompt` left out.

    Tokenised with what stands before it, a text's first token may differ.
    """
    size = 0
    while size < min(len(prompt) - 1, len(tokens)) and prompt[-1 - size] == tokens[-1 - size]:
        size += 1
    return size


def _thought_of(answer: str) -> str:
    thought, _, _ = answer.rpartition(_END_OF_THOUGHT)
    return thought.rpartition(_THOUGHT)[2].strip()


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
