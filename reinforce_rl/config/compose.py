"""Compose a shipped configuration with overrides, by Hydra, with readable errors."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.base import NOT_SET
from reinforce_rl.config.describe import PROGRAMS
from reinforce_rl.config.load import read, read_config, renamed
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.paths import shipped

CONF_FOLDER = shipped("conf", "conf")
_PROGRAMS = {
    "serve_reward_model": "serve",
    "demo_server": "serve",
    "train_reward_model": "train-rm",
}
# values that Hydra's grammar reads without quotes
_BARE = re.compile(r"[\w\s./:+%*@?|-]*", re.ASCII)
_SYNTAX = re.compile(r"""['"\\\[\]{}(),$]""")  # characters with a meaning in Hydra's grammar


def compose(name: str, overrides: Sequence[str], folder: Path = CONF_FOLDER) -> DictConfig:
    """Compose FOLDER/NAME.yaml with overrides, as the programs do.

    ConfigError has Hydra's text or a better one.
    """
    return _compose(name, overrides, folder, is_whole=True)


def compose_stored(tree: Mapping[str, Any], overrides: Sequence[str]) -> DictConfig:
    """Compose a training run's settings with overrides, as `compose` does a file, but not in the
    run's folder.
    """
    name = "train_reinforce_actor"
    with tempfile.TemporaryDirectory() as folder:
        # `defaults` would have Hydra read other files, and `hydra` is its own section.
        keys = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
        OmegaConf.save(OmegaConf.create(keys), Path(folder, f"{name}.yaml"))
        return compose(name, overrides, Path(folder))


def _compose(name: str, overrides: Sequence[str], folder: Path, is_whole: bool) -> DictConfig:
    try:
        with hydra.initialize_config_dir(str(folder.resolve()), version_base="1.3"):
            return hydra.compose(name, overrides=[with_quotes(override) for override in overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, name, overrides, folder, is_whole=is_whole) from error


def with_quotes(override: str) -> str:
    """Quote a value that Hydra's grammar cannot read bare, such as a path with `~`, `=` or
    non-ASCII characters.

    A value with Hydra's own syntax (quotes, brackets, commas, `$`) is returned unchanged.
    """
    key, equals, value = override.partition("=")
    if _BARE.fullmatch(value) or _SYNTAX.search(value):
        return override
    return f"{key}{equals}'{value}'"


def explained(
    error: Exception,
    name: str,
    overrides: Sequence[str],
    folder: Path = CONF_FOLDER,
    *,
    is_whole: bool = True,
) -> ConfigError:
    """Name every override that cannot be read, unknown key and bare comma.

    Hydra stops at the first, so this tries again without it until none is left.

    Then the keys that were given with a plus, and the values, are judged too, so that one message
    has all.

    Args:
        is_whole: the shipped file and the overrides are all that is composed, so that rules across
            keys can be judged.
    """
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        sentence = f"{group} is {choice!r}; expected one of {', '.join(error.options)}"
        return ConfigError([Fault(sentence, key="config.group.not_a_choice")])
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        stem = error.missing_cfg_file.removesuffix(".yaml")
        sentence = f"there is no {stem}.yaml in the folder of --config-dir, nor in {folder}"
        return ConfigError([Fault(sentence, key="config.file.missing")])
    text = str(error).partition("\nConfig search path:")[0].strip()
    # Hydra takes a bare comma for a sweep over several runs.
    commas = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '([^=]+)=(.*)'", text)
    unknown = re.search(r"Could not override '([^']+)'|not in struct\s+full_key: (\S+)", text)
    key = None
    faults: list[str]
    if isinstance(error, OverrideParseException) and error.override:
        expected = (
            "expected KEY=VALUE, with quotes around a value with special characters: \"KEY='a, b'\""
        )
        faults = [
            Fault(
                f"{error.override} cannot be read as an override; {expected}",
                key="config.override.not_readable",
            )
        ]
        key = error.override.partition("=")[0]
    elif commas is not None:
        key, value = commas.groups()
        faults = [_bare_comma(key, value)]
    elif unknown is not None:
        key = unknown.group(1) or unknown.group(2)
        faults = [_unknown_key(key, folder / f"{name}.yaml", _value_of(key, overrides))]
    else:
        return ConfigError([Fault(text, key="config.hydra.refused")])
    rest = [override for override in overrides if override.partition("=")[0] != key]
    if len(rest) < len(overrides):
        try:
            composed = _compose(name, rest, folder, is_whole)
        except ConfigError as further:
            faults += further.faults
        else:
            faults += _faults_of_the_rest(composed, name, rest, is_whole)
    return ConfigError(faults)


def _bare_comma(key: str, value: str) -> Fault:
    return Fault(
        f"{key} is {value}; write a list as {key}='[{value}]', a string as {key}=\"'{value}'\"",
        key="config.override.bare_comma",
    )


def _faults_of_the_rest(
    composed: DictConfig, name: str, overrides: Sequence[str], is_whole: bool
) -> list[str]:
    """Return the faults of the composed configuration.

    If other keys may be in another file, only those of keys that overrides set.
    """
    if name not in PROGRAMS:
        return []
    given = [override.partition("=")[0].lstrip("+~") for override in overrides]
    schema = PROGRAMS[name]
    if is_whole:
        return read_config(composed, schema)[1]
    faults = read(schema, composed)[1]
    keys = {fault: f"{fault.split(' ')[0]}." for fault in faults}
    return [
        fault
        for fault, key in keys.items()
        if any(f"{known}.".startswith(key) or key.startswith(f"{known}.") for known in given)
    ]


def _value_of(key: str, overrides: Sequence[str]) -> object:
    """Return what the overrides give a key; they are `KEY=VALUE`."""
    values = [
        override.partition("=")[2] for override in overrides if override.partition("=")[0] == key
    ]
    return values[-1] if values else NOT_SET


def unknown_keys(keys: Iterable[str], name: str) -> list[Fault]:
    """Return a sentence for each key that conf/NAME.yaml has not, nor as a group with entries of
    one's own names.
    """
    file = CONF_FOLDER / f"{name}.yaml"
    known = [f"{key}." for key in _dotted_keys(OmegaConf.to_container(OmegaConf.load(file)))]
    unknown = [
        key
        for key in keys
        if not any(f"{key}.".startswith(prefix) or prefix.startswith(f"{key}.") for prefix in known)
    ]
    return [_unknown_key(key, file) for key in unknown]


def _unknown_key(wanted: str, config_file: Path, value: object = NOT_SET) -> Fault:
    config = OmegaConf.load(config_file)
    known = _dotted_keys(OmegaConf.to_container(config))
    if wanted in known:  # an empty group; Hydra adds keys to it only with a plus
        return Fault(
            f"{wanted} has no fixed keys; give each as +{wanted}.NAME=VALUE",
            key="config.group.needs_plus",
        )
    schema = PROGRAMS.get(config_file.stem, TrainConfig)
    fault = renamed(wanted, schema, value)
    if fault is not None:
        return fault
    for key in known:
        if wanted.startswith(f"{key}.") and OmegaConf.is_config(OmegaConf.select(config, key)):
            return Fault(
                f"{key} has no fixed keys; give {wanted} as +{wanted}=VALUE",
                key="config.group.needs_plus",
            )
    same_name = [key for key in known if key.split(".")[-1] == wanted.split(".")[-1]]
    close = get_close_matches(wanted, same_name, n=3, cutoff=0) or get_close_matches(
        wanted, known, n=1
    )
    word = re.split(r"[._]", wanted.rpartition(".")[2])[0]
    program = _PROGRAMS.get(config_file.stem, "train")
    advice = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"look for it: reinforce-rl {program} --help {word}"
    )
    return Fault(f"{wanted} is not a key of the configuration; {advice}", key="config.key.unknown")


def _dotted_keys(node: object, prefix: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [prefix[:-1]]
    return [key for name, child in node.items() for key in _dotted_keys(child, f"{prefix}{name}.")]
