"""Read a YAML of NeMo-Aligner, which may be another person's, within bounds.

An interpolation may name other keys of the file and call three functions of numbers. All others,
such as `${oc.env:HOME}`, could copy the environment of whoever converts the file into the new file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.utils.untrusted_files import MAX_CONFIG_BYTES, parse_yaml, read_bounded

_MAX_CHARS = 1000  # of a text with interpolations, and of its value
_MAX_STARTS = 8  # interpolations in one text
_MAX_INTERPOLATIONS = 200  # texts with interpolations
_MAX_ROUNDS = 16  # length of a chain of interpolations
_MAX_NUMBER = 1e15
_MISSING = "???"  # OmegaConf's mark of a missing value
_START = "${"
# Matches the start of another key's name or of a call of an allowed function. The arguments of a
# call are matched in turn.
_ALLOWED_START = re.compile(r"\$\{(?:(?:subtract|multiply|int_div):|[\w.\[\]-]+\})", re.ASCII)

Place = tuple[str | int, ...]


class _Index(int):
    """An index into a list, as opposed to a key that is a number."""


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_NUMBER:
        raise ValueError(f"{value!r:.40}; expected a number of at most {_MAX_NUMBER:g}")
    return value


_FUNCTIONS = {
    "subtract": lambda a, b: _number(a) - _number(b),
    "multiply": lambda a, b: _number(a) * _number(b),
    "int_div": lambda a, b: _number(a) // _number(b),
}


def read_nemo_file(path: Path) -> tuple[DictConfig, dict[str, str]]:
    """Return the values of a file, and a reason for each key without a value here.

    Raises ConfigError if the file cannot be read or is not YAML.
    """
    try:
        data = read_bounded(path, max_bytes=MAX_CONFIG_BYTES)
    except OSError as error:
        sentence = f"{path} cannot be read: {error.strerror or error}"
        raise ConfigError([Fault(sentence, key="nemo.file.unreadable")]) from error
    try:
        tree = parse_yaml(data.decode("utf-8"))
        if not isinstance(tree, dict):
            return OmegaConf.create(), {}
        texts = dict(_texts_below(tree))
        for place in texts:
            _put(tree, place, _MISSING)
        cfg = OmegaConf.create(tree)
    except (ValueError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        sentence = f"{path} cannot be read as YAML: {reason}"
        raise ConfigError([Fault(sentence, key="nemo.file.not_yaml")]) from error
    for name, function in _FUNCTIONS.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    return cfg, _resolve(cfg, texts)


def _texts_below(value: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield all texts with an interpolation below a value, with their places."""
    if isinstance(value, str) and _START in value:
        yield place, value
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _texts_below(child, (*place, name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _texts_below(child, (*place, _Index(index)))


def _put(tree: Any, place: Place, value: Any) -> None:
    *above, name = place
    for part in above:
        tree = tree[part]
    tree[name] = value


def _resolve(cfg: DictConfig, texts: dict[Place, str]) -> dict[str, str]:
    """Replace texts with interpolations by their values; return a reason for each key without one.

    Each round computes the values whose inputs are already known, so every value is computed once.
    """
    reasons = {place: _refused(text) for place, text in texts.items()}
    if len(texts) > _MAX_INTERPOLATIONS:
        reason = (
            f"the file has {len(texts)} values with ${{...}}; expected at most "
            f"{_MAX_INTERPOLATIONS}"
        )
        reasons = dict.fromkeys(texts, reason)
    waiting = [place for place, reason in reasons.items() if not reason]
    for _ in range(_MAX_ROUNDS):
        finished = []
        for place in waiting:
            try:
                value = _value_of(cfg, place, texts[place])
            except InterpolationToMissingValueError:
                continue
            except ValueError as error:
                reasons[place] = str(error)
                value = _MISSING
            finished.append((place, value))
        for place, value in finished:
            _put(cfg, place, value)
            waiting.remove(place)
    for place in waiting:
        reasons[place] = f"{texts[place]} leads to no value; write the value in its place"
    return {_leave_out(cfg, place): reason for place, reason in reasons.items() if reason}


def _refused(text: str) -> str:
    """Return why a text with interpolations is not computed; empty if it is computed."""
    if len(text) > _MAX_CHARS:
        return f"a text of {len(text)} characters with ${{...}}; expected at most {_MAX_CHARS}"
    starts = [match.start() for match in re.finditer(re.escape(_START), text)]
    if len(starts) > _MAX_STARTS:
        return f"{text} has {len(starts)} interpolations; expected at most {_MAX_STARTS}"
    if all(_ALLOWED_START.match(text, start) for start in starts):
        return ""
    return (
        f"{text} is not computed, since it could read more than this file; write the value in its "
        "place"
    )


def _value_of(cfg: DictConfig, place: Place, text: str) -> Any:
    """Return the value of a text with interpolations, and leave its place as it was.

    Raises InterpolationToMissingValueError if it names a value that is not yet computed, ValueError
    if it has no value.
    """
    parent: Any = cfg
    for part in place[:-1]:
        parent = parent[part]
    try:
        parent[place[-1]] = text
        value = parent[place[-1]]
    except InterpolationToMissingValueError:
        raise
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).partition("\n")[0][:_MAX_CHARS]
        raise ValueError(f"{text} cannot be resolved: {reason}") from error
    finally:
        parent[place[-1]] = _MISSING
    if isinstance(value, DictConfig | ListConfig):
        raise ValueError(
            f"{text} leads to a group of keys or a list; write the values in its place"
        )
    if isinstance(value, str) and (len(value) > _MAX_CHARS or _START in value):
        raise ValueError(
            f"{text} makes a longer text or another interpolation; write the value in its place"
        )
    return value


def _leave_out(cfg: DictConfig, place: Place) -> str:
    """Remove a value, or the whole list that has it; return the dotted key of what was removed."""
    is_index = [isinstance(part, _Index) for part in place]
    if True not in is_index:
        return ".".join(map(str, place))
    of_list = place[: is_index.index(True)]
    _put(cfg, of_list, _MISSING)
    return ".".join(map(str, of_list))
