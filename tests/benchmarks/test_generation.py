"""The short form of the comparison of generation with transformers runs.

It detects a side that does less work.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from generation import measure  # noqa: E402


def test_a_side_that_makes_fewer_tokens_is_an_error():
    args = argparse.Namespace(prompts=2, group=3, response_tokens=4, pairs=2)
    sides = {"one": lambda seed: torch.zeros(6, 4), "other": lambda seed: torch.zeros(6, 4)}
    lengths = {name: len(values) for name, values in measure(sides, args).items()}
    assert lengths == {
        "one": 2,
        "other": 2,
    }
    sides["other"] = lambda seed: torch.zeros(6, 3)
    with pytest.raises(ValueError, match=r"other made tokens of shape \(6, 3\), expected \(6, 4\)"):
        measure(sides, args)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--cache-tokens", "30")], ids=["whole", "bounded"])
def test_short_form_runs(options):
    command = [sys.executable, str(BENCHMARKS / "generation.py"), "--short", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"speedup: \d+\.\d\dx", done.stdout.splitlines()[-1])
