"""The page that is left: Markdown to read, JSON to compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_checks.base import FAIL, PASS, SKIP
from gpu_checks.runner import Outcome, as_json


def verdict(outcomes: Sequence[Outcome]) -> str:
    """PASS, or FAIL with names. Where nothing passed nothing was proven, which is no PASS."""
    failed = [outcome.name for outcome in outcomes if outcome.verdict == FAIL]
    if failed:
        return f"FAIL ({', '.join(failed)})"
    return PASS if any(outcome.verdict == PASS for outcome in outcomes) else "FAIL (no check ran)"


def skipped_line(outcomes: Sequence[Outcome]) -> str:
    """Names of the checks that were skipped, or an empty text."""
    names = [outcome.name for outcome in outcomes if outcome.verdict == SKIP]
    return f"not run: {', '.join(names)}" if names else ""


def write(folder: Path, outcomes: Sequence[Outcome], about: dict[str, Any]) -> Path:
    """Write report.json and report.md; the latter's path.

    Args:
        folder: exists.
        outcomes: in order.
        about: of the whole run: mode, command, commit, time.
    """
    whole = {"verdict": verdict(outcomes), **about, "checks": as_json(outcomes)}
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    lines = [f"# gpu_check: {verdict(outcomes)}", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()] + [""]
    rows = [
        {"check": o.name, "verdict": o.verdict, "seconds": round(o.seconds, 1), "what was found": o.sentence}
        for o in outcomes
    ]
    lines += _table(rows)
    for outcome in outcomes:
        if outcome.numbers:
            lines += ["", f"## {outcome.name}", "", *_numbers(outcome.numbers)]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _numbers(numbers: dict[str, Any]) -> list[str]:
    plain = {name: value for name, value in numbers.items() if not _is_table(value)}
    lines = [f"- {name}: {_cell(value)}" for name, value in plain.items()]
    for name, value in numbers.items():
        if _is_table(value):
            lines += ["", f"**{name}**", "", *_table(value)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
