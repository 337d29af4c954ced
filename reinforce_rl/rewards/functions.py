"""Reward functions that come with the project. `docs/reward-functions.md` says how to write one of your own.

A reward function scores one sample:

    def reward(prompt: str, response: str, record: Mapping[str, Any], **kwargs) -> float

    prompt      as the policy read it, chat template applied
    response    without the policy's special tokens
    record      every other field of the prompt's JSON line, such as `answer`
    kwargs      from the configuration, keyword only

It runs in a process of its own kind, so nothing here imports torch. A function may be given a `check` by `checked_by`.
It is called with the kwargs when a pool starts, and raises ValueError where they cannot work.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from reinforce_rl.rewards.answers import parse_number, same_answer
from reinforce_rl.rewards.function_process.loading import checked_by

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
    """Whether the response ends in the right number, as in GSM8K (Cobbe et al. 2021, arXiv:2110.14168).

    Numbers are compared exactly: 5, 5.00 and 10/2 are one number. See `answers.final_answer` for what is read as the
    answer.

    Args:
        prompt: not read.
        response: holds `#### 72`, `\\boxed{72}` or "the answer is 72"; the last of these counts.
        record: `answer_key` is the right answer, a number or a text of one.
        answer_key: the record's field.
        correct, wrong: the rewards.
        last_number: where nothing marks an answer, the last number of the response is taken for it.

    Raises:
        KeyError: the record has no such field.
        ValueError: it holds no number.
    """
    expected = parse_number(str(record[answer_key]))
    if expected is None:
        raise ValueError(f"the record's '{answer_key}' holds no number")
    return correct if same_answer(response, expected, last_number=last_number) else wrong


def _check_pattern(*, pattern: str, whole: bool = True, matched: float = 1.0, unmatched: float = 0.0) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error


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
    """Whether the response has a form that a regular expression describes.

    A pattern that backtracks for ever is ended by the time limit, and its sample fails.

    Args:
        prompt: not read.
        response: is matched as it is, white space around it included.
        record: not read.
        pattern: of Python's `re`. `(?s)` at its beginning lets a dot match line breaks.
        whole: the whole response must match; false: some part of it.
        matched, unmatched: the rewards.
    """
    compiled = _compiled(pattern)
    found = compiled.fullmatch(response) if whole else compiled.search(response)
    return unmatched if found is None else matched


@functools.lru_cache(maxsize=8)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


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
    """How near the response's length is to a target: max(0, 1 - |length - target| / tolerance).

    Args:
        prompt: not read.
        response: is measured.
        record: not read.
        target: the length that earns 1.
        tolerance: so far from the target, and further, the reward is 0.
        unit: `words`, separated by white space, or `characters`.
    """
    count = len(response.split()) if unit == "words" else len(response)
    return max(0.0, 1.0 - abs(count - target) / tolerance)


def _check_vader() -> None:
    _analyzer()


@checked_by(_check_vader)
def vader(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """The sentiment of an English response, -1 (negative) to 1 (positive): VADER's compound score.

    Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text".

    Args:
        prompt: not read.
        response: is rated; an empty one has 0.
        record: not read.
    """
    return float(_analyzer().polarity_scores(response)["compound"])


@functools.lru_cache(maxsize=1)
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ValueError(f"it needs vaderSentiment ({error}): pip install 'reinforce-rl[vader]'") from error
    return SentimentIntensityAnalyzer()
