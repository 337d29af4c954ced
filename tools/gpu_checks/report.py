"""The page that is left: Markdown to read, JSON to compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_checks.base import FAIL, PASS, Finding
from reinforce_rl.utils.files import write_atomically

REPORT = "report.md"


def verdict(findings: Sequence[Finding]) -> str:
    """PASS, or FAIL with names. Where nothing passed nothing was proven, which is no PASS."""
    failed = [finding.name for finding in findings if finding.verdict == FAIL]
    if failed:
        return f"FAIL ({', '.join(failed)})"
    if any(finding.verdict == PASS for finding in findings):
        return PASS
    return "FAIL (no check ran)"


def write(folder: Path, findings: Sequence[Finding], about: dict[str, Any]) -> Path:
    """Write report.json and report.md to a folder, each atomically; return the path of report.md.

    Args:
        folder: exists already.
        findings: of the checks so far.
        about: values of the whole run, by name.
    """
    whole = {
        "verdict": verdict(findings),
        **about,
        "checks": [asdict(finding) for finding in findings],
    }
    write_atomically(folder / "report.json", json.dumps(whole, indent=1) + "\n")
    lines = [f"# gpu_check: {verdict(findings)}", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines.append("")
    columns = ("name", "verdict", "seconds", "sentence")
    lines += _table(
        [{column: getattr(finding, column) for column in columns} for finding in findings]
    )
    for finding in findings:
        tables = {
            name: value for name, value in finding.numbers.items() if value and _is_table(value)
        }
        if finding.numbers:
            lines += ["", f"## {finding.name}", ""]
        lines += [
            f"- {name}: {_cell(value)}"
            for name, value in finding.numbers.items()
            if name not in tables
        ]
        for name, rows in tables.items():
            lines += ["", f"**{name}**", "", *_table(rows)]
    write_atomically(folder / REPORT, "\n".join(lines) + "\n")
    return folder / REPORT


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], dict)


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [_cell(row.get(name)) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {_cell(part)}" for name, part in value.items()]
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    one_line = str(value).replace("\n", " ")
    return one_line.replace("|", "\\|")
