"""Built-in reward functions; `docs/rewards.md` has their signature and says how to write
your own.

Functions run in processes without torch, so nothing here imports it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reinforce_rl.rewards.base import checked_by
from reinforce_rl.rewards.numbers import expected_number, final_number

UNITS = ("words", "characters")


def gsm8k(
    prompt: str,
    response: str,
    record: Mapping[str, Any],
    *,
    answer_key: str = "answer",
    correct: float = 1.0,
    wrong: float = 0.0,
    last_number: bool = True,
) -> float:
    """Score whether the response ends in the right number, as in GSM8K (Cobbe et al. 2021,
    arXiv:2110.14168).

    Numbers are compared exactly: 5, 5.00 and 10/2 are equal. The last `#### 72`, `\\boxed{72}` or
    "the answer is 72" counts; if no answer is marked, `last_number` takes the last number of the
    response. The record's `answer_key` holds the right answer, as a number, a text or a solution
    that ends in `#### 72`; raises KeyError without it, ValueError if it holds no number, or
    several.
    """
    try:
        expected = expected_number(record[answer_key])
    except ValueError as error:
        raise ValueError(f"the record's '{answer_key}' {error}") from error
    answer = final_number(response, last_number=last_number)
    return correct if answer is not None and expected.equals(answer) else wrong


def _check_pattern(*, pattern: str, **others: object) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error


@checked_by(_check_pattern)
def matches(
    prompt: str,
    response: str,
    record: Mapping[str, Any],
    *,
    pattern: str,
    whole: bool = True,
    matched: float = 1.0,
    unmatched: float = 0.0,
) -> float:
    """Score whether the response matches a regular expression, white space around it included.

    A pattern that backtracks for ever exceeds the time limit, and its sample fails. `whole` asks
    for a match of the whole response rather than any part; `(?s)` at the pattern's beginning lets a
    dot match line breaks.
    """
    compiled = re.compile(pattern)
    match = compiled.fullmatch(response) if whole else compiled.search(response)
    return unmatched if match is None else matched


def _check_length(*, target: int, tolerance: float, unit: str = "words") -> None:
    if target < 0:
        raise ValueError(f"target is {target}; expected at least 0")
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}; expected above 0")
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}")


@checked_by(_check_length)
def length(
    prompt: str,
    response: str,
    record: Mapping[str, Any],
    *,
    target: int,
    tolerance: float,
    unit: str = "words",
) -> float:
    """Return max(0, 1 - |length - target| / tolerance), with the length in `unit`: `words` or
    `characters`.
    """
    count = len(response.split()) if unit == "words" else len(response)
    return max(0.0, 1.0 - abs(count - target) / tolerance)


def instructions(
    prompt: str, response: str, record: Mapping[str, Any], *, partial: bool = True
) -> float:
    """Score how far a response follows the instructions of its record, 0 to 1; without `partial` 1
    for all, else 0.

    The record's fields, at least one: `keys` asks for one JSON object with exactly these keys and a
    text for each, no two alike; `max_words` and `min_words` bound the number of words and of
    distinct words; `keyword` asks for this word or its plural. Words are those of the texts where
    there is such an object, else of the whole response.

    The score is the mean of what was reached. The keys count three times: the response opens with a
    brace, names the keys, is the object. Raises KeyError if the record asks for nothing.
    """
    text = response.strip()
    scores = []
    if keys := record.get("keys"):
        texts = _texts_by_key(text, keys)
        named = sum(f'"{key}":' in text for key in keys) / len(keys)
        scores += [float(text.startswith("{")), named, float(texts is not None)]
        text = text if texts is None else " ".join(texts)
    words = re.findall(r"[\w'-]+", text.lower())
    if "max_words" in record:
        scores.append(float(len(words) <= int(record["max_words"])))
    if "min_words" in record:
        scores.append(float(len(set(words)) >= int(record["min_words"])))
    if "keyword" in record:
        scores.append(
            float(
                re.search(
                    rf"(?<!\w){re.escape(record['keyword'])}(?:e?s)?(?!\w)", text, re.IGNORECASE
                )
                is not None
            )
        )
    if not scores:
        raise KeyError("keys, max_words, min_words or keyword")
    return sum(scores) / len(scores) if partial else float(min(scores) == 1.0)


def _texts_by_key(text: str, keys: Iterable[str]) -> list[str] | None:
    """Return the values of a JSON object that has exactly these keys and texts, no two alike."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.keys() != set(keys):
        return None
    texts = [text.strip().lower() if isinstance(text, str) else "" for text in answer.values()]
    return texts if all(texts) and len(set(texts)) == len(texts) else None


@functools.lru_cache(maxsize=1)
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ValueError(
            f"it needs vaderSentiment ({error}): pip install 'reinforce-rl[vader]'"
        ) from error
    return SentimentIntensityAnalyzer()


@checked_by(_analyzer)
def vader(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """Return VADER's compound sentiment of an English response, -1 (negative) to 1 (positive); 0 if
    it is empty.

    Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social
    Media Text".
    """
    return float(_analyzer().polarity_scores(response)["compound"])
