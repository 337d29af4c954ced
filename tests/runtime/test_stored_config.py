"""A stored configuration of an untrusted folder is parsed within bounds, without interpolations."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.errors import check_error, raises_error
from omegaconf import OmegaConf

from reinforce_rl.config.compose import compose, compose_stored
from reinforce_rl.config.load import read_config
from reinforce_rl.errors import ConfigError, key_of
from reinforce_rl.runtime import stored_config
from reinforce_rl.runtime.stored_config import (
    config_text,
    parse_stored,
    parse_values,
    read_stored,
)
from reinforce_rl.utils.untrusted_files import MAX_CONFIG_BYTES

LETTERS = "abcdefghijklmnopqrst"
DOUBLED = "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise(LETTERS))
ALIASES = f"a: &a [x, x]\n{DOUBLED}"  # a million texts
BAD = {
    "aliases": ALIASES,
    "deep": "a: " + "[" * 100_000 + "]" * 100_000,
    "deep keys": "{a: " * 200 + "1" + "}" * 200,
    "large": "a: " + "x" * (MAX_CONFIG_BYTES + 1),
    "a list": "- a\n",
    "an object": "a: !!python/object/apply:os.mkdir [made]\n",
    "another object": "!!python/object/new:os.mkdir [made]\n",
    "no YAML": "a: [\n",
    "a bell": "a: \x07\n",
    "a key that is null": "a: [{b: {~: 1}}]\n",
    "an integer of an hour": "a: 1" + ":1" * 500_000,
    "a long key": f"? {'a' * 501}\n: 1\n",
    "long keys together": f"? {'a' * 250}\n: - ? {'b' * 250}\n    : 1\n",
    "a path": "a: !!python/object/apply:pathlib.PosixPath [[1]]\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_no_configuration_is_a_sentence_and_runs_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_long = len(text) > MAX_CONFIG_BYTES
    key = "run.config.too_long" if is_long else "run.config.invalid"
    with raises_error(key) as error:
        parse_stored(text, "run/config.yaml")
    assert str(error.value).startswith("run/config.yaml: ")
    assert len(str(error.value)) < 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "name", "named"),
    [
        ([0] * 1001, "kwargs.x", ["1000 keys"]),
        ({"a" * 520: 1}, "kwargs.x.aaa", ["546 characters", 500]),
        (10**50, "kwargs.x", ["51 characters", 40]),
        (b"\x00", "kwargs.x", ["binary"]),
        ("x" * MAX_CONFIG_BYTES, "kwargs.x", [f"{MAX_CONFIG_BYTES} bytes"]),
        ("ü" * (MAX_CONFIG_BYTES // 2), "kwargs.x", [f"{MAX_CONFIG_BYTES} bytes"]),
    ],
)
def test_a_setting_that_could_not_be_read_is_not_written(value: Any, name, named, monkeypatch):
    monkeypatch.setattr(stored_config, "MAX_CONFIG_VALUES", 1000)
    function = {"name": "a.b", "kwargs": {"y": 1, "x": value}}
    settings = {"model": {"seed": 1}, "reward_function": function}
    with pytest.raises(ConfigError) as error:
        config_text(settings)
    assert error.value.keys == ["config.setting.not_storable"]
    check_error(error.value, "config.setting.not_storable", f"reward_function.{name}", *named)
    assert len(str(error.value)) < 1000


@pytest.mark.more
def test_what_is_written_is_read_again():
    words = [f"word{index}" for index in range(10_000)]
    text = config_text({"words": words, "folders": (Path("a/b"), {"c": Path("d")})})
    assert parse_stored(text, "here") == {"words": words, "folders": ["a/b", {"c": "d"}]}


def test_keys_may_have_500_characters_together():
    tree = {"a" * 199: {"b" * 199: [{"c" * 99: 1}]}}
    assert parse_stored(yaml.safe_dump(tree), "here") == tree


def test_a_file_is_read_within_bounds(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(b"a: \xff\n")
    with raises_error("run.config.not_utf8", file):
        read_stored(file)
    file.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with raises_error("file.too_large", file, MAX_CONFIG_BYTES):
        read_stored(file)
    file.unlink()
    with raises_error("run.config.missing", file):
        read_stored(file)
    os.mkfifo(file)
    with raises_error("file.not_regular", file, "fifo"):
        read_stored(file)


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": "${oc.env:SECRET}"}},
        {"a": {"b": ["x", {"c": "pre ${oc.decode:${oc.env:SECRET}} post"}]}},
        {"a": {"${oc.env:SECRET}": 1}},
        {"a": {"b": "${.c}", "c": 1}},
        {"a": {"b": "\\${c}"}},
        {"a": {"b": "${a:" * 300 + "1" + "}" * 300}},
    ],
)
def test_interpolations_are_kept_as_texts_and_never_used(tree, monkeypatch):
    monkeypatch.setenv("SECRET", "leaked")
    text = yaml.safe_dump(tree)
    assert "leaked" not in str(parse_stored(text, "here"))
    with raises_error("run.config.interpolation", "${") as error:
        parse_values(text, "here")
    assert str(error.value).startswith("here: a.")


def test_a_runs_own_configuration_is_read_whole():
    overrides = [
        "model.optim.lr=1e-5",
        "reward=function",
        "reward_function.name=a.b",
        "+reward_function.kwargs.x=[1, {b: c}]",
    ]
    cfg = read_config(compose("train_reinforce_actor", overrides))[0]
    stored = parse_values(OmegaConf.to_yaml(OmegaConf.create(cfg.model_dump())), "here")
    again, faults = read_config(compose_stored(stored, ["model.seed=99"]))
    cfg.model.seed = 99
    assert again.model_dump() == cfg.model_dump()
    assert [fault for fault in faults if key_of(fault) == "config.key.unknown"] == []


def test_a_stored_configuration_makes_hydra_read_nothing_else(tmp_path):
    (tmp_path / "other.yaml").write_text("model: {seed: 7}\n")
    stored = {
        "defaults": ["other"],
        "hydra": {"searchpath": [f"file://{tmp_path}"]},
        "reward": "function",
    }
    composed = compose_stored(stored, [])
    assert dict(composed) == {"reward": "function"}
