"""The benchmark of the reward service runs, and gets equal scores in all three ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reward_server.py"


@pytest.mark.slow
def test_the_table_has_a_row_for_each_way():
    options = ["--batch", "2", "--length", "4", "--clients", "2", "--calls", "2", "--rounds", "1"]
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    names = [row.split("│")[1].strip() for row in rows]
    assert names == ["bare model", "Triton", "front door"]
    assert [row.split("│")[2].strip() for row in rows] == ["2", "4", "4"]
