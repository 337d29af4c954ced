"""The environment with TRL and verl."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.environments import ROOT, environment

needs_peers = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")


def peers_environment() -> Path:
    return environment("peers", ROOT / ".venv-peers")
