"""The provided reward functions."""

from __future__ import annotations

import pytest

from reinforce_rl.rewards.function_process.loading import (
    PROVIDED,
    PROVIDED_NAMES,
    FunctionSpec,
    LoadFault,
    load_function,
)
from reinforce_rl.rewards.functions import gsm8k, length, matches, vader


def spec(name: str, **kwargs) -> FunctionSpec:
    return FunctionSpec("reward_function", name, kwargs)


def test_gsm8k_takes_its_rewards_and_the_records_field():
    assert gsm8k("", "#### 3", {"answer": 3}) == 1.0
    assert gsm8k("", "#### 3", {"gold": "3.0"}, answer_key="gold", correct=2.0) == 2.0
    assert gsm8k("", "3", {"answer": "3"}, last_number=False, wrong=-1.0) == -1.0
    with pytest.raises(KeyError, match="answer"):
        gsm8k("", "#### 3", {})
    with pytest.raises(ValueError, match="'answer' holds no number"):
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


@pytest.mark.parametrize(("count", "reward"), [(0, 0.0), (5, 0.0), (8, 0.6), (10, 1.0), (12, 0.6), (20, 0.0)])
def test_length_is_a_triangle(count, reward):
    assert length("", "word " * count, {}, target=10, tolerance=5) == pytest.approx(reward)
    assert length("", "w" * count, {}, target=10, tolerance=5, unit="characters") == pytest.approx(reward)


def test_vader_tells_good_from_bad():
    pytest.importorskip("vaderSentiment", reason="an optional extra")
    good, bad = (vader("", text, {}) for text in ("I love this, it is wonderful!", "I hate this, it is awful."))
    assert -1 <= bad < -0.5 < 0.5 < good <= 1
    assert vader("", "", {}) == 0.0


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (spec("gsm8k"), ["expected a dotted name", f"did you mean {PROVIDED}.gsm8k?"]),
        (spec(f"{PROVIDED}.gms8k"), [f"{PROVIDED} has no 'gms8k'", f"did you mean {PROVIDED}.gsm8k?"]),
        (spec(f"{PROVIDED}.zzz"), ["has no 'zzz'", "it has gsm8k, length, matches, vader"]),
        (spec("reinforce_rl.rewards.function.gsm8k"), ["no module", f"{PROVIDED} or"]),
        (spec("nowhere_at_all.gsm8k"), ["no module 'nowhere_at_all'", "PYTHONPATH", f"{PROVIDED}.gsm8k?"]),
        (spec(f"{PROVIDED}.UNITS"), ["no function"]),
        (spec(f"{PROVIDED}.matches"), ["pattern must be given", "+reward_function.kwargs.pattern=VALUE"]),
        (spec(f"{PROVIDED}.matches", pattern="a", hole=1), ["no argument 'hole'", "did you mean whole?"]),
        (spec(f"{PROVIDED}.matches", pattern="("), ["no regular expression"]),
        (spec(f"{PROVIDED}.matches", pattern=3), ["a wrong type"]),
        (spec(f"{PROVIDED}.length", target=3, tolerance=0), ["tolerance is 0; expected above 0"]),
        (spec(f"{PROVIDED}.length", target=3, tolerance=1, unit="tokens"), ["expected one of words, characters"]),
        (spec("os.getcwd"), ["not called as (prompt, response, record, **kwargs)"]),
    ],
    ids=lambda value: value.name if isinstance(value, FunctionSpec) else "",
)
def test_what_cannot_be_used_is_told_with_its_key(wanted, words):
    with pytest.raises(LoadFault) as caught:
        load_function(wanted)
    assert [word for word in ["reward_function.", *words] if word not in str(caught.value)] == []


def test_a_module_that_raises_or_lacks_a_library_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('on purpose')")
    (tmp_path / "lacks_a_library.py").write_text("import no_such_library")
    with pytest.raises(LoadFault, match="import of raises_at_import raised RuntimeError: on purpose"):
        load_function(spec("raises_at_import.f"))
    with pytest.raises(LoadFault, match="lacks_a_library imports 'no_such_library', which is not installed"):
        load_function(spec("lacks_a_library.f"))


def test_all_that_is_provided_is_named():
    from reinforce_rl.rewards import functions

    own = {name for name, value in vars(functions).items() if getattr(value, "__module__", "") == PROVIDED}
    assert {name for name in own if not name.startswith("_")} == set(PROVIDED_NAMES)
