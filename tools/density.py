"""Measure how densely the code is written, and hold it to what tools/density.json allows.

python tools/density.py            prints the figures of the package and of the tests
python tools/density.py --check    exits with 1 if a figure is above its ceiling
python tools/density.py --lower    lowers the ceilings to today's figures; it raises none
python tools/density.py FOLDER|FILE ... [--files N]    figures of these and their N densest files

The columns:
  code characters   without comments, docstrings, indentation and blank lines
  mean line         characters of a line, indentation included
  wide              lines of more than 100 columns
  several           statements that assign several values at once: `a, b = 1, 2` and `a = b = 0`
  three             statements that assign three values and more
  nodes a line      syntax-tree nodes of a logical line, docstrings apart
  vague             locals and parameters with a name that says nothing, such as `found`
  text * flag       a text or a list that is multiplied by a condition in place of an `if`
Lines are those that are not blank.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import sys
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = ROOT / "tools" / "density.json"
MEASURED = ("reinforce_rl", "tests")
MAX_COLUMNS = 100
Ceilings = dict[str, dict[str, float]]  # of each folder, by figure
VAGUE_NAMES = frozenset({"found", "one", "own", "told", "more", "what", "things"})
_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Density:
    """Counts over some files."""

    files: int = 0
    lines: int = 0
    characters: int = 0
    code_characters: int = 0
    wide_lines: int = 0
    several_assigned: int = 0
    three_assigned: int = 0
    nodes: int = 0
    logical_lines: int = 0
    vague_names: int = 0
    text_times_flag: int = 0

    @property
    def mean_line(self) -> float:
        return self.characters / max(self.lines, 1)

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / max(self.logical_lines, 1)

    def add(self, other: Density) -> None:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)

    def bounded(self) -> dict[str, float]:
        """Return the figures that have a ceiling; means are rounded up to the digits kept."""
        return {
            "mean_line": math.ceil(10 * self.mean_line) / 10,
            "nodes_per_line": math.ceil(100 * self.nodes_per_line) / 100,
            "wide_lines": self.wide_lines,
            "several_assigned": self.several_assigned,
            "three_assigned": self.three_assigned,
            "vague_names": self.vague_names,
            "text_times_flag": self.text_times_flag,
        }


def measure_source(source: str) -> Density:
    tree = ast.parse(source)
    docstrings = list(_docstrings(tree))
    density = Density(files=1)
    for line in source.splitlines():
        if line.strip():
            density.lines += 1
            density.characters += len(line)
            density.wide_lines += len(line) > MAX_COLUMNS
    _count_tokens(density, source, docstrings)
    # A docstring is a statement and a constant.
    density.nodes -= 2 * len(docstrings)
    for node in ast.walk(tree):
        _count_node(density, node)
    return density


def measure(path: Path) -> Density:
    """Measure a file, or all Python files of a folder."""
    density = Density()
    for file in python_files(path):
        density.add(measure_source(file.read_text(encoding="utf-8")))
    return density


def python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _docstrings(tree: ast.AST) -> Iterable[ast.Expr]:
    for node in ast.walk(tree):
        if not isinstance(node, _DOCUMENTED) or not node.body:
            continue
        first = node.body[0]
        if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
            continue
        if isinstance(first.value.value, str):
            yield first


def _count_tokens(density: Density, source: str, docstrings: Iterable[ast.Expr]) -> None:
    docstring_lines: set[int] = set()
    for node in docstrings:
        assert node.end_lineno is not None
        docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.start[0] in docstring_lines:
            continue
        density.logical_lines += token.type == tokenize.NEWLINE
        if token.type not in _LAYOUT:
            density.code_characters += len(token.string)


def _count_node(density: Density, node: ast.AST) -> None:
    density.nodes += isinstance(node, (ast.expr, ast.stmt))
    if isinstance(node, ast.Assign):
        count = _values_at_once(node)
        density.several_assigned += count > 1
        density.three_assigned += count > 2
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        density.vague_names += node.id in VAGUE_NAMES
    elif isinstance(node, ast.arg):
        density.vague_names += node.arg in VAGUE_NAMES
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        density.text_times_flag += _is_text(node.left) and _is_condition(node.right)
        density.text_times_flag += _is_text(node.right) and _is_condition(node.left)


def _values_at_once(node: ast.Assign) -> int:
    """Return 2 for `a, b = 1, 2` and `a = b = 0`, and 1 for `a, b = call()`."""
    counts = [len(node.targets)]
    for target in node.targets:
        if not isinstance(target, (ast.Tuple, ast.List)):
            continue
        if isinstance(node.value, (ast.Tuple, ast.List)):
            num_targets = len(target.elts)
            if num_targets == len(node.value.elts):
                counts.append(num_targets)
    return max(counts)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.JoinedStr, ast.List))


def _is_condition(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id.startswith(("is_", "has_", "with_"))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, (ast.Compare, ast.BoolOp))


def faults(root: Path, ceilings: Ceilings) -> list[str]:
    """Return a sentence for each figure that is above its ceiling."""
    sentences: list[str] = []
    for folder, bounds in ceilings.items():
        figures = measure(root / folder).bounded()
        for name, ceiling in bounds.items():
            figure = figures[name]
            if figure > ceiling:
                sentence = f"{folder}: {name} is {figure:g}; expected at most {ceiling:g}"
                sentences.append(sentence)
    return sentences


def lowered(root: Path, ceilings: Ceilings) -> Ceilings:
    """Return the ceilings, lowered to today's figures where these are below."""
    result: Ceilings = {}
    for folder in MEASURED:
        figures = measure(root / folder).bounded()
        bounds = ceilings.get(folder, figures)
        result[folder] = {name: min(figures[name], bounds[name]) for name in figures}
    return result


