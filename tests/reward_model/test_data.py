"""Preference pairs and rated answers from files, with their faults, and their split."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.config.reward_model import PairsConfig
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.reward_model.data import (
    SKIP_LIMIT,
    SKIP_MULTI_TURN,
    SKIP_SAME,
    SKIP_UNRATED,
    describe_skipped,
    encode_pairs,
    encode_ratings,
    prompt_key,
    read_pairs,
    read_ratings,
    split_by_prompt,
)
from reinforce_rl.reward_model.template import encode_conversation

NAMES = ("helpfulness", "verbosity")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_no_prompt_is_on_both_sides():
    keys = [f"prompt {i % 60}" for i in range(200)]
    train, held_out = split_by_prompt(keys, 0.25, seed=3)
    assert sorted(train + held_out) == list(range(200))
    assert not {keys[i] for i in train} & {keys[i] for i in held_out}
    assert 0.1 < len(held_out) / 200 < 0.45
    assert split_by_prompt(keys, 0.25, seed=4) != (train, held_out)


def test_a_held_out_prompt_stays_held_out_when_pairs_are_added():
    keys = [f"prompt {i}" for i in range(50)]
    before = {keys[i] for i in split_by_prompt(keys, 0.3, 0)[1]}
    longer = ["new 1", *keys, "new 2"]
    after = {longer[i] for i in split_by_prompt(longer, 0.3, 0)[1]}
    assert before == after - {"new 1", "new 2"}


def test_prompts_that_differ_in_case_and_space_are_one(tmp_path):
    rows = [
        {"prompt": "\n\nHuman: How  are you?\n\nAssistant:", "chosen": "a", "rejected": "b"},
        {"prompt": "how are YOU?", "chosen": "c", "rejected": "d"},
        {"messages": [{"role": "user", "content": "How are you?"}], "chosen": "e", "rejected": "f"},
    ]
    pairs = read_pairs(write_lines(tmp_path / "pairs.jsonl", *rows))
    assert len({prompt_key(pair.messages) for pair in pairs}) == 1


def test_bad_lines_are_named_and_counted(tmp_path):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    bad = [
        "{broken",
        {"prompt": "p", "chosen": "a"},
        {"prompt": 3, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": ["a"], "rejected": "b"},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {"prompt": "\n\nHuman: a\n\nAssistant: b", "chosen": "a", "rejected": "b"},
        {"prompt": [{"role": "robot", "content": "x"}], "chosen": "a", "rejected": "b"},
        {"chosen": "a", "rejected": "b"},
        {"prompt": "\ud800", "chosen": "a", "rejected": "b"},
        *[{}] * 5,
    ]
    path = write_lines(tmp_path / "pairs.jsonl", good, *bad)
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    text = str(caught.value)
    assert text.startswith("14 lines")
    assert "... and 4 more" in text
    reasons = [
        "not valid JSON",
        "the key rejected is missing",
        "prompt is a number",
        "chosen is a list",
        "prompt is empty",
        "ends with an assistant message",
        "role system, user or assistant",
        "the key prompt is missing",
        "half of a surrogate pair",
    ]
    for number, reason in enumerate(reasons, 2):
        line = next(row for row in text.splitlines() if f"{path}:{number}:" in row)
        assert reason in line


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no line"):
        read_pairs(write_lines(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read_pairs(tmp_path / "none.jsonl")


def test_pairs_that_do_not_fit_are_counted(tmp_path, tokenizer):
    two_turns = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    path = write_lines(
        tmp_path / "pairs.jsonl",
        {"prompt": "one", "chosen": "yes", "rejected": "no"},
        {"prompt": "two", "chosen": "same ", "rejected": "same"},
        {"prompt": "three", "chosen": "x" * 50, "rejected": "no"},
        {"prompt": two_turns, "chosen": "yes", "rejected": "no"},
        {"prompt": "four", "chosen": "yes", "rejected": "no"},
        {"prompt": "five", "chosen": "yes", "rejected": "no"},
    )
    pairs = read_pairs(path)
    found, skipped = encode_pairs(pairs, tokenizer, PairsConfig(max_pairs=2, single_turn_only=True), max_length=30)
    assert len(found) == 2
    too_long = "62 to 62 tokens, above data.max_length=30; data.max_length=62 keeps all"
    assert skipped == {SKIP_SAME: 1, too_long: 1, SKIP_MULTI_TURN: 1, SKIP_LIMIT: 1}
    assert describe_skipped(skipped, 6) == [
        f"WARNING: 1 of 6 (17%) left out: {SKIP_SAME}",
        f"  1 of 6 (17%) left out: {SKIP_MULTI_TURN}",
        f"WARNING: 1 of 6 (17%) left out: {too_long}",
        f"  1 of 6 (17%) left out: {SKIP_LIMIT}",
    ]
    assert describe_skipped({too_long: 1}, 10) == [f"  1 of 10 (10%) left out: {too_long}"], "no more than a tenth"
    assert len(encode_pairs(pairs, tokenizer, PairsConfig(), max_length=62)[0]) == 5, "the remedy is one"
    _, skipped = encode_pairs(pairs, tokenizer, PairsConfig(max_answer_tokens=10), max_length=30)
    assert too_long not in skipped
    with pytest.raises(DataError, match="none of 6 pairs"):
        encode_pairs(pairs, tokenizer, PairsConfig(), max_length=3)


def test_attributes_in_an_object_or_as_keys_and_missing_ones(tmp_path):
    path = write_lines(
        tmp_path / "r.jsonl",
        {"prompt": "a", "response": "b", "attributes": {"helpfulness": 4, "verbosity": 1.5, "other": "x"}},
        {"prompt": "a", "response": "c", "helpfulness": 0, "verbosity": None, "complexity": 2},
        {"prompt": "a", "response": "d", "attributes": {}},
    )
    found = [answer.ratings for answer in read_ratings(path, NAMES)]
    assert found[0] == (4.0, 1.5)
    assert found[1][0] == 0.0 and math.isnan(found[1][1])
    assert all(math.isnan(rating) for rating in found[2])


def test_faulty_ratings_are_all_named(tmp_path):
    good = {"prompt": "a", "response": "b", "helpfulness": 1, "verbosity": 1}
    path = write_lines(
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
    path = write_lines(tmp_path / "r.jsonl", {"prompt": "a", "response": "b", "helpfulness": 1})
    with pytest.raises(DataError, match=r"rates verbosity; set full\.attributes"):
        read_ratings(path, NAMES)


def test_ratings_that_are_left_out_are_counted(tmp_path, tokenizer):
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    rated = {"helpfulness": 1, "verbosity": 2}
    path = write_lines(
        tmp_path / "r.jsonl",
        *({"prompt": f"p{i}", "response": "fine", **rated} for i in range(4)),
        {"prompt": "p", "response": "unrated"},
        {"prompt": "p", "response": "long" * 30, **rated},
        {"messages": turns, "response": "fine", **rated},
    )
    found, skipped = encode_ratings(
        read_ratings(path, NAMES), tokenizer, PairsConfig(max_pairs=3, single_turn_only=True), max_length=40, seed=1
    )
    too_long = "128 to 128 tokens, above data.max_length=40; data.max_length=128 keeps all"
    assert skipped == {SKIP_UNRATED: 1, too_long: 1, SKIP_MULTI_TURN: 1, SKIP_LIMIT: 1}
    assert len(found) == 3
    prompt = json.loads(found[0].prompt_key)[0][1]
    assert list(found[0].tokens) == encode_conversation(tokenizer, [{"role": "user", "content": prompt}], "fine")
    with pytest.raises(DataError, match="none of 7 rated answers"):
        encode_ratings(read_ratings(path, NAMES), tokenizer, PairsConfig(), max_length=2)
