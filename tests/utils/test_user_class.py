"""Classes that a setting names by a dotted name."""

from __future__ import annotations

from pathlib import Path

import pytest

from reinforce_rl.utils.user_class import import_user_class


def test_a_class_is_imported_by_its_dotted_name() -> None:
    assert import_user_class("pathlib.Path") is Path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module.Kept", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("pathlib.Kept", "AttributeError: module 'pathlib' has no attribute 'Kept'"),
        ("raises_at_import.Kept", "ZeroDivisionError: division by zero"),
        ("silent_at_import.Kept", "ValueError: no message"),
    ],
)
def test_any_error_of_the_import_is_an_import_error_with_its_reason(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import.py").write_text("1 / 0\n")
    (tmp_path / "silent_at_import.py").write_text("raise ValueError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as raised:
        import_user_class(name)
    assert str(raised.value) == f"cannot be imported: {reason}"
