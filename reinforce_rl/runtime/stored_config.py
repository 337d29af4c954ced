"""Reads the configuration that lies in a run's folder, which may be somebody else's: within bounds, and as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.errors import DataError
from reinforce_rl.utils.untrusted_files import parse_yaml, read_bounded

MAX_CONFIG_BYTES = 1 << 20
INTERPOLATION = "${"
_MAX_KEY = 500  # characters of a key and of those above it: each of their values is named by all of them
_SHOWN = 200  # characters of a value in a message


def read_stored(path: Path) -> str:
    """Read a configuration that lies in a folder. Raises DataError if it is too large, no file or not UTF-8."""
    try:
        data = read_bounded(path, max_bytes=MAX_CONFIG_BYTES, within=path.parent)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; expected the configuration of a run") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}); restore it or take it away") from error


def parse_stored(text: str, where: str) -> dict[str, Any]:
    """Parse a configuration that lies in a folder; interpolations are kept as texts.

    Raises DataError, which begins with `where`, for what is no mapping or exceeds the bounds of `yaml_fault`.
    """
    if len(text) > MAX_CONFIG_BYTES:
        raise DataError(f"{where}: more than {MAX_CONFIG_BYTES} characters")
    try:
        # Not by OmegaConf.create, which parses interpolations and takes hours for some.
        tree = parse_yaml(text)
    except ValueError as error:
        raise DataError(f"{where}: {error}; restore it or take it away") from error
    if tree is None:  # an empty file
        return {}
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise DataError(f"{where}: found a {kind}, expected keys with values; restore it or take it away")
    if _has_null_key(tree):
        raise DataError(f"{where}: a key is null; expected a name; restore it or take it away")
    longest = _longest_key(tree)
    if longest > _MAX_KEY:
        raise DataError(f"{where}: a key has {longest} characters with those above it; expected at most {_MAX_KEY}")
    return {str(key): value for key, value in tree.items()}


def _longest_key(value: Any) -> int:
    """Return the characters of the longest dotted key below a value."""
    if isinstance(value, dict):
        return max((len(str(key)) + 1 + _longest_key(child) for key, child in value.items()), default=0)
    if isinstance(value, list):
        return max(map(_longest_key, value), default=0)
    return 0


def _has_null_key(value: Any) -> bool:
    """Tell whether a mapping below a value has the key null, which OmegaConf does not take."""
    if isinstance(value, dict):
        return None in value or any(_has_null_key(child) for child in value.values())
    if isinstance(value, list):
        return any(_has_null_key(child) for child in value)
    return False


def parse_values(text: str, where: str) -> dict[str, Any]:
    """Parse as `parse_stored`, for settings that are to be used; raise DataError for an interpolation too."""
    tree = parse_stored(text, where)
    for key, value in _texts_below(tree):
        if INTERPOLATION in value:
            raise DataError(
                f"{where}: {key} is {value[:_SHOWN]!r}; expected a value. An interpolation could read the environment "
                "of whoever opens the folder, and a run writes none; write the value in its place"
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
