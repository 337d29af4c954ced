"""The measure of density and its bounds.

Figures of sources that are counted by hand.
"""

from __future__ import annotations

import importlib.util
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
    for folder in density.MEASURED:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("a = 1\nb = 2\n")
    monkeypatch.setattr(density, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("folder", density.MEASURED)
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("found = 1\n", "vague_names is 1; expected at most 0"),
        ("a, b = 1, 2\n", "several_per_1000_lines is 1000; expected at most 3"),
        ("a = b = c = 1\n", "three_assigned is 1; expected at most 0"),
        (f"a = '{'x' * 100}'\n", "wide_lines is 1; expected at most 0"),
        (f"a = {'x + ' * 8}x\n", "nodes_per_line is 19; expected at most"),
        ("a = 'b' * (1 < 2)\n", "text_times_flag is 1; expected at most 0"),
    ],
)
def test_a_figure_above_its_bound_is_named(tree, capsys, folder, source, name):
    assert density.main(["--check"]) == 0
    (tree / folder / "module.py").write_text(source)
    assert density.main(["--check"]) == 1
    message = capsys.readouterr().err
    assert f"{folder}: {name}" in message
    if not name.startswith("nodes"):
        assert f"{folder}/module.py" in message
    others = set(density.MEASURED) - {folder}
    assert not [other for other in others if f"{other}: " in message]


def test_wide_lines_are_named(tree, capsys):
    (tree / "tools" / "module.py").write_text(f"a = 1\nb = '{'x' * 100}'\n")
    assert density.main(["--check"]) == 1
    assert "tools/module.py:2" in capsys.readouterr().err


def test_tests_may_have_more_nodes_a_line(tree):
    source = "a = [1, 2, 3, 4]\n"  # 7 nodes
    for folder, code in (("tests", 0), ("tools", 1)):
        (tree / folder / "module.py").write_text(source)
        assert density.main(["--check"]) == code


@pytest.mark.more
def test_the_tree_is_within_the_bounds():
    assert density.faults(ROOT) == []
