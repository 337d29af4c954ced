"""The one form in which a reward model sees a conversation, in training and in serving.

While the actor trains, the reward server is sent the actor's own tokens and never renders text. They have this form:

    the prompt, rendered by the chat template with its generation prompt  (as `reinforce_rl.data.prompts` does it)
    the answer's tokens
    the end-of-turn token (`<|im_end|>` for SmolLM2), where the answer came to its end; nothing after it

The template itself would put a newline behind the end of a turn. The actor stops at the end-of-turn token, so there is
none here. An answer that was cut at the actor's `max_length` has no end-of-turn token.

Where the reward model has another tokenizer than the actor, the server is sent texts, and `encode_sample` renders them
into the same form, by the reward model's own template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from reinforce_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.rewards.base import TextSample


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer: the tokenizer's end-of-sequence token, at which the actor stops.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(["the tokenizer has no end-of-sequence token, so an answer's end cannot be marked"])
    return cast(int, tokenizer.eos_token_id)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokens of a conversation up to where the assistant's answer begins.

    Args:
        tokenizer: with a chat template.
        messages: each with `role` and `content`.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the template refuses these messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(["the tokenizer has no chat template; use the folder of a chat model"])
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # it refuses, for instance, roles that do not alternate, or fails on `tool_calls: 5`
        raise DataError(f"the chat template refuses these messages: {error}") from error
    return _ids(tokenizer, cast(str, text))


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str, max_tokens: int | None = None) -> list[int]:
    """Tokens of an answer with the end-of-turn token, or its first `max_tokens` tokens where it has more.

    White space around the answer is dropped: an actor begins its answer right behind the generation prompt.
    """
    ids = [*_ids(tokenizer, answer.strip()), end_of_turn_id(tokenizer)]
    return ids if max_tokens is None else ids[:max_tokens]


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    answer: str,
    *,
    max_answer_tokens: int | None = None,
) -> list[int]:
    """Tokens of a prompt and its answer, as the reward server gets them from an actor that gave this answer.

    Args:
        tokenizer: with a chat template.
        messages: the prompt, each message with `role` and `content`.
        answer: the assistant's answer, as text.
        max_answer_tokens: cut the answer there, as an actor's `max_length` does; the end-of-turn token counts.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the template refuses these messages.
    """
    return encode_prompt(tokenizer, messages) + encode_answer(tokenizer, answer, max_answer_tokens)


def encode_sample(tokenizer: PreTrainedTokenizerBase, sample: TextSample) -> list[int]:
    """Tokens of a sample by the tokenizer's own chat template. A plain prompt is one user message.

    An answer that was cut has no end-of-turn token, so that it does not look finished.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the template refuses these messages.
    """
    messages = sample.messages or ({"role": "user", "content": sample.prompt},)
    answer = encode_answer(tokenizer, sample.response)
    return encode_prompt(tokenizer, messages) + (answer if sample.finished else answer[:-1])


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Special tokens are in the rendered text already. Verbose is off because callers check lengths by their own limit.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[arg-type]
