"""The check that passes weights to a generator; it opens process groups, of which a file's tests have one set."""

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
    """Which ranks they have passed through is the group's; a tensor that is lost on the way is named."""
    if not is_right:
        monkeypatch.setattr(generators, "load_weights", lambda lm, found: None)
    found = generators.check(Context(CPU, tmp_path, time.time() + 60))
    assert found.numbers["buckets"] > 4
    assert found.verdict == (PASS if is_right else FAIL), found.sentence
    assert is_right or "arrived otherwise" in found.sentence
