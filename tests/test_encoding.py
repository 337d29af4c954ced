"""Text files are UTF-8 in any locale: no call reads or writes the locale's encoding."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("reinforce_rl", "examples", "tools", "benchmarks", "recipes", "slurm")
    for path in (ROOT / folder).rglob("*.py")
)
# Position of `encoding` among the arguments of calls that take it.
METHODS = {"read_text": 0, "write_text": 1}
TEMPORARY = {"TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile"}
PROCESSES = {"run", "Popen", "check_output"}


def calls_without_encoding(source: str) -> list[int]:
    """Return the lines of calls that would use the locale's encoding."""
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.Call) and _lacks_encoding(node)]


def _lacks_encoding(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in keywords or None in keywords:
        return False
    if name in METHODS:
        is_method = isinstance(call.func, ast.Attribute)
        return is_method and len(call.args) <= METHODS[name]
    if name in PROCESSES:
        return any(_is_true(keywords.get(key)) for key in ("text", "universal_newlines"))
    if name == "fdopen" or (name == "open" and isinstance(call.func, ast.Name)):
        return not _is_binary(call.args[1:2], keywords, default="r")
    if name == "open" and isinstance(call.func, ast.Attribute):
        base = call.func.value
        if isinstance(base, ast.Name) and base.id in (
            "os",
            "gzip",
            "bz2",
            "lzma",
            "self",
            "webbrowser",
            "watchdog",
        ):
            return False
        return not _is_binary(call.args[:1], keywords, default="r")
    if name in TEMPORARY:
        return not _is_binary(call.args[:1], keywords, default="w+b")
    return False


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _is_binary(
    position: list[ast.expr], keywords: dict[str | None, ast.expr], default: str
) -> bool:
    mode = position[0] if position else keywords.get("mode", ast.Constant(default))
    return not isinstance(mode, ast.Constant) or "b" in str(mode.value)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("path.read_text()", [1]),
        ("path.read_text('utf-8')", []),
        ("path.write_text(text)", [1]),
        ("path.write_text(text, encoding='utf-8')", []),
        ("open(path)", [1]),
        ("open(path, 'rb')", []),
        ("path.open('a')", [1]),
        ("path.open('ab')", []),
        ("os.fdopen(handle, 'w')", [1]),
        ("subprocess.run(command, text=True)", [1]),
        ("subprocess.run(command, text=True, encoding='utf-8')", []),
        ("tempfile.TemporaryFile('w+')", [1]),
        ("tempfile.TemporaryFile()", []),
    ],
)
def test_the_check_itself(source, lines):
    assert calls_without_encoding(source) == lines


@pytest.mark.more
def test_every_text_file_has_its_encoding():
    places = set()
    for path in SOURCES:
        for line in calls_without_encoding(path.read_text(encoding="utf-8")):
            places.add(f"{path.relative_to(ROOT)}:{line}")
    assert sorted(places) == []
