"""Hydra overrides as they stand on a command line, for programs that start others with them."""

from __future__ import annotations

from collections.abc import Sequence


def override_of(args: Sequence[str], key: str) -> str | None:
    """The value that Hydra overrides give to a key; the last one counts."""
    values = [
        value for name, found, value in (arg.partition("=") for arg in args) if found and name.lstrip("+") == key
    ]
    return values[-1] if values else None
