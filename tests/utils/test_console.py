"""The width of tables."""

from __future__ import annotations

import pytest

from reinforce_rl.preflight.run import wide_console
from reinforce_rl.utils.console import table_console


@pytest.mark.parametrize(("columns", "width"), [("120", 120), ("20", 20), ("0", 160), ("", 160)])
def test_width(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("os.get_terminal_size", lambda _: (_ for _ in ()).throw(OSError()))
    assert table_console().width == width


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("150", 150), ("0", 110), ("", 110)])
def test_width_of_the_plan(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert wide_console().width == width
