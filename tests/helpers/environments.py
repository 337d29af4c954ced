"""Environments with third-party code, created once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
SECONDS = 780  # half a gigabyte from PyPI


def environment(name: str, folder: Path) -> Path:
    """Create an environment of tools/make_environment.py if it is missing.

    Without a network the test is skipped, except in CI.
    """
    command = [sys.executable, ROOT / "tools" / "make_environment.py", name, folder]
    with FileLock(folder.with_name(folder.name + ".lock")):  # tests run in several processes
        done = subprocess.run(
            command, timeout=SECONDS, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    if done.returncode:
        assert not os.environ.get("CI"), done.stdout
        pytest.skip(f"{name} cannot be installed, which fails where CI is set: {done.stdout}")
    return folder


needs_peers = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")


def peers_environment() -> Path:
    """The environment with TRL and verl."""
    return environment("peers", ROOT / ".venv-peers")


def engine_environment() -> Path:
    """Return the Python of the environment with vLLM for CPUs, for `engine.python`."""
    if sys.version_info < (3, 11):
        pytest.skip("vLLM needs Python 3.11")
    return environment("engine-cpu", ROOT / ".venv-engine") / "bin" / "python"
