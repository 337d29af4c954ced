"""What every test needs: the helpers on the path, no model hub, no busy waiting of idle OpenMP threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from reinforce_rl.megatron.mesh import Mesh

os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """This process as the only rank. One at a time can be open in a process, hence one a file of tests."""
    from reinforce_rl.megatron.mesh import parallel_mesh

    with parallel_mesh() as only:
        yield only
