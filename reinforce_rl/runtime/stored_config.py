"""Read the configuration in a run's folder, maybe another person's, as values within bounds.

The same bounds apply to the configuration that a run writes, so its next start can read it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.utils.files import encode
from reinforce_rl.utils.untrusted_files import MAX_CONFIG_BYTES, parse_yaml, read_bounded

MAX_CONFIG_VALUES = 100_000  # keys, values and lists together
INTERPOLATION = "${"
# characters of a dotted key, which has the names of all keys above it
_MAX_KEY = 500
_SHOWN = 200  # characters of a value in a message
_ADVICE = "A run writes none such: restore or remove the file"


def config_text(settings: Mapping[str, Any]) -> str:
    """Return settings as the YAML in a run's folder; a path becomes its text.

    Raises ConfigError with the setting that the next start could not read.
    """
    tree = _without_paths(settings)
    text = OmegaConf.to_yaml(OmegaConf.create(tree))
    fault = _fault(text)
    if fault is None:
        return text
    name, reason = _faulty_setting(tree, fault)
    sentence = (
        f"{name} cannot be stored in the run's folder, where the next start reads it: {reason}. "
        "Write it differently, or put it into a file and give the file's path"
    )
    raise ConfigError([Fault(sentence, key="config.setting.not_storable")])


def _without_paths(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _without_paths(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(child) for child in value]
    return value


def _quick_yaml(tree: Any) -> str:
    """Return settings as YAML, faster than OmegaConf; empty if only OmegaConf can write them."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    try:
        return yaml.dump(tree, Dumper=dumper, allow_unicode=True)
    except yaml.YAMLError:
        return ""


@functools.lru_cache(8)  # a start calls it several times with the same text
def _fault(text: str) -> str | None:
    """Return why `parse_stored` refuses a text; None if it accepts the text."""
    if len(encode(text)) > MAX_CONFIG_BYTES:
        return f"more than {MAX_CONFIG_BYTES} bytes as YAML"
    try:
        _parse(text)
    except ValueError as error:
        return str(error)
    return None


def _faulty_setting(tree: Any, reason: str) -> tuple[str, str]:
    """Return the first innermost setting that `_fault` refuses, and the reason."""
    path: list[str] = []
    name = "the configuration"
    while isinstance(tree, dict) and len(name) <= _SHOWN:
        for key, child in tree.items():
            alone: Any = child
            for part in reversed([*path, key]):
                alone = {part: alone}
            fault = _fault(_quick_yaml(alone))
            if fault is not None:
                break
        else:
            break
        path.append(key)
        name = ".".join(map(str, path))
        tree = child
        reason = fault
    return name[:_SHOWN], reason


def read_stored(path: Path) -> str:
    """Read a stored configuration.

    Raises DataError if it is too large, not a file, or not UTF-8.
    """
    try:
        data = read_bounded(path, max_bytes=MAX_CONFIG_BYTES, within=path.parent)
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; expected the configuration of a run",
            key="run.config.missing",
        ) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        sentence = f"{path}: not UTF-8 ({error}). {_ADVICE}"
        raise DataError(sentence, key="run.config.not_utf8") from error


def parse_stored(text: str, where: str) -> dict[str, Any]:
    """Parse a stored configuration; interpolations remain texts.

    Raises DataError, beginning with `where`, if it is not a mapping or exceeds the bounds.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise DataError(
            f"{where}: {len(text)} characters; expected at most {MAX_CONFIG_BYTES}. {_ADVICE}",
            key="run.config.too_long",
        )
    try:
        return _parse(text)
    except ValueError as error:
        raise DataError(f"{where}: {error}. {_ADVICE}", key="run.config.invalid") from error


def _parse(text: str) -> dict[str, Any]:
    """Parse a configuration; raise ValueError if it is not a mapping or exceeds the bounds."""
    # Not OmegaConf.create: it parses interpolations, and takes hours for some.
    tree = parse_yaml(text, max_values=MAX_CONFIG_VALUES)
    if tree is None:  # an empty file
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"found a {type(tree).__name__}, expected keys with values")
    if _has_null_key(tree):
        raise ValueError("a key is null; expected a name")
    longest = _longest_key(tree)
    if longest > _MAX_KEY:
        expected = f"expected at most {_MAX_KEY}"
        raise ValueError(f"a key has {longest} characters with those above it; {expected}")
    return {str(key): value for key, value in tree.items()}


def _longest_key(value: Any) -> int:
    """Return the characters of the longest dotted key below a value."""
    if isinstance(value, dict):
        return max(
            (len(str(key)) + 1 + _longest_key(child) for key, child in value.items()), default=0
        )
    if isinstance(value, list):
        return max(map(_longest_key, value), default=0)
    return 0


def _has_null_key(value: Any) -> bool:
    """Return True if a mapping below a value has the key null, which OmegaConf refuses."""
    if isinstance(value, dict):
        return None in value or any(_has_null_key(child) for child in value.values())
    if isinstance(value, list):
        return any(_has_null_key(child) for child in value)
    return False


def parse_values(text: str, where: str) -> dict[str, Any]:
    """Parse settings for use, by `parse_stored`; an interpolation raises DataError, too."""
    tree = parse_stored(text, where)
    for key, value in _texts_below(tree):
        if INTERPOLATION in value:
            raise DataError(
                f"{where}: {key} is {value[:_SHOWN]!r}; expected a value. An interpolation could "
                "read the environment of the user who opens the folder, and runs do not write any; "
                "replace it by the value",
                key="run.config.interpolation",
            )
    return tree


def _texts_below(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield all keys and texts below a value, with their dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            place = f"{key}.{name}" if key else str(name)
            yield place, str(name)
            yield from _texts_below(child, place)
    elif isinstance(value, Sequence):
        for index, child in enumerate(value):
            yield from _texts_below(child, f"{key}[{index}]")
