"""Rated answers from JSONL files, as of HelpSteer (arXiv:2311.09528): read and tokenised."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.data.jsonl import LineFaults, describe_type, read_jsonl
from reinforce_rl.errors import DataError
from reinforce_rl.reward_model.pairs import (
    SKIP_LIMIT,
    SKIP_MULTI_TURN,
    Message,
    answer_of,
    over_length,
    prompt_key,
    prompt_of,
)
from reinforce_rl.reward_model.template import encode_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SKIP_UNRATED = "no attribute is rated"

_ADVICE = (
    'Correct or remove these lines; a line is {"prompt": text or messages, "response": text, "attributes": '
    "{NAME: number, ...}}, or has the names as keys of its own; an attribute may be null or missing."
)


@dataclass(frozen=True)
class RatedAnswer:
    """One line of a file of ratings.

    Attributes:
        path, number: where it stands, for messages.
        messages: the prompt; the last message is not the assistant's.
        response: the answer.
        ratings: of each attribute asked for, in order; NaN where it is not rated.
    """

    path: Path
    number: int
    messages: tuple[Message, ...]
    response: str
    ratings: tuple[float, ...]


@dataclass(frozen=True)
class EncodedRating:
    """A rated answer as tokens.

    Attributes:
        prompt_key: as of `PreferencePair`.
        tokens: prompt and answer.
        ratings: as of `RatedAnswer`.
    """

    prompt_key: str
    tokens: tuple[int, ...]
    ratings: tuple[float, ...]


def read_ratings(path: str | Path, names: Sequence[str]) -> list[RatedAnswer]:
    """Read `{"prompt", "response", "attributes": {...}}` lines, or lines with the names as keys of their own.

    Raises:
        ConfigError: the file cannot be read.
        DataError: lines that cannot be understood (all counted, the first ten listed), no line, or an attribute that
            no line rates.
    """
    faults = LineFaults()
    found = []
    for line in read_jsonl(path):
        if line.value is None:
            faults.add(line.path, line.number, line.fault)
            continue
        try:
            ratings = _ratings_of(line.value, names)
            messages, response = prompt_of(line.value), answer_of(line.value, "response")
        except DataError as error:
            faults.add(line.path, line.number, str(error))
            continue
        found.append(RatedAnswer(line.path, line.number, tuple(messages), response, ratings))
    faults.raise_if_any(_ADVICE)
    unrated = [name for i, name in enumerate(names) if all(math.isnan(answer.ratings[i]) for answer in found)]
    if unrated:
        raise DataError(f"no line of {path} rates {', '.join(unrated)}; set full.attributes to names that it has")
    return found


def encode_ratings(
    answers: Sequence[RatedAnswer],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_answer_tokens: int | None = None,
    max_answers: int | None = None,
    single_turn_only: bool = False,
    seed: int = 0,
) -> tuple[list[EncodedRating], dict[str, int]]:
    """Tokenise, and leave out what does not fit or has no rating; the arguments are those of `pairs.encode_pairs`.

    Returns:
        what is used; and reasons to counts of what is not.

    Raises:
        ConfigError: the tokenizer has no chat template or no end-of-sequence token.
        DataError: the chat template refuses prompts, or nothing is left.
    """
    faults = LineFaults()
    skipped: Counter[str] = Counter()
    too_long: list[int] = []
    kept: list[EncodedRating] = []
    for answer in answers:
        if all(math.isnan(rating) for rating in answer.ratings):
            skipped[SKIP_UNRATED] += 1
            continue
        if single_turn_only and sum(m["role"] == "user" for m in answer.messages) > 1:
            skipped[SKIP_MULTI_TURN] += 1
            continue
        try:
            tokens = encode_conversation(
                tokenizer, answer.messages, answer.response, max_answer_tokens=max_answer_tokens
            )
        except DataError as error:
            faults.add(answer.path, answer.number, str(error))
            continue
        if len(tokens) > max_length:
            too_long.append(len(tokens))
        else:
            kept.append(EncodedRating(prompt_key(answer.messages), tuple(tokens), answer.ratings))
    faults.raise_if_any(_ADVICE)
    skipped |= over_length(too_long, max_length)
    if max_answers is not None and len(kept) > max_answers:
        skipped[SKIP_LIMIT] = len(kept) - max_answers
        kept = [kept[i] for i in sorted(random.Random(seed).sample(range(len(kept)), max_answers))]
    if not kept:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in skipped.items())
        raise DataError(f"none of {len(answers)} rated answers can be used ({reasons}); loosen the limits")
    return kept, dict(skipped)


def _ratings_of(value: dict[str, Any], names: Sequence[str]) -> tuple[float, ...]:
    given = value.get("attributes", value)
    if not isinstance(given, dict):
        raise DataError(f"attributes is {describe_type(given)}, expected an object of names and numbers")
    ratings = []
    for name in names:
        rating = given.get(name)
        if rating is None:
            ratings.append(math.nan)
        elif isinstance(rating, bool) or not isinstance(rating, int | float) or not math.isfinite(rating):
            raise DataError(f"the attribute {name} is {rating!r}, expected a finite number or null")
        else:
            ratings.append(float(rating))
    return tuple(ratings)
