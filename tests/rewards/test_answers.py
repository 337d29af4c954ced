"""The final number of a solution: every form that people and models write, and all of GSM8K."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from reinforce_rl.rewards.answers import MAX_DIGITS, final_answer, parse_number
from reinforce_rl.rewards.functions import gsm8k

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
GSM8K = [SHARED / f"gsm8k_{split}.jsonl" for split in ("train", "test")]

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
    ("so 48-2 = 46", 46),
    ("5 dollars and 50 cents", 50),
    ("pages 5-10", 10),
    ("48 / 0", None),
    ("x2 and 3.14.15", None),
    ("nothing", None),
    ("", None),
    ("9" * (MAX_DIGITS + 1), None),
]


@pytest.mark.parametrize(("text", "number"), CASES)
def test_the_final_answer(text, number):
    assert final_answer(text) == number


def test_without_a_marker_the_last_number_may_be_left_out():
    assert final_answer("so 46", last_number=False) is None
    assert final_answer("so 46 #### 3", last_number=False) == 3


@pytest.mark.parametrize("file", GSM8K, ids=lambda path: path.stem)
def test_every_gold_solution_of_gsm8k_is_right_and_a_changed_digit_is_wrong(file):
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    records = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
    assert len(records) == {"gsm8k_train": 7473, "gsm8k_test": 1319}[file.stem]
    for record in records:
        solution, answer = record["solution"], record["answer"]
        assert parse_number(answer) == int(answer.replace(",", ""))
        assert gsm8k("", solution, record) == 1.0, record
        marker = solution.index("####")
        for place in [match.start() for match in re.finditer(r"\d", solution[marker:])]:
            at = marker + place
            changed = solution[:at] + str((int(solution[at]) + 1) % 10) + solution[at + 1 :]
            assert gsm8k("", changed, record) == 0.0, changed
            assert gsm8k("", solution, {"answer": changed[marker:]}) == 0.0, changed
