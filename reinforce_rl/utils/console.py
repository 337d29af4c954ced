"""A console for tables."""

from __future__ import annotations

import os
import shutil
from typing import Any

from rich.console import Console


def table_console(**options: Any) -> Console:
    """Return one as wide as COLUMNS says, else as the terminal, and 160 columns wide where there is none."""
    least = 1 if os.environ.get("COLUMNS", "").isdecimal() else 80
    return Console(width=max(least, shutil.get_terminal_size((160, 0)).columns), **options)
