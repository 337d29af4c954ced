"""Assertions on an error's key and values, so that its wording can change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from reinforce_rl.errors import ConfigError, ReinforceError

_PRINTED_KEY = re.compile(r" \[([a-z0-9_]+(?:\.[a-z0-9_]+)+)\]$", re.MULTILINE)


def keys_of(error: BaseException) -> list[str]:
    """Return the key of an error, or the keys of all faults of a configuration."""
    if isinstance(error, ConfigError):
        return error.keys
    assert isinstance(error, ReinforceError), f"{error!r} is no error of the package"
    return [error.key]


def printed_keys(text: str) -> list[str]:
    """Return the keys at the ends of printed lines."""
    return _PRINTED_KEY.findall(text)


def check_error(error: BaseException, key: str, *values: Any) -> None:
    """Assert that an error has this key, and that its message contains each value.

    If a configuration has several faults, a single one with this key must contain all values.
    """
    assert key in keys_of(error), (keys_of(error), str(error))
    if isinstance(error, ConfigError):
        check_fault(error.faults, key, *values)
        return
    for value in values:
        assert str(value) in str(error), (value, str(error))


def check_fault(faults: list[str], key: str, *values: Any) -> None:
    """Assert that a configuration's fault has this key and contains each value."""
    same_key = [fault for fault in faults if getattr(fault, "key", "") == key]
    assert same_key, (key, [(getattr(fault, "key", ""), fault) for fault in faults])
    assert any(all(str(value) in fault for value in values) for fault in same_key), (
        values,
        same_key,
    )


@contextmanager
def raises_error(key: str, *values: Any) -> Iterator[pytest.ExceptionInfo[ReinforceError]]:
    """Assert that the block raises an error with this key, and that its message has each value."""
    with pytest.raises(ReinforceError) as caught:
        yield caught
    check_error(caught.value, key, *values)
