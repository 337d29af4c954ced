"""The environment with TRL and verl, created once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-peers"
SECONDS = 780  # half a gigabyte from PyPI

needs_peers = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")


def peers_environment() -> Path:
    """Return the environment's folder, creating it if missing; without a network skip the test, except in CI."""
    command = [sys.executable, str(ROOT / "tools" / "make_peers_env.py"), str(FOLDER)]
    with FileLock(FOLDER.with_name(FOLDER.name + ".lock")):  # tests run in several processes
        done = subprocess.run(command, timeout=SECONDS, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        assert not os.environ.get("CI"), done.stdout
        told = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"the peers cannot be installed, which fails where CI is set: {' '.join(told) or done.stdout}")
    return FOLDER
