"""The token format of a conversation for a reward model, in training and in serving.

During actor training the reward server gets the actor's own tokens and never renders text. Their format:

    the prompt, rendered by the chat template with its generation prompt  (see `reinforce_rl.data.prompts`)
    the answer's tokens
    the end-of-turn token (`<|im_end|>` for SmolLM2) if the answer is complete; nothing after it

The template would add a newline after the turn; the actor stops at the end-of-turn token, so it is left out. An answer
cut at the actor's `max_length` has no end-of-turn token.

If the reward model's tokenizer differs from the actor's, the server gets text, and `encode_sample` renders it to the
same format with the reward model's template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from reinforce_rl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.rewards.base import TextSample


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end-of-sequence token, at which the actor stops.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(["the tokenizer has no end-of-sequence token, so an answer's end cannot be marked"])
    return cast(int, tokenizer.eos_token_id)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Tokenise a conversation up to where the assistant's answer begins.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: the template rejects these messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(["the tokenizer has no chat template; use the folder of a chat model"])
    try:
        text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # it refuses, for instance, roles that do not alternate, or fails on `tool_calls: 5`
        raise DataError(f"the chat template refuses these messages: {error}") from error
    return _ids(tokenizer, cast(str, text))


def encode_answer(tokenizer: PreTrainedTokenizerBase, answer: str, max_tokens: int | None = None) -> list[int]:
    """Tokenise an answer and its end-of-turn token; keep the first `max_tokens` tokens.

    Surrounding white space is dropped: an actor's answer begins directly after the generation prompt.
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
    """Tokenise a prompt and its answer exactly as an actor would send them.

    `max_answer_tokens` cuts the answer, as an actor's `max_length` does; the end-of-turn token counts.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the template rejects these messages.
    """
    return encode_prompt(tokenizer, messages) + encode_answer(tokenizer, answer, max_answer_tokens)


def encode_sample(tokenizer: PreTrainedTokenizerBase, sample: TextSample) -> list[int]:
    """Tokenise a sample with the chat template. A plain prompt becomes one user message.

    A cut answer gets no end-of-turn token, so that it does not look finished.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the template rejects these messages.
    """
    messages = sample.messages or ({"role": "user", "content": sample.prompt},)
    answer = encode_answer(tokenizer, sample.response)
    return encode_prompt(tokenizer, messages) + (answer if sample.finished else answer[:-1])


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Special tokens are in the rendered text already. Verbose is off because callers check lengths by their own limit.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # type: ignore[arg-type]
