"""Reads the number that an answer states, exactly.

`math-verify` reads the same forms, and the tests hold its verdicts. It is not used here, because it
reads 1e-05 as 1 and compares six decimals, so that 0.00000025 equals 0.00000026.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400  # Python's conversion of long numbers takes quadratic time

# A JSON or Parquet float holds 15 decimal digits: 0.1 + 0.2 is 0.30000000000000004.
FLOAT_TOLERANCE = Fraction(1, 10**15)

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_EXPONENT = r"(?:[eE][-+]?\d+(?!\w))?"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+){_EXPONENT}"
# Nothing may go on that would make another number of it: 3.14.15, 3,5, 1e5.5
_END = r"(?!\d|[.,]\d|[eE][-+]?\d)"
_POWER = r"\s?(?:\^|\*\*)\s?[{(]?\s?[-+]?\d+\s?[)}]?"
# Chinese and Japanese characters, and Korean ones, are letters of Python's \w. Chinese and Japanese
# write no space between a word and a number.
_UNSPACED = r"\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
# A minus after a letter, a digit or a bracket is an operator or a hyphen: 48-2, pages 5-10, (3)-1.
_SIGN = rf"(?:(?:(?<![\w.)\]}}])|(?<=[{_UNSPACED}]))(?P<sign>[-+])\s?)?"
_CURRENCY = r"(?:[$\u00a2-\u00a5\u20a0-\u20bf]\s?(?P<inner>-)?)?"
_NUMBER = re.compile(
    rf"{_SIGN}{_CURRENCY}(?:(?<![\w.])|(?<=[{_UNSPACED}]))(?<!\d,)"
    rf"(?:(?P<whole>\d+)\s{{1,3}}(?=\d+/\d))?"
    rf"(?P<over>{_DECIMAL}){_END}"
    rf"(?P<power>{_POWER})?"
    rf"(?:\s?(?:[\u00d7\u00b7*x])\s?10(?P<ten>{_POWER}))?"
    rf"(?:\s?/\s?(?P<under>{_DECIMAL}){_END})?"
    r"(?P<percent>\s?%)?"
)
_MARKED = re.compile(
    r"(?P<hashes>(?<!#)####(?!#)[ \t]*)|(?P<boxed>\\boxed\s*\{)"
    r"|(?P<words>\b(?:final\s+)?answer(?:\s+is|\s*[:=])[ \t]*[:=]?)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_EQUALS = re.compile(r"(?:=|\\approx|\u2248)")
# `####` begins a heading of Markdown too, with a word ("Step 3") or a list's number ("2. Add
# them").
_HEADING_WORD = re.compile(r"(?<![\w\\])[^\W\d_]")
_LIST_NUMBER = re.compile(r"[.)]\s+\w")

# What makes another value of the number before it: an operator, a root, a variable, a factorial.
_CONTINUES = re.compile(
    r"\s*(?:[-+*/\u00d7\u00b7\u00f7^:]\s*[\d(\\{$.]|[\u221a\u03c0^]|\\[a-zA-Z])"
    r"|!\s*\$|[abdijknpqruvwxyz](?![a-zA-Z])"
)
# What makes another value of the number after it: a command of LaTeX, a root, a power, a division.
_BEGINS_BEFORE = re.compile(r"\\[a-zA-Z]|\u221a|(?:sqrt\s*\(|[\^/]\s*[({]?)\s*\Z")
_OPEN_BRACKET = re.compile(r"[(\[]\s*\Z")
_NEXT_OF_PAIR = re.compile(r"\s*,\s*[-+]?[\d.]")
# What a box with one number in it must not hold beside the number.
_NO_NUMBER = re.compile(
    r"[\d^+*\u00d7\u00f7\u221a\u03c0<>\u2264\u2265\u00b1|!\\]|(?<![a-zA-Z])[inkxyz](?![a-zA-Z])"
)

_WORD_COMMANDS = "text|mathrm|mbox|textbf|mathbf|textit|mathit|boldsymbol|textrm|boxed"
_SPACE_COMMANDS = "left|right|displaystyle|quad|qquad|bf|rm|large|Large"
_LATEX_WORDS = re.compile(
    rf"\\(?:{_WORD_COMMANDS})\s*\{{(?P<text>[^{{}}]*)\}}(?P<unit_power>\s*\^\s*\{{?\d\}}?)?"
)
_UNIT_POWER = re.compile(r"(?<![a-zA-Z\\])(m|[a-zA-Z]{2,})\s*\^\s*\{?\d\}?")
_LATEX_FRACTION = re.compile(
    r"(?P<minus>-\s*)?\\[dtc]?frac\s*(?:\{(?P<over>[^{}]*)\}|(?P<over_digit>\d))\s*"
    r"(?:\{(?P<under>[^{}]*)\}|(?P<under_digit>\d))"
)
_PLAIN_NUMBER = re.compile(rf"\s*(?P<sign>-?)\s*(?P<digits>{_DECIMAL})\s*")
_SUPERSCRIPTS = dict(
    zip(
        "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a",
        "0123456789-+",
        strict=True,
    )
)
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_VULGAR_FRACTION = re.compile(r"[\u00bc-\u00be\u2150-\u215e]")
# Spaces that group digits by three: no-break, thin and narrow no-break space, and LaTeX's.
_GROUPING = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f]|\\[,!]|\{,\})(?=\d{3}(?!\d))")
# Ordinary spaces group digits only in numbers such as "10 000"; in "1 100/3" the space separates
# two numbers.
_SPACED_NUMBER = re.compile(r"(?<![\w.,/])\d{1,3}(?: \d{3})+(?![\d,/]|\s/)")
# Signs that stand for ASCII's: hyphens, dashes and minuses, full-width forms, the slash of
# fractions.
_ASCII = str.maketrans(
    "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d\uff0b\uff05\uff04\u2044", "------" + "-+%$/"
)


@dataclass(frozen=True)
class Number:
    value: Fraction
    is_percent: bool = False  # the value is that before the sign: 50 of 50%
    is_float: bool = False  # from a binary number, which may be off in its last digit

    def equals(self, other: Number) -> bool:
        """Compare with another answer: 5, 5.00 and 10/2 are equal, and 50% is both 50 and 0.5."""
        if self._is_close(self.value, other.value):
            return True
        mine = self.value / 100 if self.is_percent else self.value
        others = other.value / 100 if other.is_percent else other.value
        return self._is_close(mine, others)

    def _is_close(self, mine: Fraction, other: Fraction) -> bool:
        # An integer below 2^53 is exact as a float.
        if not self.is_float or mine.denominator == 1:
            return mine == other
        return abs(mine - other) <= FLOAT_TOLERANCE * abs(mine)


def expected_number(answer: object) -> Number:
    """Return the number of a record's answer: a number, a text with one number, or a solution that
    ends in `#### 72`.

    Raises ValueError if it holds none, or several.
    """
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        raise ValueError(f"holds {_kind(answer)}; expected a number, or a text with one number")
    if isinstance(answer, int):
        return Number(Fraction(answer))
    if isinstance(answer, float):
        try:
            return Number(Fraction(repr(answer)), is_float=True)
        except ValueError as error:
            raise ValueError(f"is {answer}; expected a finite number") from error
    marks = [match for match in _MARKED.finditer(answer) if not match.group("words")]
    number = _read_mark(answer, marks[-1], len(answer)) if marks else _only_number(_cleaned(answer))
    if isinstance(number, Number):
        return number
    raise ValueError(
        f"holds no number, or several: {answer[-80:]!r}; expected one, such as 72, 1.5e-3 or #### "
        "72"
    )


def _kind(answer: object) -> str:
    if answer is None:
        return "null"
    if isinstance(answer, bool):
        return str(answer).lower()
    if isinstance(answer, Mapping):
        return "an object"
    return "a list" if isinstance(answer, list) else type(answer).__name__


def final_number(text: str, *, last_number: bool = True) -> Number | None:
    """Return the number that a worked solution gives as its answer, or None.

    Takes the last marker with a number: `#### 72`, `\\boxed{72}`, "the answer is 72", "Answer: 72".
    In "the answer is 5 + 3 = 8" the number after the last equals sign counts. An answer that is
    marked and is no number, such as `\\boxed{2\\sqrt{3}}`, gives None. `last_number` falls back to
    the last number of the text.
    """
    end = len(text)
    for match in reversed(list(_MARKED.finditer(text))):
        number = _read_mark(text, match, end)
        # A marker is read up to the next one, or a text of many would take quadratic time.
        end = match.start()
        if isinstance(number, Number):
            return number
        if number is _OTHER:
            return None
    if not last_number:
        return None
    for match in reversed(list(_NUMBER.finditer(_cleaned(text)))):
        number = _value(match)
        if number is not None:
            return number
    return None


class _Other:
    """An answer that holds digits and is no number: an expression, a pair, a range."""


_OTHER = _Other()


def _read_mark(text: str, match: re.Match[str], end: int) -> Number | _Other | None:
    rest = text[match.end() : end]
    if match.group("boxed"):
        return _only_number(_cleaned(_until_closed(rest)))
    if match.group("words"):
        line = rest.lstrip().split("\n", 1)[0]
        part = _SENTENCE_END.split(line, maxsplit=1)[0]
        return _leading_number(_cleaned(part))
    line, _, below = rest.partition("\n")
    line = _cleaned(line)
    return None if _is_heading(line, below) else _leading_number(line)


def _is_heading(line: str, below: str) -> bool:
    """Tell whether what follows `####` is a heading of Markdown: "Step 3", or "2.

    Add them" with text below.
    """
    match = _NUMBER.search(_after_equals(line))
    if match is None:
        return False
    before = match.string[: match.start()]
    is_list_item = bool(below.strip()) and _LIST_NUMBER.match(match.string, match.end())
    return bool(_HEADING_WORD.search(before) or is_list_item)


def _only_number(text: str) -> Number | _Other | None:
    """Read a text that consists of one number, words and units, and perhaps of what it equals."""
    matches = list(_NUMBER.finditer(_after_equals(text)))
    if len(matches) != 1:
        return _OTHER if re.search(r"\d", text) else None
    match = matches[0]
    before = match.string[: match.start()]
    after = match.string[match.end() :]
    number = _value(match)
    if (
        number is None
        or _NO_NUMBER.search(before)
        or _NO_NUMBER.search(after)
        or _CONTINUES.match(after)
    ):
        return _OTHER
    return number


def _leading_number(text: str) -> Number | _Other | None:
    """Read the first number of a sentence, unless it is a part of an expression."""
    text = _after_equals(text)
    for match in _NUMBER.finditer(text):
        number = _value(match)
        if number is None:
            continue
        before = text[: match.start()]
        is_pair = _OPEN_BRACKET.search(before) and _NEXT_OF_PAIR.match(text, match.end())
        if is_pair or _BEGINS_BEFORE.search(before) or _CONTINUES.match(text, match.end()):
            return _OTHER
        return number
    return None


def _after_equals(text: str) -> str:
    parts = _EQUALS.split(text)
    several = len(parts) > 2 and any(
        re.search(r"\b(?:or|and)\b|[,;]\s*[a-zA-Z]", part) for part in parts[1:-1]
    )
    if several or not _NUMBER.search(parts[-1]):
        return text
    return parts[-1]


def _until_closed(text: str) -> str:
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[:index]
    return text


def _cleaned(text: str) -> str:
    """Write LaTeX and special characters as plain text: `\\frac{1}{2}` as 1/2."""
    text = _SUPERSCRIPT_RUN.sub(
        lambda run: "^" + "".join(_SUPERSCRIPTS[letter] for letter in run[0]), text
    )
    text = _VULGAR_FRACTION.sub(lambda letter: " " + unicodedata.normalize("NFKC", letter[0]), text)
    text = text.translate(_ASCII)
    text = _GROUPING.sub(",", text)
    text = _SPACED_NUMBER.sub(lambda number: number[0].replace(" ", ","), text)
    if "\\" not in text and "{" not in text and "^" not in text:
        return text
    text = re.sub(rf"\\[()\[\]]|\\(?:{_SPACE_COMMANDS})(?![a-zA-Z])", " ", text)
    text = text.replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\(?:circ|degree)(?![a-zA-Z])", "\u00b0", text)
    text = re.sub(r"\\(?:times|cdot)(?![a-zA-Z])", "\u00d7", text)
    text = re.sub(r"\\div(?![a-zA-Z])", "/", text)
    text = re.sub(r"\\[,!;: ]|~", " ", text)
    for _ in range(2):  # one command may stand in another
        text = _LATEX_WORDS.sub(_words, text)
    text = _UNIT_POWER.sub(r"\1", text)
    return _LATEX_FRACTION.sub(_fraction, text)


def _words(match: re.Match[str]) -> str:
    text = match["text"]
    if re.search(r"\d", text):
        return f" {text} {match['unit_power'] or ''}"
    return f" {text} " if re.search(r"\b(?:or|and)\b", text) else " "


def _fraction(match: re.Match[str]) -> str:
    over = _PLAIN_NUMBER.fullmatch(match["over"] or match["over_digit"] or "")
    under = _PLAIN_NUMBER.fullmatch(match["under"] or match["under_digit"] or "")
    if over is None or under is None:
        return match[0]
    is_negative = (bool(match["minus"]) + bool(over["sign"]) + bool(under["sign"])) % 2 == 1
    sign = "-" if is_negative else ("+" if match["minus"] else "")
    gap = "" if match["minus"] else " "
    return f"{gap}{sign}{over['digits']}/{under['digits']} "


def _value(match: re.Match[str]) -> Number | None:
    number = _decimal(match["over"])
    if number is not None and match["power"] is not None:
        number = _power(number, match["power"])
    if number is not None and match["ten"] is not None:
        scale = _power(Fraction(10), match["ten"])
        number = None if scale is None else number * scale
    under = _decimal(match["under"] or "1")
    if number is None or not under:
        return None
    number /= under
    if match["whole"] is not None:  # 1 1/2
        if number >= 1 or len(match["whole"]) > MAX_DIGITS:
            return None
        number += int(match["whole"])
    has_minus = (match["sign"] or "+") != "+"
    if has_minus != (match["inner"] is not None):
        number = -number
    return Number(number, is_percent=match["percent"] is not None)


def _decimal(text: str) -> Fraction | None:
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > MAX_DIGITS or (exponent and _bounded_exponent(exponent) is None):
        return None
    return Fraction(text.replace(",", ""))


def _power(base: Fraction, text: str) -> Fraction | None:
    """Return a base to an integer power as it is written, `^{-5}` or `**2`; None where it is too
    large.
    """
    exponent = _bounded_exponent(re.sub(r"[\s^*{}()]", "", text))
    if exponent is None or (base == 0 and exponent < 0):
        return None
    digits = max(len(str(base.numerator)), len(str(base.denominator)))
    if abs(exponent) * digits > MAX_DIGITS:
        return None
    return base**exponent


def _bounded_exponent(text: str) -> int | None:
    """Return a small exponent; 1e999999999 would take all memory."""
    if len(text.lstrip("+-0")) > len(str(MAX_DIGITS)):
        return None
    exponent = int(text)
    return exponent if abs(exponent) <= MAX_DIGITS else None
