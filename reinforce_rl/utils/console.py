"""A console for tables."""

from __future__ import annotations

import shutil
from typing import Any

from rich.console import Console


def table_console(**options: Any) -> Console:
    """Return one as wide as the terminal, and 160 columns wide where there is none."""
    return Console(width=max(80, shutil.get_terminal_size((160, 0)).columns), **options)
