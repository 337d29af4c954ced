"""Errors asked for by key and values, so that sentences can be improved without a change of tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from reinforce_rl.errors import ConfigError, ReinforceError

_PRINTED_KEY = re.compile(r" \[([a-z0-9_]+(?:\.[a-z0-9_]+)+)\]$", re.MULTILINE)


def keys_of(error: BaseException) -> list[str]:
    """Return the key of an error, or those of each fault of a configuration."""
    if isinstance(error, ConfigError):
        return error.keys
    assert isinstance(error, ReinforceError), f"{error!r} is no error of the package"
    return [error.key]


def printed_keys(text: str) -> list[str]:
    """Return the keys at the ends of the lines of what a program printed."""
    return _PRINTED_KEY.findall(text)


def check_error(error: BaseException, key: str, *values: Any) -> None:
    """Assert that an error has this key, and that its sentence names each of the values.

    Of a configuration's faults, one of this key must name all of them.
    """
    assert key in keys_of(error), (keys_of(error), str(error))
    if isinstance(error, ConfigError):
        check_fault(error.faults, key, *values)
        return
    for value in values:
        assert str(value) in str(error), (value, str(error))


def check_fault(faults: list[str], key: str, *values: Any) -> None:
    """Assert that one of the faults of a configuration has this key and names each of the values."""
    same_key = [fault for fault in faults if getattr(fault, "key", "") == key]
    assert same_key, (key, [(getattr(fault, "key", ""), fault) for fault in faults])
    assert any(all(str(value) in fault for value in values) for fault in same_key), (
        values,
        same_key,
    )


@contextmanager
def raises_error(key: str, *values: Any) -> Iterator[pytest.ExceptionInfo[ReinforceError]]:
    """Assert that the block raises an error of this key, whose sentence names each of the values."""
    with pytest.raises(ReinforceError) as caught:
        yield caught
    check_error(caught.value, key, *values)
