"""The final number of a worked solution. Exact, by `fractions.Fraction`; nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 400  # Python's own conversion of longer numbers takes time that grows with their square

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
# A minus behind a letter, a digit or a bracket is an operator or a hyphen: 48-2, pages 5-10, (3)-1.
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


def parse_number(text: str) -> Fraction | None:
    """The first number of a text, or None where there is none.

    Signs (a minus of Unicode too), currency signs, thousands with commas, decimals and fractions of two numbers are
    read: `-$1,234.50`, `3/4`, `.5`. A per cent sign and other units are not: 50% is 50.
    """
    for match in _NUMBER.finditer(_without_latex(text)):
        number = _value(match)
        if number is not None:
            return number
    return None


def final_answer(text: str, *, last_number: bool = True) -> Fraction | None:
    """The number that a text gives as its answer, or None where there is none.

    The last of these that holds a number: `#### 72`, `\\boxed{72}`, "the answer is 72", "Answer: 72". Of a line such
    as "the answer is 5 + 3 = 8" the number behind the last equals sign counts.

    Args:
        text: a worked solution.
        last_number: where nothing marks an answer, take the last number of the text.
    """
    for match in reversed(list(_MARKED.finditer(text))):
        number = parse_number(_marked_part(text, match))
        if number is not None:
            return number
    if not last_number:
        return None
    numbers = (_value(match) for match in reversed(list(_NUMBER.finditer(_without_latex(text)))))
    return next((number for number in numbers if number is not None), None)


def same_answer(text: str, expected: Fraction, *, last_number: bool = True) -> bool:
    """Whether a text's final answer is exactly this number."""
    return final_answer(text, last_number=last_number) == expected


def _marked_part(text: str, match: re.Match[str]) -> str:
    """What a marker marks: a bracket's inside, or the rest of the line or of the sentence."""
    rest = text[match.end() :]
    if match.group("boxed"):
        part = _until_closed(rest)
    else:
        part = rest.lstrip().split("\n", 1)[0] if match.group("words") else rest.split("\n", 1)[0]
        if match.group("words"):
            part = _SENTENCE_END.split(part, maxsplit=1)[0]
    before, equals, after = part.rpartition("=")
    return after if equals and parse_number(after) is not None else (before or part)


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
