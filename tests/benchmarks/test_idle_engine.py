"""The benchmark of episodes measures both ways and compares what they played."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "episodes.py"


@pytest.mark.more
def test_it_ends_and_prints_both_shares(monkeypatch, capsys):
    options = ["--episodes", "6", "--tokens", "4", "--step-seconds", "0.001"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert "in rounds" in printed
    assert "continuous" in printed
    assert printed.count("%") == 2
