"""The page that is left: Markdown to read, JSON to compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_checks.base import FAIL, PASS, Finding


def verdict(found: Sequence[Finding]) -> str:
    """PASS, or FAIL with names. Where nothing passed nothing was proven, which is no PASS."""
    failed = [one.name for one in found if one.verdict == FAIL]
    if failed:
        return f"FAIL ({', '.join(failed)})"
    return PASS if any(one.verdict == PASS for one in found) else "FAIL (no check ran)"


def write(folder: Path, found: Sequence[Finding], about: dict[str, Any]) -> Path:
    """Write report.json and report.md to a folder; `about` is of the whole run. The latter's path."""
    whole = {"verdict": verdict(found), **about, "checks": [asdict(one) for one in found]}
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    lines = [f"# gpu_check: {verdict(found)}", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    names = ("name", "verdict", "seconds", "sentence")
    lines += _table([{name: getattr(one, name) for name in names} for one in found])
    for one in found:
        tables = {name: value for name, value in one.numbers.items() if value and _is_table(value)}
        if one.numbers:
            lines += ["", f"## {one.name}", ""]
        lines += [f"- {name}: {_cell(value)}" for name, value in one.numbers.items() if name not in tables]
        for name, rows in tables.items():
            lines += ["", f"**{name}**", "", *_table(rows)]
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "report.md"


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], dict)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {_cell(part)}" for name, part in value.items()]
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    text = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
