"""No call of transformers may run code of a model folder or ask on the terminal whether to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("reinforce_rl", "examples", "recipes", "benchmarks", "tools")
LOADERS = ("from_pretrained", "from_config")


def loading_calls(source: str) -> Iterator[tuple[int, bool]]:
    """Yield the line of each call that loads, and whether it has trust_remote_code=False."""
    if not any(name in source for name in LOADERS):
        return  # parsing all files would take seconds
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in LOADERS:
            yield node.lineno, any(_is_safe(keyword) for keyword in node.keywords)


def _is_safe(keyword: ast.keyword) -> bool:
    if not isinstance(keyword.value, ast.Constant):
        return False
    return keyword.arg == "trust_remote_code" and keyword.value.value is False


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("A.from_pretrained(x, trust_remote_code=False)", [(1, True)]),
        ("A.from_pretrained(x)", [(1, False)]),
        ("A.from_pretrained(x, trust_remote_code=None)", [(1, False)]),
        ("A.from_pretrained(x, trust_remote_code=0)", [(1, False)]),
        ("A.from_pretrained(x, **options)", [(1, False)]),
        ("\nA.from_config(x).from_pretrained(y)", [(2, False), (2, False)]),
        ("def from_pretrained(): ...", []),
    ],
)
def test_what_is_found(source: str, expected: list[tuple[int, bool]]) -> None:
    assert list(loading_calls(source)) == expected


def test_every_call_that_loads_refuses_code() -> None:
    count = 0
    unsafe = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, is_safe in loading_calls(path.read_text(encoding="utf-8")):
                count += 1
                if not is_safe:
                    unsafe.append(f"{path.relative_to(ROOT)}:{line}")
    assert unsafe == [], "say trust_remote_code=False"
    assert count >= 10
