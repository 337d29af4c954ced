"""`tools/gpu_check.py --fake`: checks without real numbers finish on fake CUDA."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.fake_cuda.machine import Machine

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from gpu_checks.base import FAKE, PASS, Context, Finding  # noqa: E402

PHASES = [
    "training",
    "optimizer step",
    "generation",
    "log-probs",
    "reference log-probs",
]


def check(name: str, machine: Machine, folder: Path) -> Finding:
    with machine.rank():
        return importlib.import_module(f"gpu_checks.{name}").check(
            Context(FAKE, folder, time.time() + 600)
        )


@pytest.mark.parametrize("name", ["trainer", pytest.param("switches", marks=pytest.mark.slow)])
def test_runs(machine: Machine, tmp_path: Path, name: str) -> None:
    finding = check(name, machine, tmp_path)
    assert finding.verdict == PASS, finding.sentence
    if name == "switches":
        tried = [row["key"] for row in finding.numbers["switches"] if row["advice"] == "runs"]
        assert "model.shared_prefix=true" in tried
        assert "model.optim.distributed=true" in tried


def test_counts_are_within_their_budgets(machine: Machine, tmp_path: Path) -> None:
    from gpu_checks import counts

    finding = check("counts", machine, tmp_path)
    assert finding.verdict == PASS, finding.sentence
    rows = {row["work"]: row for row in finding.numbers["counts"]}
    expected = json.loads(counts.BUDGETS.read_text()).keys()
    assert rows.keys() == expected
    for name, row in rows.items():
        budgets = {name: {"kernels": row["kernels"] - 1, "syncs": row["syncs"]}}
        per = {name: counts.Counts(row["kernels"], row["launches"], row["syncs"])}
        assert len(counts.compared(per, budgets, 1.0)[1]) == 1


def test_memory_is_as_planned(machine: Machine, tmp_path: Path) -> None:
    from gpu_checks import memory

    finding = check("memory", machine, tmp_path)
    assert finding.verdict == PASS, finding.sentence
    rows = finding.numbers["phases"]
    phases = [
        row["phase"] for row in rows if memory.off_plan([{**row, "ratio": 1.2 * row["ratio"]}])
    ]
    assert phases == PHASES


def test_the_program_says_what_is_not_real(tmp_path: Path) -> None:
    words = [
        "--fake",
        "--only",
        "machine",
        "correctness",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["not run: correctness", "gpu_check: PASS"]
    assert "numbers are not real here" in (tmp_path / "report.md").read_text()