NAME_WIDTH = 32
COLUMNS = {  # widths
    "files": 6,
    "lines": 8,
    "code chars": 12,
    "mean line": 11,
    "wide": 7,
    "several": 9,
    "three": 7,
    "nodes a line": 14,
    "vague": 7,
    "text * flag": 13,
}


def table_row(name: str, cells: Iterable[object]) -> str:
    name = name[1 - NAME_WIDTH :]
    line = name.ljust(NAME_WIDTH)
    for cell, width in zip(cells, COLUMNS.values(), strict=True):
        line += str(cell).rjust(width)
    return line


def figures_of(density: Density) -> list[object]:
    mean_line = f"{density.mean_line:.1f}"
    nodes_per_line = f"{density.nodes_per_line:.2f}"
    return [
        density.files,
        density.lines,
        density.code_characters,
        mean_line,
        density.wide_lines,
        density.several_assigned,
        density.three_assigned,
        nodes_per_line,
        density.vague_names,
        density.text_times_flag,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="FOLDER|FILE")
    parser.add_argument(
        "--files", type=int, default=0, metavar="N", help="also the N densest files"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare with tools/density.json")
    action.add_argument(
        "--lower", action="store_true", help="lower the ceilings to today's figures"
    )
    options = parser.parse_args(arguments)
    ceilings: Ceilings = {}
    if CEILINGS.exists():
        ceilings = json.loads(CEILINGS.read_text(encoding="utf-8"))
    if options.lower:
        text = json.dumps(lowered(ROOT, ceilings), indent=2)
        CEILINGS.write_text(text + "\n", encoding="utf-8")
        return 0
    if options.check:
        sentences = faults(ROOT, ceilings)
        if sentences:
            print(
                "error: denser than tools/density.json allows:",
                *sentences,
                sep="\n  ",
                file=sys.stderr,
            )
            print(
                "`python tools/density.py FILE` measures a file that was changed", file=sys.stderr
            )
        return 1 if sentences else 0
    paths = options.paths or [ROOT / folder for folder in MEASURED]
    print(table_row("", COLUMNS))
    for path in paths:
        print(table_row(str(path), figures_of(measure(path))))
    by_file = {file: measure(file) for path in paths for file in python_files(path)}
    densest = sorted(by_file, key=lambda file: by_file[file].nodes_per_line, reverse=True)
    for file in densest[: options.files]:
        print(table_row(str(file), figures_of(by_file[file])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
