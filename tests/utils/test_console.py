"""The width of tables, and untrusted texts in the commands' output."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import RenderableType
from rich.table import Table

from reinforce_rl.debugging.differences import Bounds, FirstDifference
from reinforce_rl.debugging.recompute_results import Recomputation, SampleChange, StepChange
from reinforce_rl.debugging.replay_results import PhaseResult, Replay
from reinforce_rl.evaluation.results import ModelResult, Results
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.preflight.report import print_rows, print_warnings
from reinforce_rl.preflight.run import wide_console
from reinforce_rl.utils.console import Console, table_console
from reinforce_rl.utils.statistics import Estimate

PACKAGE = Path(__file__).parents[2] / "reinforce_rl"
# rich raises MarkupError for the last tag if it parses the text as markup.
HOSTILE = "[red]x[/red] [link=http://x]y[/link] :warning: [@click=f]z [/b]"


def printed(*shown: RenderableType, console: Console | None = None) -> str:
    console = console or Console(file=io.StringIO(), width=2000, force_terminal=False)
    for renderable in shown:
        console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def evaluation() -> RenderableType:
    numbers = {f"reward/{HOSTILE}": Estimate(1.0, 0.1, 2)}
    model = ModelResult(HOSTILE, "folder", numbers, {HOSTILE: 1}, {})
    return Results([model], []).table()


def recomputation() -> RenderableType:
    sample = SampleChange(1, 0, 0, HOSTILE, (True, True), (0.0, 1.0), (0.0, 1.0))
    step = StepChange(1, [sample], 0, 1.0, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    return Recomputation("run", {HOSTILE: (1, 2)}, [step], notes=[HOSTILE]).table()


def replay() -> RenderableType:
    phase = PhaseResult.of(HOSTILE, [FirstDifference(HOSTILE, 1, 2, 1, 1)], HOSTILE)
    return Replay(HOSTILE, 1, 0, [phase], [HOSTILE], Bounds()).table()


def plain_table() -> RenderableType:
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    return table


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (str, 1),
        (evaluation, 4),
        (recomputation, 2),
        (replay, 7),
        (plain_table, 4),
    ],
)
def test_texts_of_others_are_no_markup(make, count: int) -> None:
    shown = HOSTILE if make is str else make()
    assert printed(shown).count(HOSTILE) == count


def test_texts_of_others_in_rows_warnings_and_progress_are_no_markup() -> None:
    console = Console(file=io.StringIO(), width=2000, force_terminal=False)
    print_rows(console, HOSTILE, [(HOSTILE, HOSTILE)])
    print_warnings(console, [HOSTILE])
    panel = TrainingProgress(1, console=console, title=HOSTILE)._render()
    assert printed(panel, console=console).count(HOSTILE) == 5


def test_a_status_is_no_markup() -> None:
    console = Console(file=io.StringIO(), width=2000, force_terminal=False)
    assert HOSTILE in printed(console.status(HOSTILE).renderable, console=console)


def test_the_package_prints_on_this_console_only() -> None:
    """rich's own Console parses texts as markup, as `from_markup` and `rich.print` do."""
    others = (
        r"rich\.console import (\w+, )*Console\b|from_markup|from rich import (print|get_console)"
    )
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 200
    assert [str(path) for path in files if re.search(others, path.read_text())] == []


@pytest.mark.parametrize(("columns", "width"), [("120", 120), ("20", 20), ("0", 160), ("", 160)])
def test_width(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("os.get_terminal_size", lambda _: (_ for _ in ()).throw(OSError()))
    assert table_console().width == width


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("150", 150), ("0", 110), ("", 110)])
def test_width_of_the_plan(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert wide_console().width == width
