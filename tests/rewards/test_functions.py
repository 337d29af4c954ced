"""The provided reward functions; gsm8k on answers of many forms, and on all of GSM8K."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reinforce_rl.config.rules import PROVIDED_FUNCTIONS
from reinforce_rl.rewards import functions
from reinforce_rl.rewards.base import FunctionSpec
from reinforce_rl.rewards.function_host import PROVIDED, LoadFault, load_function
from reinforce_rl.rewards.functions import (
    gsm8k,
    instructions,
    length,
    matches,
    vader,
)


def spec(name: str, **kwargs) -> FunctionSpec:
    return FunctionSpec("reward_function", name, kwargs)


SHARED = Path(__file__).parents[2].parent / "shared" / "data"
GSM8K = [SHARED / f"gsm8k_{split}.jsonl" for split in ("train", "test")]


@pytest.mark.parametrize("file", GSM8K, ids=lambda path: path.stem)
def test_every_gold_solution_of_gsm8k_is_right_and_a_changed_digit_is_wrong(file):
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    lines = file.read_text("utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    assert len(records) == {"gsm8k_train": 7473, "gsm8k_test": 1319}[file.stem]
    for record in records:
        solution = record["solution"]
        assert gsm8k("", solution, record) == 1.0, record
        marker = solution.index("####")
        for place in [match.start() for match in re.finditer(r"\d", solution[marker:])]:
            at = marker + place
            digit = (int(solution[at]) + 1) % 10
            changed = solution[:at] + str(digit) + solution[at + 1 :]
            assert gsm8k("", changed, record) == 0.0, changed
            assert gsm8k("", solution, {"answer": changed[marker:]}) == 0.0, changed


def test_gsm8k_takes_its_rewards_and_the_records_field():
    assert gsm8k("", "#### 3", {"answer": 3}) == 1.0
    assert gsm8k("", "#### 3", {"gold": "3.0"}, answer_key="gold", correct=2.0) == 2.0
    assert gsm8k("", "3", {"answer": "3"}, last_number=False, wrong=-1.0) == -1.0
    with pytest.raises(KeyError, match="answer"):
        gsm8k("", "#### 3", {})
    with pytest.raises(ValueError, match=r"'answer' holds no number.*three"):
        gsm8k("", "#### 3", {"answer": "three"})


@pytest.mark.parametrize(
    ("response", "kwargs", "reward"),
    [
        ("<a>5</a>", {"pattern": r"<a>\d</a>"}, 1.0),
        ("x<a>5</a>", {"pattern": r"<a>\d</a>"}, 0.0),
        ("x<a>5</a>", {"pattern": r"<a>\d</a>", "whole": False}, 1.0),
        ("a\nb", {"pattern": "a.b", "unmatched": -1.0}, -1.0),
        ("a\nb", {"pattern": "(?s)a.b", "matched": 0.5}, 0.5),
    ],
)
def test_matches(response, kwargs, reward):
    assert matches("", response, {}, **kwargs) == reward


@pytest.mark.parametrize(
    ("count", "reward"), [(0, 0.0), (5, 0.0), (8, 0.6), (10, 1.0), (12, 0.6), (20, 0.0)]
)
def test_length_is_a_triangle(count, reward):
    by_words = length("", "word " * count, {}, target=10, tolerance=5)
    assert by_words == pytest.approx(reward)
    by_characters = length("", "w" * count, {}, target=10, tolerance=5, unit="characters")
    assert by_characters == pytest.approx(reward)


def test_vader_tells_good_from_bad():
    pytest.importorskip("vaderSentiment", reason="an optional extra")
    good, bad = (
        vader("", text, {})
        for text in ("I love this, it is wonderful!", "I hate this, it is awful.")
    )
    assert -1 <= bad < -0.5 < 0.5 < good <= 1
    assert vader("", "", {}) == 0.0


@pytest.mark.parametrize(
    ("wanted", "kind", "values"),
    [
        (spec("gsm8k"), "name.not_dotted", ["'gsm8k'", f"{PROVIDED}.gsm8k"]),
        (spec(f"{PROVIDED}.gms8k"), "name.unknown", ["'gms8k'", f"{PROVIDED}.gsm8k?"]),
        (
            spec(f"{PROVIDED}.zzz"),
            "name.unknown",
            ["'zzz'", "gsm8k, instructions, length, matches, vader"],
        ),
        (spec("reinforce_rl.rewards.function.gsm8k"), "module.missing", [f"{PROVIDED} or"]),
        (spec("nowhere_at_all.gsm8k"), "module.missing", ["'nowhere_at_all'", "PYTHONPATH"]),
        (spec(f"{PROVIDED}.UNITS"), "name.no_function", [f"{PROVIDED}.UNITS"]),
        (
            spec(f"{PROVIDED}.matches"),
            "kwargs.do_not_fit",
            ["'pattern'", "+reward_function.kwargs.NAME=VALUE"],
        ),
        (
            spec(f"{PROVIDED}.matches", pattern="a", hole=1),
            "kwargs.do_not_fit",
            ["'hole'", "whole: 'bool'"],
        ),
        (spec(f"{PROVIDED}.matches", pattern="("), "kwargs.wrong_value", ["pattern '('"]),
        (spec(f"{PROVIDED}.matches", pattern=3), "kwargs.wrong_type", [f"{PROVIDED}.matches"]),
        (
            spec(f"{PROVIDED}.length", target=3, tolerance=0),
            "kwargs.wrong_value",
            ["tolerance is 0"],
        ),
        (
            spec(f"{PROVIDED}.length", target=3, tolerance=1, unit="tokens"),
            "kwargs.wrong_value",
            ["'tokens'", "words, characters"],
        ),
        (
            spec("os.getcwd"),
            "arguments.wrong",
            ["os.getcwd()", "NAME(prompt, response, record, **kwargs)"],
        ),
        (
            spec("helpers.reward_functions.of_two"),
            "arguments.wrong",
            ["of_two(prompt: 'str', response: 'str')"],
        ),
        (
            spec("helpers.reward_functions.trl_style"),
            "arguments.wrong",
            ["helpers.reward_functions.trl_style(", '"From TRL" in docs/migration.md'],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, FunctionSpec) else "",
)
def test_what_cannot_be_used_is_reported_with_its_key(wanted, kind, values):
    with pytest.raises(LoadFault) as caught:
        load_function(wanted)
    assert caught.value.key == f"reward_function.{kind}"
    sentence = str(caught.value)
    assert [value for value in ["reward_function.", *values] if value not in sentence] == []


def test_a_module_that_raises_or_lacks_a_library_is_reported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('on purpose')")
    (tmp_path / "lacks_a_library.py").write_text("import no_such_library")
    with pytest.raises(LoadFault, match="RuntimeError: on purpose") as raised:
        load_function(spec("raises_at_import.f"))
    assert raised.value.key == "reward_function.module.import_failed"
    with pytest.raises(LoadFault, match="'no_such_library'") as lacking:
        load_function(spec("lacks_a_library.f"))
    assert lacking.value.key == "reward_function.module.needs_package"


def test_all_that_is_provided_is_named():
    provided = {
        name
        for name, value in vars(functions).items()
        if getattr(value, "__module__", "") == PROVIDED
    }
    public = {name for name in provided if not name.startswith("_")}
    assert public == set(PROVIDED_FUNCTIONS)


ASKED = {"keys": ["tip", "why"], "min_words": 5, "max_words": 9, "keyword": "tea"}


@pytest.mark.parametrize(
    ("response", "reached"),
    # starts with a brace, has the keys, is an object, at most 9 words, at least 5 distinct words,
    # the keyword
    [
        ('{"tip": "Drink tea warm.", "why": "It tastes better."}', (1, 1, 1, 1, 1, 1)),
        ('  {"why": "Teas are good", "tip": "Drink\\ntea"}\n', (1, 1, 1, 1, 1, 1)),
        ('{"tip": "Drink tea.", "why": "drink TEA. "}', (1, 1, 0, 1, 0, 1)),  # a repeated sentence
        ('{"tip": "tea tea tea", "why": "tea tea"}', (1, 1, 1, 1, 0, 1)),
        ('{"tip": "Drink steam and teapots now.", "why": "It is good"}', (1, 1, 1, 1, 1, 0)),
        (
            '{"tip": "Drink warm tea.", "why": "One two three four five six seven"}',
            (1, 1, 1, 0, 1, 1),
        ),
        ('{"tip": "Drink tea warm or cold."}', (1, 0.5, 0, 1, 1, 1)),
        ('{"tip": "Drink tea", "why": "It is good", "more": ""}', (1, 1, 0, 1, 1, 1)),
        ('{"tip": "Drink tea", "why": ["It is good"]}', (1, 1, 0, 1, 1, 1)),
        ('Sure: {"tip": "Drink tea", "why": "It is good"}', (0, 1, 0, 1, 1, 1)),
        ('{"tip": "Drink tea", "why": "It is', (1, 1, 0, 1, 1, 1)),
        ('["tip", "why"]', (0, 0, 0, 1, 0, 0)),
        ("[" * 9000, (0, 0, 0, 1, 0, 0)),
        ("", (0, 0, 0, 1, 0, 0)),
    ],
)
def test_instructions_give_credit_for_each_step_and_success_for_all(response, reached):
    share = sum(reached) / 6
    assert instructions("", response, ASKED) == pytest.approx(share)
    assert instructions("", response, ASKED, partial=False) == float(min(reached) == 1)


def test_a_whole_solution_of_the_hubs_gsm8k_is_its_answer():
    record = {
        "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"
    }
    scores = [gsm8k("", response, record) for response in ("#### 72", "#### 48")]
    assert scores == [1.0, 0.0]


def test_instructions_check_what_the_record_asks_for_alone():
    assert instructions("", "Two words", {"max_words": 2}, partial=False) == 1.0
    assert instructions("", "Three words here", {"max_words": 2, "keyword": "c++"}) == 0.0
    assert instructions("", "I use C++.", {"keyword": "c++"}) == 1.0
    with pytest.raises(KeyError, match="max_words"):
        instructions("", "Two words", {"answer": "2"})
