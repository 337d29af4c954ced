"""Where what the package needs besides its code lies: beside it in a clone, inside of it in a wheel."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
IS_CLONE = not (PACKAGE / "conf").is_dir()


def shipped(in_wheel: str, in_clone: str) -> Path:
    """A path below the package in a wheel, below the repository in a clone."""
    return PACKAGE.parent / in_clone if IS_CLONE else PACKAGE / in_wheel


def cache_folder() -> Path:
    """What can be made again: `.cache` of a clone, else below the user's own cache."""
    if IS_CLONE:
        return PACKAGE.parent / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reinforce_rl"
