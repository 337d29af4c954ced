"""The environment with vLLM for CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.environments import ROOT, environment


def engine_environment() -> Path:
    """Return the environment's Python, for `engine.python`."""
    if sys.version_info < (3, 11):
        pytest.skip("vLLM needs Python 3.11")
    return environment("engine-cpu", ROOT / ".venv-engine") / "bin" / "python"
