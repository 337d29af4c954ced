"""Preference pairs from JSONL files: read, tokenised, split by prompt."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.data.jsonl import LineFaults, describe_type, read_jsonl
from reinforce_rl.data.prepare import check_encodable, messages_of_text
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.reward_model.template import encode_answer, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

SKIP_SAME = "chosen and rejected are the same"
SKIP_MULTI_TURN = "more than one user turn"
SKIP_LIMIT = "over data.max_pairs"
_WARN_ABOVE = 0.1  # share of the data that is left out, where no key asks for it

_ADVICE = 'Correct or remove these lines; a line is {"prompt": text or messages, "chosen": text, "rejected": text}.'


@dataclass(frozen=True)
class PreferencePair:
    """One line of a file of pairs.

    Attributes:
        path, number: where it stands, for messages.
        messages: the prompt; the last message is not the assistant's.
        chosen, rejected: the better and the worse answer.
    """

    path: Path
    number: int
    messages: tuple[Message, ...]
    chosen: str
    rejected: str

    @property
    def prompt_key(self) -> str:
        """See `prompt_key`."""
        return prompt_key(self.messages)


@dataclass(frozen=True)
class EncodedPair:
    """A pair as tokens.

    Attributes:
        prompt_key: as of `PreferencePair`.
        prompt: tokens up to where the answer begins.
        chosen, rejected: the answers' tokens, the end-of-turn token included where the answer was not cut.
    """

    prompt_key: str
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class EncodedPairs:
    """The pairs that are used, and what became of the others: reason to count."""

    pairs: tuple[EncodedPair, ...]
    skipped: dict[str, int]


def read_pairs(path: str | Path) -> list[PreferencePair]:
    """Read `{"prompt", "chosen", "rejected"}` lines.

    `prompt` is a list of messages, or a text of the HH form ("\\n\\nHuman: ...\\n\\nAssistant:"), or any other text,
    which is then one user message. The key `messages` is taken for `prompt` too. Other keys are ignored.

    Raises:
        ConfigError: the file cannot be read.
        DataError: lines that cannot be understood (all counted, the first ten listed), or no line at all.
    """
    faults = LineFaults()
    pairs = []
    for line in read_jsonl(path):
        if line.value is None:
            faults.add(line.path, line.number, line.fault)
            continue
        try:
            messages = prompt_of(line.value)
            chosen, rejected = (answer_of(line.value, key) for key in ("chosen", "rejected"))
        except DataError as error:
            faults.add(line.path, line.number, str(error))
            continue
        pairs.append(PreferencePair(line.path, line.number, tuple(messages), chosen, rejected))
    faults.raise_if_any(_ADVICE)
    if not pairs:
        raise DataError(f"{path} holds no line; expected preference pairs. {_ADVICE}")
    return pairs


def encode_pairs(
    pairs: Sequence[PreferencePair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_answer_tokens: int | None = None,
    max_pairs: int | None = None,
    single_turn_only: bool = False,
    seed: int = 0,
) -> EncodedPairs:
    """Tokenise pairs and leave out those that do not fit, with a count of each reason.

    Args:
        pairs: as read.
        tokenizer: the trunk's.
        max_length: tokens of prompt and answer; a pair with a longer answer is skipped.
        max_answer_tokens: answers are cut there first; None leaves them whole.
        max_pairs: use so many, drawn by the seed; None for all.
        single_turn_only: leave out prompts with more than one user turn.
        seed: of the draw.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the chat template refuses prompts, or nothing is left.
    """
    faults = LineFaults()
    skipped: Counter[str] = Counter()
    too_long: list[int] = []
    kept: list[EncodedPair] = []
    for pair in pairs:
        if single_turn_only and sum(m["role"] == "user" for m in pair.messages) > 1:
            skipped[SKIP_MULTI_TURN] += 1
            continue
        try:
            prompt = encode_prompt(tokenizer, pair.messages)
        except DataError as error:
            faults.add(pair.path, pair.number, str(error))
            continue
        chosen, rejected = (encode_answer(tokenizer, a, max_answer_tokens) for a in (pair.chosen, pair.rejected))
        if chosen == rejected:
            skipped[SKIP_SAME] += 1
        elif (length := len(prompt) + max(len(chosen), len(rejected))) > max_length:
            too_long.append(length)
        else:
            kept.append(EncodedPair(pair.prompt_key, tuple(prompt), tuple(chosen), tuple(rejected)))
    faults.raise_if_any(_ADVICE)
    skipped |= over_length(too_long, max_length)
    if max_pairs is not None and len(kept) > max_pairs:
        skipped[SKIP_LIMIT] = len(kept) - max_pairs
        kept = [kept[i] for i in sorted(random.Random(seed).sample(range(len(kept)), max_pairs))]
    if not kept:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in skipped.items())
        raise DataError(f"none of {len(pairs)} pairs can be used ({reasons}); loosen the limits")
    return EncodedPairs(tuple(kept), dict(skipped))


def over_length(lengths: Sequence[int], max_length: int) -> Counter[str]:
    """Count sequences beyond a limit, in tokens, under a reason that names both and what would keep them."""
    if not lengths:
        return Counter()
    found, most = f"{min(lengths)} to {max(lengths)} tokens", max(lengths)
    return Counter({f"{found}, above data.max_length={max_length}; data.max_length={most} keeps all": len(lengths)})


def left_out(skipped: Mapping[str, int], total: int) -> list[str]:
    """A line for each reason; a warning where much is lost that no key asks to leave out."""
    lines = []
    for reason, count in skipped.items():
        much = count > _WARN_ABOVE * total and reason not in (SKIP_LIMIT, SKIP_MULTI_TURN)
        lines.append(f"{'WARNING:' if much else ' '} {count} of {total} ({count / total:.0%}) left out: {reason}")
    return lines


def split_by_prompt(keys: Sequence[str], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the training and of the held-out pairs; pairs with one key are always on one side.

    A prompt's side follows from a hash of its key and the seed. So it does not depend on which other pairs are in the
    file: a pair held out today is not trained on tomorrow, when lines were added.

    Args:
        keys: the prompt key of each pair.
        fraction: share of the prompts to hold out, above 0 and below 1.
        seed: draws them.

    Raises:
        ConfigError: the fraction is out of range.
        DataError: one side would be empty.
    """
    if not 0 < fraction < 1:
        raise ConfigError([f"data.held_out_fraction is {fraction}; expected above 0 and below 1"])
    held_out = [index for index, key in enumerate(keys) if prompt_position(key, seed) < fraction]
    away = set(held_out)
    train = [index for index in range(len(keys)) if index not in away]
    if not train or not held_out:
        raise DataError(
            f"{len(keys)} pairs of {len(set(keys))} prompts cannot be split with data.held_out_fraction={fraction}: "
            "one side would be empty; use more pairs or another fraction"
        )
    return train, held_out


