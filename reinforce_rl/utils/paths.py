"""Paths of files that the package ships: beside it in a clone, inside it in a wheel."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
IS_CLONE = not (PACKAGE / "conf").is_dir()


def shipped(in_wheel: str, in_clone: str) -> Path:
    """Return a path below the package in a wheel, below the repository in a clone."""
    return PACKAGE.parent / in_clone if IS_CLONE else PACKAGE / in_wheel


def cache_folder() -> Path:
    """Return the folder for files that can be made again.

    It is `.cache` of a clone, else below the user's cache folder.
    """
    if IS_CLONE:
        return PACKAGE.parent / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reinforce_rl"
