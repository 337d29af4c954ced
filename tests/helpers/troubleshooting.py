"""The messages that docs/debugging.md answers, and the texts that a file can print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"


def messages() -> list[str]:
    """The quotes in the first column of the section's table; `…` stands for what differs."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.split("\n## Troubleshooting by the message\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)


def parts_of(message: str) -> list[str]:
    """Return the fixed parts of a message."""
    return [part.strip() for part in message.split("…") if re.search(r"\w", part)]


def answers(said: str) -> list[str]:
    """Return the page's messages that a program's output contains, word for word."""
    return [
        message
        for message in messages()
        if re.search(".*?".join(map(re.escape, message.split("…"))), said, re.DOTALL)
    ]


def texts_of(path: Path) -> str:
    """Return a file's texts other than docstrings, a line each; `…` stands for f-string values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = set()
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(value) for value in node.values}
            texts.append(
                "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
            )  # type: ignore
        elif isinstance(node, ast.Expr):
            inner.add(id(node.value))
    texts += [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and id(n) not in inner and isinstance(n.value, str)
    ]
    return "\n".join(texts)
