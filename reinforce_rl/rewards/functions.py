"""Built-in reward functions; `docs/reward-functions.md` has their signature and says how to write your own.

Functions run in processes without torch, so nothing here imports it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from reinforce_rl.rewards.base import checked_by

UNITS = ("words", "characters")
MAX_DIGITS = 400  # Python's conversion of long numbers takes quadratic time

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
# A minus after a letter, a digit or a bracket is an operator or a hyphen: 48-2, pages 5-10, (3)-1.
_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])(?P<sign>[-+\u2212\u2013])\s?)?(?:[$\u20ac\u00a3]\s?(?P<inner>[-\u2212\u2013])?)?"
    rf"(?<![\w.])(?P<over>{_DECIMAL})(?!\d|\.\d)(?:\s?/\s?(?P<under>{_DECIMAL}))?"
)
_MARKED = re.compile(
    r"(?P<hashes>####[ \t]*)|(?P<boxed>\\boxed\s*\{)|(?P<words>\b(?:final\s+)?answer(?:\s+is|\s*[:=])[ \t]*[:=]?)",
    re.IGNORECASE,
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


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
    """Score whether the response ends in the right number, as in GSM8K (Cobbe et al. 2021, arXiv:2110.14168).

    Numbers are compared exactly: 5, 5.00 and 10/2 are equal. The last `#### 72`, `\\boxed{72}` or "the answer is
    72" counts; if no answer is marked, `last_number` takes the last number of the response. The record's
    `answer_key` holds the right answer, as a number, a text or a solution that ends in `#### 72`; raises KeyError
    without it, ValueError if it holds no number.
    """
    expected = _parse_number(str(record[answer_key]).rpartition("####")[2])
    if expected is None:
        raise ValueError(f"the record's '{answer_key}' holds no number")
    return correct if _final_answer(response, last_number=last_number) == expected else wrong


def _parse_number(text: str) -> Fraction | None:
    """Return the first number of a text, exactly, or None.

    Reads signs (Unicode minus too), currency signs, thousands with commas, decimals and fractions of two numbers:
    `-$1,234.50`, `3/4`, `.5`. Ignores percent signs and other units: 50% is 50. Evaluates nothing.
    """
    return _first_value(_NUMBER.finditer(_without_latex(text)))


def _first_value(matches: Iterable[re.Match[str]]) -> Fraction | None:
    return next((number for number in map(_value, matches) if number is not None), None)


def _final_answer(text: str, *, last_number: bool = True) -> Fraction | None:
    """Return the number that a worked solution gives as its answer, or None.

    Takes the last marker with a number: `#### 72`, `\\boxed{72}`, "the answer is 72", "Answer: 72". In "the answer is
    5 + 3 = 8" the number after the last equals sign counts. `last_number` falls back to the last number of the text.
    """
    for match in reversed(list(_MARKED.finditer(text))):
        number = _parse_number(_marked_part(text, match))
        if number is not None:
            return number
    if not last_number:
        return None
    return _first_value(reversed(list(_NUMBER.finditer(_without_latex(text)))))


def _marked_part(text: str, match: re.Match[str]) -> str:
    """Return the text after a marker: the content of the braces, or the rest of the line or sentence."""
    rest = text[match.end() :]
    if match.group("boxed"):
        part = _until_closed(rest)
    elif match.group("words"):
        part = _SENTENCE_END.split(rest.lstrip().split("\n", 1)[0], maxsplit=1)[0]
    else:
        part = rest.split("\n", 1)[0]
    before, equals, after = part.rpartition("=")
    return after if equals and _parse_number(after) is not None else (before or part)


def _until_closed(text: str) -> str:
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:index]
    return text


def _without_latex(text: str) -> str:
    if "\\" not in text and "{" not in text:
        return text
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"\\[,!;: ]", "", text)
    text = _LATEX_WORDS.sub(r" \1 ", text)
    return _LATEX_FRACTION.sub(r" \1/\2 ", text)


def _value(match: re.Match[str]) -> Fraction | None:
    over, under = match.group("over"), match.group("under") or "1"
    if len(over) + len(under) > MAX_DIGITS:
        return None
    divisor = Fraction(under.replace(",", ""))
    if divisor == 0:
        return None
    number = Fraction(over.replace(",", "")) / divisor
    negative = (match.group("sign") or "+") != "+"
    return -number if negative != (match.group("inner") is not None) else number


def _check_pattern(*, pattern: str, **others: object) -> None:
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
    """Score whether the response matches a regular expression, white space around it included.

    A pattern that backtracks for ever exceeds the time limit, and its sample fails. `whole` asks for a match of the
    whole response rather than any part; `(?s)` at the pattern's beginning lets a dot match line breaks.
    """
    compiled = re.compile(pattern)
    found = compiled.fullmatch(response) if whole else compiled.search(response)
    return unmatched if found is None else matched


def _check_length(*, target: int, tolerance: float, unit: str = "words") -> None:
    if target < 0:
        raise ValueError(f"target is {target}; expected at least 0")
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}; expected above 0")
    if unit not in UNITS:
        raise ValueError(f"unit is {unit!r}; expected one of {', '.join(UNITS)}")


@checked_by(_check_length)
def length(
    prompt: str, response: str, record: Mapping[str, Any], *, target: int, tolerance: float, unit: str = "words"
) -> float:
    """Return max(0, 1 - |length - target| / tolerance), with the length in `unit`: `words` or `characters`."""
    count = len(response.split()) if unit == "words" else len(response)
    return max(0.0, 1.0 - abs(count - target) / tolerance)


def instructions(prompt: str, response: str, record: Mapping[str, Any], *, partial: bool = True) -> float:
    """Score how far a response follows the instructions of its record, 0 to 1; without `partial` 1 for all, else 0.

    The record's fields, at least one: `keys` asks for one JSON object with exactly these keys and a text for each, no
    two alike; `max_words` and `min_words` bound the number of words and of distinct words; `keyword` asks for this
    word or its plural. Words are those of the texts where there is such an object, else of the whole response.

    The score is the mean of what was reached. The keys count three times: the response opens with a brace, names the
    keys, is the object. Raises KeyError if the record asks for nothing.
    """
    text, scores = response.strip(), []
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
            float(re.search(rf"(?<!\w){re.escape(record['keyword'])}(?:e?s)?(?!\w)", text, re.IGNORECASE) is not None)
        )
    if not scores:
        raise KeyError("keys, max_words, min_words or keyword")
    return sum(scores) / len(scores) if partial else float(min(scores) == 1.0)


def _texts_by_key(text: str, keys: Iterable[str]) -> list[str] | None:
    """Return the values of a JSON object that has exactly these keys and texts, no two alike."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != set(keys):
        return None
    texts = [text.strip().lower() if isinstance(text, str) else "" for text in found.values()]
    return texts if all(texts) and len(set(texts)) == len(texts) else None


@functools.lru_cache(maxsize=1)
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ValueError(f"it needs vaderSentiment ({error}): pip install 'reinforce-rl[vader]'") from error
    return SentimentIntensityAnalyzer()


@checked_by(_analyzer)
def vader(prompt: str, response: str, record: Mapping[str, Any]) -> float:
    """Return VADER's compound sentiment of an English response, -1 (negative) to 1 (positive); 0 if it is empty.

    Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text".
    """
    return float(_analyzer().polarity_scores(response)["compound"])
