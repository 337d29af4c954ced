"""The table of mutants matches the tree; the tool detects killed mutants, survivors and hangs."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
assert _spec is not None
assert _spec.loader is not None
mutants = importlib.util.module_from_spec(_spec)
sys.modules["mutants"] = mutants
_spec.loader.exec_module(mutants)

Mutant = mutants.Mutant
Outcome = mutants.Outcome
KINDS = ("versions", "kl", "denominators", "kept", "families", "deadlines", "alerts", "plans")


def test_the_table_fits_the_tree():
    table = mutants.read_table()
    assert mutants.stale_rows(table) == []
    assert len(table) >= 100
    of_kind = Counter(mutant.kind for mutant in table)
    assert all(of_kind[kind] >= 8 for kind in KINDS), of_kind
    rows = [(mutant.file, mutant.old, mutant.new) for mutant in table]
    assert len(set(rows)) == len(rows)


def tree_of(folder: Path, **tests: str) -> Path:
    """A tree with one module, `value = 1 + 1`, and these files of tests."""
    (folder / "package.py").write_text("value = 1 + 1\nother = 2\n")
    for name, text in tests.items():
        (folder / f"test_{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file": "absent.py"}, ["absent.py", "no such file"]),
        ({"old": "value = 3"}, ["package.py", "value = 3", "0 times"]),
        ({"old": " = "}, ["package.py", "2 times"]),
        ({"new": "value = ("}, ["package.py", "value = ("]),
        ({"new": "value = 1 + 1"}, ["package.py", "itself"]),
        ({"tests": ("test_absent.py",)}, ["test_absent.py"]),
        ({"tests": ("test_a.py::test_absent",)}, ["test_a.py::test_absent"]),
    ],
)
def test_a_stale_row_is_named(changes, words, tmp_path):
    tree = tree_of(tmp_path, a="def test_value():\n    pass\n")
    right = {
        "file": "package.py",
        "kind": "a kind",
        "old": "value = 1 + 1",
        "new": "value = 1 - 1",
        "tests": ("test_a.py::test_value",),
    }
    assert mutants.stale_rows([Mutant(**right)], tree) == []
    (error,) = mutants.stale_rows([Mutant(**{**right, **changes})], tree)
    assert all(word in error for word in words), error


def outcome_of(verdict: str, kind: str = "kl", survives: str = "") -> Outcome:
    return Outcome(Mutant("a.py", kind, "x | y", "x", ("test_a.py",), survives), verdict, 1.0, "")


def test_the_share_and_the_survivors_are_in_the_tables():
    outcomes = [outcome_of("killed")] * 7 + [outcome_of("killed by the deadline", "versions")]
    outcomes += [
        outcome_of("survived", "versions", "no test can see it"),
        outcome_of("ended by signal 9"),
    ]
    assert mutants.share_killed(outcomes) == 0.8
    text = mutants.as_markdown(outcomes)
    assert "| kl | 8 | 7 | 0 |" in text
    assert "| versions | 2 | 1 | 1 |" in text
    assert "| all | 10 | 8 (80%) | 1 |" in text
    assert "no test can see it" in text
    assert "not explained" in text
    assert "x \\| y" in text, "a bar would end a cell"
    rows = mutants.as_json(outcomes)
    verdicts = [row["verdict"] for row in rows]
    assert verdicts.count("survived") == 1
    assert rows[0]["tests"] == ("test_a.py",)


@pytest.mark.more
def test_a_mutant_is_killed_survives_or_hangs(tmp_path, monkeypatch):
    """In a separate tree, whose file is restored afterwards."""
    monkeypatch.syspath_prepend(ROOT / "tools")  # for the process that runs the tests
    test = "import package\n\n\ndef test_value():\n    assert package.value == 2\n"
    tree = tree_of(tmp_path, value=test)
    source = (tree / "package.py").read_text()
    verdicts = []
    for old, new, seconds in (
        ("1 + 1", "1 - 1", 60.0),
        ("other = 2", "other = 3", 60.0),
        ("other = 2", "import time; time.sleep(60)", 3.0),
        ("other = 2", "import os; os.kill(os.getpid(), 9)", 60.0),
    ):
        mutant = Mutant("package.py", "a kind", old, new, ("test_value.py",))
        outcome = mutants.run_mutant(tree, mutant, seconds)
        verdicts.append(outcome.verdict)
        assert (tree / "package.py").read_text() == source
    assert verdicts == ["killed", "survived", "killed by the deadline", "ended by signal 9"]
    nothing = Mutant("package.py", "a kind", "1 + 1", "1 - 1", ("test_value.py::test_absent",))
    with pytest.raises(SystemExit, match="pytest ended with"):
        mutants.run_mutant(tree, nothing, 60.0)