def prompt_key(messages: Sequence[Message]) -> str:
    """Equal for prompts that differ in case and white space alone."""
    return json.dumps([(m["role"], " ".join(m["content"].casefold().split())) for m in messages])


def prompt_position(key: str, seed: int) -> float:
    """A number in [0, 1), even over prompts, that follows from the key and the seed alone."""
    digest = hashlib.sha256(f"{seed}\n{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def prompt_of(value: dict[str, Any]) -> list[Message]:
    """The conversation up to an answer, of one line; see `read_pairs`.

    Raises:
        DataError: it cannot be understood.
    """
    key = next((name for name in ("prompt", "messages") if name in value), None)
    if key is None:
        raise DataError(f"the key prompt is missing; found {', '.join(value) or 'no key'}")
    prompt = value[key]
    if isinstance(prompt, str):
        check_encodable(prompt, key)
        messages = messages_of_text(prompt)
    elif isinstance(prompt, list):
        messages = [_message_of(message, f"{key}[{index}]") for index, message in enumerate(prompt)]
    else:
        raise DataError(f"{key} is {describe_type(prompt)}, expected a string or a list of messages")
    if not messages or not messages[-1]["content"].strip():
        raise DataError(f"{key} is empty, or its last message is")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{key} ends with an assistant message; a prompt ends where the assistant is to answer")
    return messages


def _message_of(message: object, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise DataError(f"{where} is no message with a role system, user or assistant and a string as content")
    check_encodable(content, where)
    return {"role": str(role), "content": content}  # as it stands: so the actor's prompts are rendered too


def answer_of(value: dict[str, Any], key: str) -> str:
    """The text under a key of one line.

    Raises:
        DataError: there is none.
    """
    if key not in value:
        raise DataError(f"the key {key} is missing; found {', '.join(value) or 'no key'}")
    if not isinstance(value[key], str):
        raise DataError(f"{key} is {describe_type(value[key])}, expected a string")
    check_encodable(value[key], key)
    return value[key]
