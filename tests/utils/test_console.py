"""The width of tables."""

from __future__ import annotations

import pytest

from reinforce_rl.utils.console import table_console


@pytest.mark.parametrize(("columns", "width"), [("120", 120), ("20", 20), ("", 160)])
def test_width(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("os.get_terminal_size", lambda _: (_ for _ in ()).throw(OSError()))
    assert table_console().width == width
