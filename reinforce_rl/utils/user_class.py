"""Import what a setting names by a dotted name: a generator, a reward source or a logger."""

from __future__ import annotations

import pkgutil
from typing import Any

# Ends a sentence that says what else the setting may be.
OR_A_CLASS = "or a class in a module of the folder where you start, or on PYTHONPATH"


def import_user_class(name: str) -> Any:
    """Return the object of a dotted name.

    Raises ImportError: any error of the import, as in "cannot be imported: NameError: ...".
    """
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:
        reason = str(error) or "no message"
        raise ImportError(f"cannot be imported: {type(error).__name__}: {reason}") from error
