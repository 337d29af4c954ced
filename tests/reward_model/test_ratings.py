"""Rated answers from files, with their faults."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import DataError
from reinforce_rl.reward_model.pairs import SKIP_LIMIT, SKIP_MULTI_TURN
from reinforce_rl.reward_model.ratings import SKIP_UNRATED, encode_ratings, read_ratings
from reinforce_rl.reward_model.template import encode_conversation

NAMES = ("helpfulness", "verbosity")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_attributes_in_an_object_or_as_keys_and_missing_ones(tmp_path):
    path = write(
        tmp_path / "r.jsonl",
        {"prompt": "a", "response": "b", "attributes": {"helpfulness": 4, "verbosity": 1.5, "other": "x"}},
        {"prompt": "a", "response": "c", "helpfulness": 0, "verbosity": None, "complexity": 2},
        {"prompt": "a", "response": "d", "attributes": {}},
    )
    found = [answer.ratings for answer in read_ratings(path, NAMES)]
    assert found[0] == (4.0, 1.5)
    assert found[1][0] == 0.0 and math.isnan(found[1][1])
    assert all(math.isnan(rating) for rating in found[2])


def test_faulty_lines_are_all_named(tmp_path):
    good = {"prompt": "a", "response": "b", "helpfulness": 1, "verbosity": 1}
    path = write(
        tmp_path / "r.jsonl",
        good,
        {**good, "helpfulness": "4"},
        {**good, "verbosity": True},
        {**good, "attributes": [1]},
        {"prompt": "a", "helpfulness": 1},
        {**good, "helpfulness": float("inf")},
    )
    with pytest.raises(DataError) as caught:
        read_ratings(path, NAMES)
    text = str(caught.value)
    assert "helpfulness is '4', expected a finite number" in text
    assert "verbosity is True" in text and "attributes is a list" in text and "response is missing" in text
    assert "helpfulness is inf" in text and "line 1:" not in text


def test_a_name_that_no_line_has(tmp_path):
    path = write(tmp_path / "r.jsonl", {"prompt": "a", "response": "b", "helpfulness": 1})
    with pytest.raises(DataError, match=r"rates verbosity; set full\.attributes"):
        read_ratings(path, NAMES)


def test_what_is_left_out_is_counted(tmp_path, tokenizer):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    rated = {"helpfulness": 1, "verbosity": 2}
    path = write(
        tmp_path / "r.jsonl",
        *({"prompt": f"p{i}", "response": "fine", **rated} for i in range(4)),
        {"prompt": "p", "response": "unrated"},
        {"prompt": "p", "response": "long" * 30, **rated},
        {"messages": turns, "response": "fine", **rated},
    )
    found, skipped = encode_ratings(
        read_ratings(path, NAMES), tokenizer, max_length=40, max_answers=3, single_turn_only=True, seed=1
    )
    too_long = "128 to 128 tokens, above data.max_length=40; data.max_length=128 keeps all"
    assert skipped == {SKIP_UNRATED: 1, too_long: 1, SKIP_MULTI_TURN: 1, SKIP_LIMIT: 1}
    assert len(found) == 3
    prompt = json.loads(found[0].prompt_key)[0][1]
    assert list(found[0].tokens) == encode_conversation(tokenizer, [{"role": "user", "content": prompt}], "fine")
    with pytest.raises(DataError, match="none of 7 rated answers"):
        encode_ratings(read_ratings(path, NAMES), tokenizer, max_length=2)
