"""Each strong claim of the documentation has a test by name in tests/claims.md, or is no claim."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "tests" / "claims.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
STRONG_WORD = re.compile(r"\b(never|always|nothing|refused|bit for bit)\b", re.IGNORECASE)
CELL = re.compile(r"(?<!\\)\|")


def one_line(text: str) -> str:
    """Return the text with each run of spaces and line breaks as one space."""
    return " ".join(text.split())


def rows_below(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its two header lines.

    `\\|` is a bar within a cell.
    """
    text = TABLES.read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = []
    for line in lines[2:]:
        cells = CELL.split(line.strip())[1:-1]
        rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    return rows


def names_of_tests(path: Path) -> set[str]:
    """Return the names of the tests of a file: `test_name` or `TestClass::test_name`."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}::{member.name}"
                for member in node.body
                if isinstance(member, ast.FunctionDef)
            )
    return {name for name in names if name.split("::")[-1].startswith("test_")}


def uncovered(text: str, pieces: list[str]) -> list[str]:
    """Return the context of each strong word of `text` that lies in none of `pieces`."""
    covered = [False] * len(text)
    for piece in pieces:
        for place in re.finditer(re.escape(piece), text):
            covered[place.start() : place.end()] = [True] * len(piece)
    missing = []
    for word in STRONG_WORD.finditer(text):
        if not all(covered[word.start() : word.end()]):
            missing.append(text[max(0, word.start() - 60) : word.end() + 60])
    return missing


def test_a_word_is_covered_by_a_piece_that_contains_it():
    text = "It never ends. It always begins, bit for bit."
    assert uncovered(text, ["It never ends", "begins, bit for bit"]) == [text]
    assert len(uncovered(text, ["never", "It always begins, bit"])) == 1
    assert uncovered(text, ["It never ends", "always begins, bit for bit"]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_strong_word_has_an_entry(page: Path):
    name = str(page.relative_to(ROOT))
    rows = rows_below("Claims") + rows_below("No claims")
    pieces = [piece for piece, row_page, _ in rows if row_page == name]
    missing = uncovered(one_line(page.read_text(encoding="utf-8")), pieces)
    assert missing == [], f"{name}: a sentence without an entry in tests/claims.md"


def test_every_claim_stands_once_in_its_page_and_has_a_strong_word():
    for claim, page, _ in rows_below("Claims"):
        text = one_line((ROOT / page).read_text(encoding="utf-8"))
        count = text.count(claim)
        assert count == 1, f"{page}: {text.count(claim)} times: {claim}"
        assert STRONG_WORD.search(claim), claim


def test_what_claims_nothing_stands_in_its_page_and_says_why():
    for piece, page, reason in rows_below("No claims"):
        text = one_line((ROOT / page).read_text(encoding="utf-8"))
        assert piece in text, f"{page}: {piece}"
        assert STRONG_WORD.search(piece), piece
        assert reason, piece


@pytest.mark.more
def test_every_named_test_exists():
    rows = rows_below("Claims")
    assert len(rows) > 100
    for claim, _, nodes in rows:
        assert nodes, claim
        for node in nodes.replace("`", "").split():
            file, _, name = node.partition("::")
            assert name in names_of_tests(ROOT / file), f"{claim}: {node}"


@pytest.mark.parametrize("heading", ["Claims", "No claims"])
def test_rows_are_sorted_by_page(heading: str):
    pages = [page for _, page, _ in rows_below(heading)]
    assert pages == sorted(pages, key=lambda page: (page != "README.md", page))
