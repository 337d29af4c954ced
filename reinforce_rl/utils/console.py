"""A console for tables, and warnings that are said once."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from reinforce_rl.utils.control_characters import show_control_characters
from reinforce_rl.utils.job_rank import is_first_rank

logger = logging.getLogger(__name__)


class Console(rich.console.Console):
    """rich's console for texts of others, which it prints as they are.

    Control characters are shown, and `[red]`, `[/]` or `:smile:` are no markup. Our own styles are those of a `Text`.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        # rich takes a plain text for markup here, whatever the console says.
        return super().status(Text(status) if isinstance(status, str) else status, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        # Also called for each cell of a table, before the cell is cut to its width.
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(show_control_characters(segment.text), segment.style)


def table_console(**options: Any) -> Console:
    """Return one as wide as COLUMNS says, else as the terminal, and 160 columns wide where there is none."""
    width = chosen_width() or max(80, shutil.get_terminal_size((160, 0)).columns)
    return Console(width=width, **options)


def chosen_width() -> int | None:
    """Return the width that COLUMNS asks for; None if it says nothing, or 0, as terminals of no known width do."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) or None if columns.isdecimal() else None


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning on rank 0, the first time that this process is given the text."""
    if is_first_rank():
        logger.warning(text)
