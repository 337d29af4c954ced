"""The list of errors and their keys: errors without a key are found, and the list is current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("error_keys", ROOT / "tools" / "error_keys.py")
assert _spec is not None
assert _spec.loader is not None
error_keys = importlib.util.module_from_spec(_spec)
sys.modules["error_keys"] = error_keys
_spec.loader.exec_module(error_keys)

SOURCE = """
raise DataError(f"{path}, line {line}: no JSON\\n" + advice, key="data.line.not_json")
raise errors.CheckpointError("no key")
raise CheckpointError(text, key=error.key)
raise ConfigError([Fault(f"lr is {lr}", key="config.out_of_range"), "a text alone", other])
raise ValueError("not ours")
"""


def test_keys_and_sentences_of_a_source():
    errors = list(error_keys.error_calls(SOURCE, "reinforce_rl/new/file.py"))
    seen = {
        (error.place.rpartition(":")[2], error.key, error.is_computed, error.sentence)
        for error in errors
    }
    expected = {
        ("2", "data.line.not_json", False, "{path}, line {line}: no JSON\n{advice}"),
        ("3", "", False, "no key"),
        ("4", "", True, "{text}"),
        ("5", "config.out_of_range", False, "lr is {lr}"),
        ("5", "", False, "a text alone"),
    }
    assert seen == expected
    assert error_keys.listing(errors) == (
        "config.out_of_range\tFault\tlr is {lr}\n"
        "data.line.not_json\tDataError\t{path}, line {line}: no JSON\\n{advice}\n"
    )
    assert sorted(error_keys.faults_of(errors)) == [
        "reinforce_rl/new/file.py:3: has no key",
        "reinforce_rl/new/file.py:5: has no key",
    ]


def test_a_sentence_in_a_local_variable_is_read():
    source = """
def check(path):
    sentence = "of before"
    if path:
        sentence = f"{path} does not exist"
        raise ConfigError([Fault(sentence, key="data.file.missing")])
    raise DataError(path, key="data.file.other")
"""
    errors = list(error_keys.error_calls(source, "reinforce_rl/new/file.py"))
    sentences = {error.key: error.sentence for error in errors}
    assert sentences == {
        "data.file.missing": "{path} does not exist",
        "data.file.other": "{path}",
    }


def test_a_key_that_is_passed_on_where_there_is_one_is_listed():
    source = 'raise CheckpointError(str(error), key=key_of(error, "checkpoint.file.not_readable"))'
    errors = list(error_keys.error_calls(source, "reinforce_rl/new/file.py"))
    assert error_keys.listing(errors) == (
        "checkpoint.file.not_readable\tCheckpointError\t{str(error)}\n"
    )


def test_a_class_that_makes_its_own_sentence_is_listed():
    source = """
class ColumnMissing(DataError):
    def __init__(self, column):
        super().__init__(f"no {column}", key="data.column.missing")
"""
    errors = list(error_keys.error_calls(source, "reinforce_rl/new/file.py"))
    assert error_keys.listing(errors) == "data.column.missing\tColumnMissing\tno {column}\n"


def test_the_fault_of_settings_names_each_of_them():
    source = """
settings_fault(cfg, ("model.a", "model.b"), f"at most {most}", key="config.a.above_b")
settings_fault(cfg, (name, "placement"), "expected 0")
"""
    errors = list(error_keys.error_calls(source, "reinforce_rl/new/file.py"))
    expected = [
        ("config.a.above_b", "model.a is {value} and model.b is {value}; at most {most}"),
        ("", "{name} is {value} and placement is {value}; expected 0"),
    ]
    assert [(error.key, error.sentence) for error in errors] == expected
    assert error_keys.faults_of(errors) == ["reinforce_rl/new/file.py:3: has no key"]


def test_a_key_has_two_parts():
    errors = list(
        error_keys.error_calls('raise DataError("text", key="Data")', "reinforce_rl/new/file.py")
    )
    assert error_keys.faults_of(errors) == [
        "reinforce_rl/new/file.py:1: the key 'Data' is not of the form area.kind"
    ]


def test_the_list_is_todays_and_every_error_has_a_key():
    errors = error_keys.package_errors()
    assert error_keys.faults_of(errors) == []
    assert error_keys.SENTENCES.read_text(encoding="utf-8") == error_keys.listing(errors)
