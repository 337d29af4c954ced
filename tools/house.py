"""Draw which folders of the package import which, for docs/architecture.md.

python tools/house.py            prints the drawing, and how many rooms and arrows there are
python tools/house.py --write    puts the drawing into docs/architecture.md

A room is a folder or a module at the root of the package. An arrow leads from a room to each room
that it imports from; the drawing leaves out arrows that follow from others.
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
    "policy",
    "monitoring",
    "rewards",
    "rollout",
    "trainer",
    "reward_model",
    "preflight",
    "evaluation",
    "debugging",
    "launch",
)
MAX_ROOMS = 24
MAX_ARROWS = 130


def source_files(folder: Path) -> list[Path]:
    """Python files at any depth, sorted."""
    return sorted(folder.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    name = ".".join(parts)
    return name.removesuffix(".__init__")


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, absolute dotted name) of every import, inside functions too."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def floor_of(name: str) -> str | None:
    """The floor of a dotted name; None where it is on none, as the package's root is."""
    package, *inner = name.split(".")
    if package != PACKAGE.name or not inner:
        return None
    floor = inner[0]
    return floor if floor in FLOORS else None


def room_of(path: Path) -> str:
    """The room of a file of the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms() -> set[str]:
    """All rooms; `__init__` is the package's own module."""
    return {room_of(path) for path in source_files(PACKAGE)}


def arrows() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports from the second, inside functions too."""
    names = rooms()
    pairs: set[tuple[str, str]] = set()
    for path in source_files(PACKAGE):
        room = room_of(path)
        for _, name in imported_names(path):
            package, *inner = name.split(".")
            if package != PACKAGE.name or not inner:
                continue
            # `from reinforce_rl import train` imports from the package's own module.
            other = inner[0] if inner[0] in names else "__init__"
            if other != room:
                pairs.add((room, other))
    return pairs


def floor_imports() -> dict[str, set[str]]:
    """Which other floors each floor imports from."""
    imports: dict[str, set[str]] = {floor: set() for floor in FLOORS}
    for room, other in arrows():
        if room in imports and other in imports:
            imports[room].add(other)
    return imports


def drawing() -> str:
    """A mermaid graph, without errors.py, which all import."""
    edges = floor_imports()
    below: dict[str, set[str]] = {}  # at any distance
    for floor in FLOORS:
        below[floor] = set(edges[floor])
        for other in edges[floor]:
            below[floor] |= below.get(other, set())
    text = "graph TD\n"
    floors = FLOORS[1:]  # all import errors.py
    for floor in reversed(floors):
        for other in floors:
            if other not in edges[floor]:
                continue
            is_indirect = any(other in below[between] for between in edges[floor] - {other})
            if not is_indirect:
                text += f"    {floor} --> {other}\n"
    return text


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
        print(drawing())
        print(f"{len(rooms())} rooms of at most {MAX_ROOMS}")
        print(f"{len(arrows())} arrows of at most {MAX_ARROWS}")


if __name__ == "__main__":
    main()
