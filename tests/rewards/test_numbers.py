"""Numbers in answers, in the forms that people and models write, with math-verify's verdicts."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from reinforce_rl.data.jsonl import LineFaults
from reinforce_rl.data.readers import read_records
from reinforce_rl.rewards.functions import gsm8k
from reinforce_rl.rewards.numbers import MAX_DIGITS, expected_number, final_number

CASES = [
    ("#### 1,234", 1234),
    ("#### -7", -7),
    ("#### 72.", 72),
    ("#### $5.00", 5),
    ("#### 50%", 50),
    ("#### 5 apples", 5),
    ("#### 1\n#### 2", 2),
    ("#### 18\nThe answer is unclear", 18),
    (r"\boxed{42} dollars", 42),
    (r"\boxed{\$1{,}234}", 1234),
    (r"\boxed{\text{about } 5}", 5),
    (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
    (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)),
    (r"The final answer is \boxed{18}. I used 3 steps.", 18),
    (r"\boxed{5", 5),
    ("The answer is $5.00.", 5),
    ("the answer is: 12.", 12),
    ("the answer is **42**.", 42),
    ("**Answer:** 42", 42),
    ("Answer: 5 + 3 = 8 apples.", 8),
    ("The answer is 5. I have 3 more.", 5),
    ("The answer is\n\n 18", 18),
    ("The answer is \u22127", -7),
    ("The answer is -$5", -5),
    ("The answer is $-5", -5),
    ("The answer is 10/2", 5),
    ("The answer is .5", Fraction(1, 2)),
    ("The answer is $1,000,000.50!", Fraction("1000000.5")),
    ("The answer is 10 dollars/day", 10),
    ("The answer is 5 (five).", 5),
    ("so 48-2 = 46", 46),
    ("5 dollars and 50 cents", 50),
    ("pages 5-10", 10),
    ("48 / 0", None),
    ("x2 and 3.14.15", None),
    ("nothing", None),
    ("", None),
    ("9" * (MAX_DIGITS + 1), None),
    # Exponents
    ("1e-05", Fraction(1, 10**5)),
    ("#### 1E+05", 10**5),
    ("The answer is 2.5e-7 m.", Fraction(25, 10**8)),
    ("3eggs", 3),
    ("1e5.5", None),
    ("1e5x", None),
    ("1e999999999", None),
    (r"\boxed{10^{999999999}}", None),
    ("10 ^ 99999", None),
    ("1.5 \u00d7 10\u207b\u2075", Fraction(15, 10**6)),
    ("3\u00b710\u00b2", 300),
    ("3 x 10^-3", Fraction(3, 1000)),
    ("3*10**2", 300),
    # Fractions and grouped digits
    ("1 1/2 cups", Fraction(3, 2)),
    ("1\u00bd cups", Fraction(3, 2)),
    ("\u00be", Fraction(3, 4)),
    ("1\u202f234\u202f567", 1234567),
    (r"\boxed{1\,234}", 1234),
    (r"\boxed{-\frac{-1}{2}}", Fraction(1, 2)),
    # Ambiguous numbers and expressions: the first number must not be taken.
    ("3,5", None),
    ("12,34,567", None),
    ("The answer is 5-10 apples", None),
    (r"The answer is $2\sqrt{3}$", None),
    (r"The answer is $\frac{\sqrt{3}}{2}$", None),
    (r"\boxed{x} because 3 is less", 3),
    ("The answer is 5x.", None),
    ("The answer is sqrt(3)", None),
    ("The answer is $e^2$", None),
    (r"The answer is $\pi/2$", None),
    ("The answer is (3, 4)", None),
    ("The answer is $5!$", None),
    ("The answer is 5! So 3 remain.", 5),
    # Headings of Markdown begin as an answer of GSM8K does.
    ("#### Step 3: add them\n5 + 3 = 8\n\nSo the total is 8.", 8),
    ("#### 2. Add them\nThat makes 18", 18),
    ("#### 2) Add them\nThat makes 18", 18),
    ("#### 18. I hope that 3 is clear", 18),
    ("##### 2 of 3\nThat makes 18", 18),
    ("#### Step 1\n#### **18**", 18),
    ("#### x = 18", 18),
    # No space before the number, and full-width signs, as in Chinese and Japanese
    ("\u7b54\u6848\u662f42\u3002", 42),
    ("\u5171\u670942\u4e2a\u82f9\u679c", 42),
    ("\u7b54\u3048\u306f-42\u3067\u3059", -42),
    ("\uff0d5", -5),
    ("\uff15\uff10\uff05", 50),
    # Hyphens and currencies of all kinds
    ("\u20115", -5),
    ("pages 5\u201110", 10),
    ("-\u20b95", -5),
    ("-\u00a55", -5),
    # An ordinary space between digits
    ("10 000 euros", 10000),
    (r"\boxed{1 234 567}", 1234567),
    ("In 2019 300 people", 300),
    ("1 100/200 cups", Fraction(3, 2)),
    ("1 3/2", None),
    (r"\boxed{99999^{300}}", None),
    (r"\boxed{\text{\textbf{5}} apples}", 5),
    (r"\boxed{5 cm^2}", 5),
    # LaTeX that changes no value
    (r"\boxed{\cfrac{1}{2}}", Fraction(1, 2)),
    (r"\boxed{\quad 5 \quad}", 5),
    (r"\boxed{\bf 5}", 5),
]


@pytest.mark.parametrize(("text", "value"), CASES)
def test_the_final_number(text, value):
    number = final_number(text)
    assert (None if number is None else number.value) == value


def test_without_a_marker_the_last_number_may_be_left_out():
    assert final_number("so 46", last_number=False) is None
    assert gsm8k("", "so 46 #### 3", {"answer": 3}, last_number=False) == 1.0


# The record's answer, the response, and what math-verify 0.9.0 says: verify(parse(answer),
# parse(response)).
VERDICTS = [
    ("0.00001", "0.00001", True),
    ("0.00001", "1", False),
    ("0.00001", "$10^{-5}$", True),
    ("0.00001", r"\boxed{1 \times 10^{-5}}", True),
    ("1/3", "0.33", False),
    ("50%", "50", True),
    ("50%", "0.5", True),
    ("0.5", "50%", True),
    ("50", r"\boxed{50\%}", True),
    ("0.5", r"\boxed{50\%}", True),
    ("0.05", "5 %", True),
    ("1/3", r"\boxed{33.3\%}", False),
    ("1234", "1,234", True),
    ("1234", r"\boxed{1{,}234}", True),
    ("1234567", r"\boxed{1,234,567}", True),
    ("1234567", r"\boxed{12,34,567}", False),
    ("0.5", r"\boxed{\frac{1}{2}}", True),
    ("0.5", r"\boxed{\frac12}", True),
    ("0.5", r"\boxed{\dfrac{1}{2}}", True),
    ("0.5", r"\boxed{\tfrac{1}{2}}", True),
    ("0.5", r"\boxed{\left(\frac{1}{2}\right)}", True),
    ("0.5", r"\boxed{\frac{1}{2}x}", False),
    ("0.5", r"\boxed{1 / 2}", True),
    ("0.5", r"\boxed{1 \div 2}", True),
    ("0.5", r"\boxed{-\frac{-1}{2}}", True),
    ("1.5", r"\boxed{1\frac{1}{2}}", True),
    ("2.5", r"\boxed{2\,\frac{1}{2}}", True),
    ("-0.5", r"\boxed{-\frac{1}{2}}", True),
    ("-0.5", r"\boxed{\frac{-1}{2}}", True),
    ("-0.5", r"\boxed{\frac{1}{-2}}", True),
    ("3.5", r"\boxed{\frac{7}{2}\text{ hours}}", True),
    ("2", r"\boxed{\frac{2}{3}}", False),
    ("1024", r"\boxed{2^{10}}", True),
    ("2", r"\boxed{2^{10}}", False),
    ("8", r"\boxed{2^3}", True),
    ("-4", r"\boxed{-2^2}", True),
    ("0.25", r"\boxed{2^{-2}}", True),
    ("2", r"\boxed{2\sqrt{3}}", False),
    ("3", r"\boxed{2\sqrt{3}}", False),
    ("4", r"\boxed{\sqrt{4}}", False),
    ("3", r"the answer is $2\sqrt{3}$", False),
    ("2", r"the answer is $\frac{\sqrt{3}}{2}$", False),
    ("2", r"\boxed{2\pi}", False),
    ("2", r"\boxed{2i}", False),
    ("5", r"\boxed{5x}", False),
    ("3", r"\boxed{3+4}", False),
    ("3", r"\boxed{3!}", False),
    ("1", r"\boxed{(1,2)}", False),
    ("1", r"\boxed{1, 2}", False),
    ("1", r"\boxed{1:2}", False),
    ("9", r"\boxed{9:00}", False),
    ("2", r"\boxed{x=1 \text{ or } x=2}", False),
    ("5", r"\boxed{5 \pm 1}", False),
    ("5", r"\boxed{x > 5}", False),
    ("0.2", r"\boxed{0.2\overline{3}}", False),
    ("5", r"\boxed{5 \text{ cm}}", True),
    ("5", r"\boxed{5cm}", True),
    ("5", r"\boxed{5 m}", True),
    ("5", r"\boxed{5 \, \text{m}^2}", True),
    ("5", r"\boxed{5\ \mathrm{kg}}", True),
    ("5", r"\boxed{x=5}", True),
    ("5", r"\boxed{x_1 = 5}", True),
    ("5", "$x = 5$", True),
    ("5", r"\boxed{x \approx 5}", True),
    ("5", r"\boxed{\$5}", True),
    ("5", r"\boxed{$5}", True),
    ("5", r"\boxed{5^\circ}", True),
    ("5", r"\boxed{(5)}", True),
    ("5", r"\boxed{\text{5}}", True),
    ("5", r"\boxed{\mathbf{5}}", True),
    ("5", r"\boxed{\boxed{5}}", True),
    ("5", r"\(5\)", True),
    ("5", r"\[5\]", True),
    ("5", r"\boxed{5.00}", True),
    ("5", r"\boxed{+5}", True),
    ("-3", r"\boxed{- 3}", True),
    ("-3", "\\boxed{\u22123}", True),
    ("0", r"\boxed{-0}", True),
    (".5", "0.5", True),
    ("5.", "5", True),
    ("0.75", r"\boxed{.75}", True),
]


@pytest.mark.parametrize(("answer", "response", "is_right"), VERDICTS)
def test_answers_are_judged_as_math_verify_does(answer, response, is_right):
    assert gsm8k("", response, {"answer": answer}) == float(is_right)


# math-verify 0.9.0 decides otherwise: exponents, more than six decimals, digits in groups,
# percent in both.
OTHERWISE = [
    ("1e-05", "0.00001", True),
    ("1e-05", "1", False),
    ("0.00001", "1e-05", True),
    ("100000000000000000000", "1e20", True),
    ("2.5e-07", r"\boxed{2.5\times 10^{-7}}", True),
    ("0.00000025", "0.00000026", False),
    ("0.333333", "1/3", False),
    ("1000000", r"\boxed{1\,000\,000}", True),
    ("0.003", "3 x 10^-3", True),
    ("1/2", "\u00bd", True),
    ("-5", "- 5", True),
]


@pytest.mark.parametrize(("answer", "response", "is_right"), OTHERWISE)
def test_where_math_verify_is_not_followed(answer, response, is_right):
    assert gsm8k("", response, {"answer": answer}) == float(is_right)


NUMBERS = [
    ("42", "42.0"),
    ("42.0", "42"),
    ("1e-05", "0.00001"),
    ("1e+20", "100000000000000000000"),
    ("2.5e-07", r"\boxed{2.5 \times 10^{-7}}"),
    ("12345678901234567890123", "12345678901234567890123"),
    ("0.30000000000000004", "0.3"),
    ("0.3333333333333333", "1/3"),
]


@pytest.mark.parametrize(("number", "response"), NUMBERS)
def test_json_numbers_are_compared_as_numbers(number, response):
    record = json.loads(f'{{"answer": {number}}}')
    assert gsm8k("", response, record) == 1.0
    assert gsm8k("", "#### 1", record) == 0.0


def test_a_whole_number_is_exact_as_a_float_too():
    assert gsm8k("", "1234567890124", {"answer": 1234567890123.0}) == 0.0
    assert gsm8k("", "1234567890123", {"answer": 1234567890123.0}) == 1.0


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.float64(), 1e-05),
        (pa.float32(), 1e-05),
        (pa.float32(), 0.1),
        (pa.float16(), 0.5),
        (pa.int64(), 42),
        (pa.decimal128(12, 8), Decimal("0.00000010")),
        (pa.string(), "1e-05"),
    ],
    ids=str,
)
def test_parquet_numbers_are_compared_as_numbers(tmp_path, type_, value):
    path = tmp_path / "data.parquet"
    answers = pa.array([value], type_)
    struct = pa.struct([("all", pa.list_(type_))])
    nested = pa.array([{"all": [value]}], struct)
    parquet.write_table(pa.table({"answer": answers, "nested": nested}), path)
    (record,) = read_records(path, lambda record: record.value, LineFaults())
    decimal = f"{Decimal(str(value)):f}"
    assert gsm8k("", decimal, record) == 1.0
    reference = record["nested"]["all"][0]
    assert gsm8k("", decimal, {"answer": reference}) == 1.0
    assert gsm8k("", decimal + "1", record) == 0.0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "null"),
        (True, "true"),
        ([1], "a list"),
        ({"a": 1}, "an object"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("three", "three"),
        ("3 or 4", "3 or 4"),
        ("3:4", "3:4"),
        (r"2\sqrt{3}", "sqrt"),
        ("She has 3 and 4, so 7", "so 7"),
    ],
)
def test_an_answer_that_is_no_number_is_refused_with_what_it_is(answer, words):
    with pytest.raises(ValueError, match="record's 'gold'") as caught:
        gsm8k("", "3", {"gold": answer}, answer_key="gold")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 50000,
        "1,111" * 20000,
        "1 1/" * 20000,
        "1 111 " * 20000,
        "\\frac{" * 20000,
        "10^" * 20000,
        "\\boxed{" * 4000,
        "#### " * 4000,
        "answer is " * 4000,
    ],
    ids=lambda text: text[:10],
)
def test_a_long_response_is_read_in_little_time(text):
    begin = time.process_time()
    final_number(text)
    assert time.process_time() - begin < 2


def test_a_solution_is_the_answer_that_it_marks():
    assert expected_number("4 + 3 = 7, so \\boxed{7}").value == 7
    assert expected_number("She has 3 and 4.\n#### 7").value == 7


SHARED = (
    Path(__file__).parents[2].parent / "shared" / "cases" / "30-numeric-answer" / "answers.jsonl"
)


def test_answers_that_were_reported():
    if not SHARED.is_file():
        pytest.skip(f"{SHARED} is not there")
    records = [json.loads(line) for line in SHARED.read_text("utf-8").splitlines()]
    decimals = ["42", "42", "0.00001", "1" + "0" * 20, "0.00000025"]
    for record, decimal in zip(records, decimals, strict=False):
        assert gsm8k("", decimal, record) == 1.0
        assert gsm8k("", "1", record) == 0.0
    for record in records[5:]:
        with pytest.raises(ValueError, match="'answer'"):
            gsm8k("", "1", record)
