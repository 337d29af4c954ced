"""The check that passes weights to a generator.

It opens process groups. The tests of one file share one set of them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

from gpu_checks import generators  # noqa: E402
from gpu_checks.base import CPU, FAIL, PASS, Context  # noqa: E402


@pytest.mark.parametrize("is_right", [True, False])
def test_weights_reach_a_generator(tmp_path, monkeypatch, is_right):
    """The group's checks say which ranks the weights have passed; a lost tensor is named."""
    if not is_right:
        monkeypatch.setattr(generators, "load_weights", lambda lm, weights: None)
    context = Context(CPU, tmp_path, time.time() + 60)
    finding = generators.check(context)
    assert finding.numbers["buckets"] > 4
    assert finding.verdict == (PASS if is_right else FAIL), finding.sentence
    assert is_right or "arrived otherwise" in finding.sentence
