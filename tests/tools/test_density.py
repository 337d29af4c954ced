"""The measure of density and its ratchet.

Figures of sources that are counted by hand.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("density", ROOT / "tools" / "density.py")
assert _spec is not None
assert _spec.loader is not None
density = importlib.util.module_from_spec(_spec)
sys.modules["density"] = density
_spec.loader.exec_module(density)

SOURCE = '''"""A docstring
of two lines."""

# a comment
def add(first, second):
    """Another docstring."""
    return first + second
'''


def test_lines_and_code_characters():
    figures = density.measure_source(SOURCE)
    lines = [line for line in SOURCE.splitlines() if line.strip()]
    assert figures.lines == 6
    assert figures.characters == sum(map(len, lines))
    assert figures.code_characters == len("defadd(first,second):returnfirst+second")
    assert figures.logical_lines == 2
    # The function, the return, the sum and its two names.
    assert figures.nodes == 5
    assert figures.nodes_per_line == 2.5


def test_lines_of_101_columns_are_wide():
    source = "a = '" + "x" * 94 + "'\n" + "b = '" + "x" * 95 + "'\n"
    lengths = [len(line) for line in source.splitlines()]
    assert lengths == [100, 101]
    assert density.measure_source(source).wide_lines == 1


@pytest.mark.parametrize(
    ("statement", "several", "three"),
    [
        ("a = 1", 0, 0),
        ("a, b = call()", 0, 0),
        ("a, b = 1, 2", 1, 0),
        ("[a, b] = (1, 2)", 1, 0),
        ("a = b = 0", 1, 0),
        ("a, b, c = 1, 2, 3", 1, 1),
        ("a = b = c = 0", 1, 1),
        ("a, *b = 1, 2, 3", 0, 0),
        ("for a, b in pairs: pass", 0, 0),
    ],
)
def test_values_that_are_assigned_at_once(statement, several, three):
    figures = density.measure_source(statement + "\n")
    assert figures.several_assigned == several
    assert figures.three_assigned == three


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("found = 1", 1),
        ("def f(one, *, told): pass", 2),
        ("for own in rows: print(own)", 1),
        ("row.found = 1", 0),
        ("print(found)", 0),
        ("errors = 1", 0),
    ],
)
def test_names_that_say_nothing(source, count):
    assert density.measure_source(source + "\n").vague_names == count


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ("'text' * is_first", 1),
        ("(a == 1) * [2]", 1),
        ("f'{a}' * (not a)", 1),
        ("'-' * 80", 0),
        ("width * is_first", 0),
    ],
)
def test_texts_that_are_multiplied_by_a_condition(expression, count):
    assert density.measure_source(expression + "\n").text_times_flag == count


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A package and tests of one file each, with today's figures as ceilings."""
    for folder in density.MEASURED:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("a, b = 1, 2\n")
    (tmp_path / "tools").mkdir()
    monkeypatch.setattr(density, "ROOT", tmp_path)
    monkeypatch.setattr(density, "CEILINGS", tmp_path / "tools" / "density.json")
    assert density.main(["--lower"]) == 0
    return tmp_path


def test_a_figure_above_its_ceiling_is_named(tree, capsys):
    assert density.main(["--check"]) == 0
    (tree / "tests" / "module.py").write_text("a, b = 1, 2\nfound = 1\n")
    assert density.main(["--check"]) == 1
    message = capsys.readouterr().err
    assert "tests: vague_names is 1; expected at most 0" in message
    assert "reinforce_rl" not in message


def test_ceilings_fall_and_do_not_rise(tree):
    (tree / "tests" / "module.py").write_text("a = 1\nfound = 1\n")
    assert density.main(["--lower"]) == 0
    ceilings = json.loads((tree / "tools" / "density.json").read_text())
    assert ceilings["tests"]["several_assigned"] == 0
    assert ceilings["tests"]["vague_names"] == 0
    assert ceilings["reinforce_rl"]["several_assigned"] == 1
    assert density.main(["--check"]) == 1


@pytest.mark.more
def test_the_tree_is_no_denser_than_its_ceilings():
    ceilings = json.loads((ROOT / "tools" / "density.json").read_text())
    assert set(ceilings) == set(density.MEASURED)
    assert density.faults(ROOT, ceilings) == []
