"""The keys of errors: their form, their output, and that they survive a pickle."""

from __future__ import annotations

import pickle

import pytest
from helpers.errors import check_error, check_fault, keys_of, printed_keys, raises_error

from reinforce_rl.errors import (
    ConfigError,
    DataError,
    DivergedError,
    Fault,
    ReinforceError,
    StoppedEarly,
)
from reinforce_rl.utils.untrusted_files import UnreadableFileError


@pytest.mark.parametrize("kind", [ReinforceError, DataError, StoppedEarly, UnreadableFileError])
def test_an_error_has_a_sentence_and_a_key(kind):
    error = kind("train.jsonl, line 3: no JSON", key="data.line.not_json")
    assert str(error) == "train.jsonl, line 3: no JSON"
    assert error.key == "data.line.not_json"
    assert error.with_keys() == "train.jsonl, line 3: no JSON [data.line.not_json]"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.key == error.key


def test_an_error_without_a_key_prints_none():
    assert ReinforceError("no key").with_keys() == "no key"


def test_each_fault_of_a_configuration_has_its_key():
    error = ConfigError([Fault("lr is -1", "config.out_of_range"), "old"])
    assert error.keys == ["config.out_of_range", ""]
    assert error.with_keys().splitlines() == [
        "2 faults in the configuration:",
        "  1. lr is -1 [config.out_of_range]",
        "  2. old",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert again.keys == error.keys
    assert str(again) == str(error)
    assert str(ConfigError(["one"])).splitlines()[0] == "1 fault in the configuration:"


def test_a_diverged_policy_has_a_key():
    error = DivergedError("the loss is nan", key="trainer.loss.not_finite")
    assert error.key == "trainer.loss.not_finite"
    assert str(error).startswith("the loss is nan: ")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.key == error.key


def test_the_helpers_see_a_wrong_key_and_a_missing_value():
    error = DataError("line 3 of train.jsonl", key="data.line.not_json")
    check_error(error, "data.line.not_json", 3, "train.jsonl")
    with pytest.raises(AssertionError):
        check_error(error, "data.line.other")
    with pytest.raises(AssertionError):
        check_error(error, "data.line.not_json", 4)
    faults = [Fault("lr is -1", "config.out_of_range"), Fault("lr is -2", "config.out_of_range")]
    check_fault(faults, "config.out_of_range", -2)
    with pytest.raises(AssertionError):
        check_fault(faults, "config.out_of_range", -3)
    with pytest.raises(AssertionError):
        check_fault(faults, "config.other")
    with raises_error("data.line.not_json", 3) as caught:
        raise error
    assert caught.value is error
    assert keys_of(error) == ["data.line.not_json"]
    with pytest.raises(AssertionError):
        keys_of(ValueError("not ours"))
    printed = "error: a [b.c]\n  1. d [config.wrong_type]\nnothing [here] or [e.f] inside\n"
    assert printed_keys(printed) == ["b.c", "config.wrong_type"]
