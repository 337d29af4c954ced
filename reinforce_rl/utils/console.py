"""A console for tables, and warnings that are logged once."""

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
    """rich's console for texts of unknown origin, which are printed as they are.

    Control characters are shown, and `[red]`, `[/]` or `:smile:` are not markup. A `Text` carries
    the package's own styles.
    """

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        # rich reads a plain text as markup here, whatever the console's options are.
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
    """Return a console as wide as COLUMNS says, else as the terminal.

    It is 160 columns wide without a terminal.
    """
    width = chosen_width() or max(80, shutil.get_terminal_size((160, 0)).columns)
    return Console(width=width, **options)


def chosen_width() -> int | None:
    """Return the width that COLUMNS asks for.

    None if it is unset or 0; terminals of unknown width set it to 0.
    """
    columns = os.environ.get("COLUMNS", "")
    return int(columns) or None if columns.isdecimal() else None


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning on rank 0, once per text and process."""
    if is_first_rank():
        logger.warning(text)
