"""Measure how densely the code is written, and hold it to `BOUNDS`.

python tools/density.py            prints the figures of each folder with code
python tools/density.py --check    exits with 1 if a figure is above its bound
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
import sys
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("reinforce_rl", "tests", "benchmarks", "tools", "examples", "recipes")
MAX_COLUMNS = 100
MAX_PLACES = 10  # named for a figure above its bound
BOUNDS: Mapping[str, float] = {
    "mean_line": 48.0,
    "nodes_per_line": 6.8,
    "several_per_1000_lines": 3.0,
    "wide_lines": 0,
    "three_assigned": 0,
    "vague_names": 0,
    "text_times_flag": 0,
}
# Tests call with more literal values a line.
BOUNDS_OF_TESTS: Mapping[str, float] = {**BOUNDS, "nodes_per_line": 7.4}
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

    @property
    def several_per_1000_lines(self) -> float:
        return 1000 * self.several_assigned / max(self.lines, 1)

    def bounded(self) -> dict[str, float]:
        """Return the figures that have a bound, rounded to the digits that are printed."""
        return {
            "mean_line": round(self.mean_line, 1),
            "nodes_per_line": round(self.nodes_per_line, 2),
            "several_per_1000_lines": round(self.several_per_1000_lines, 1),
            "wide_lines": self.wide_lines,
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


def faults(root: Path) -> list[str]:
    """Return a sentence for each figure that is above its bound, with places where it counts."""
    sentences: list[str] = []
    for folder in MEASURED:
        figures = measure(root / folder).bounded()
        bounds = BOUNDS_OF_TESTS if folder == "tests" else BOUNDS
        for name, bound in bounds.items():
            figure = figures[name]
            if figure > bound:
                sentences.append(f"{folder}: {name} is {figure:g}; expected at most {bound:g}")
                sentences += places_of(name, root, folder)
    return sentences


def places_of(name: str, root: Path, folder: str) -> list[str]:
    """Return the first files, or lines, in which a figure counts most; none for means of lines."""
    by_file = {file: measure(file) for file in python_files(root / folder)}
    if name == "wide_lines":
        return [
            f"  {file.relative_to(root)}:{number}"
            for file, density in by_file.items()
            if density.wide_lines
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > MAX_COLUMNS
        ][:MAX_PLACES]
    count = "several_assigned" if name == "several_per_1000_lines" else name
    highest = sorted(by_file, key=lambda file: getattr(by_file[file], count), reverse=True)
    return [
        f"  {file.relative_to(root)}: {getattr(by_file[file], count):g}"
        for file in highest[:MAX_PLACES]
        if getattr(by_file[file], count)
    ]


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
    parser.add_argument("--check", action="store_true", help="compare with the bounds")
    options = parser.parse_args(arguments)
    if options.check:
        sentences = faults(ROOT)
        if sentences:
            print(
                "error: denser than tools/density.py allows:",
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
