"""Draw which folders of the package import which: the picture in docs/architecture.md, made from the code.

python tools/house.py            prints it
python tools/house.py --write    puts it into docs/architecture.md

An arrow that follows from others is left out.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "reinforce_rl"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "```mermaid\n"
END = "```\n"

# From the ground up: a folder imports only from those before it.
FLOORS = (
    "errors",
    "algorithm",
    "utils",
    "data",
    "config",
    "megatron",
    "runtime",
    "generation",
    "actor",
    "monitoring",
    "rewards",
    "rollout",
    "trainer",
    "reward_model",
    "reward_server",
    "preflight",
    "run",
    "evaluation",
    "debugging",
    "launch",
)


def source_files(folder: Path) -> list[Path]:
    """Python files at any depth, sorted."""
    return sorted(folder.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, absolute dotted name) of every import of a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def floor_of(name: str) -> str | None:
    """The floor of a dotted name; None where it is on none, as the package's root is."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE.name and len(parts) > 1 and parts[1] in FLOORS else None


def floor_imports() -> dict[str, set[str]]:
    """Which other floors each floor imports from."""
    imports: dict[str, set[str]] = {floor: set() for floor in FLOORS}
    for path in source_files(PACKAGE):
        floor = floor_of(module_of(path))
        if floor is not None:
            others = {floor_of(name) for _, name in imported_names(path)}
            imports[floor] |= {other for other in others if other not in (None, floor)}
    return imports


def drawing() -> str:
    """A mermaid graph, without errors.py, which all import."""
    edges = floor_imports()
    below: dict[str, set[str]] = {}  # at any distance
    for floor in FLOORS:
        below[floor] = edges[floor].union(
            *(below[other] for other in edges[floor] if other in below)
        )
    lines = ["graph TD"]
    for floor in reversed(FLOORS[1:]):
        direct = {
            other
            for other in edges[floor] - {FLOORS[0]}
            if not any(other in below[between] for between in edges[floor] - {other})
        }
        lines += [f"    {floor} --> {other}" for other in FLOORS if other in direct]
    return "\n".join(lines) + "\n"


def drawn() -> tuple[str, str, str]:
    """The page before the drawing, the drawing, and the page after it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    picture, _, after = rest.partition(END)
    return before + BEGIN, picture, END + after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/architecture.md")
    if parser.parse_args().write:
        before, _, after = drawn()
        PAGE.write_text(before + drawing() + after, encoding="utf-8")
    else:
        print(drawing(), end="")


if __name__ == "__main__":
    main()
