"""The lab of a file of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from helpers.slurm_lab import SlurmLab, missing_for_a_lab

if TYPE_CHECKING:
    from helpers.real_run import World


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """Skips where there can be none; fails where .ci/run has installed Slurm and yet it is missing."""
    missing, can_be_installed = missing_for_a_lab()
    if missing and can_be_installed and os.environ.get("SLURM_TESTS") == "required":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    with SlurmLab() as lab:
        yield lab


@pytest.fixture(scope="module")
def world(lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> World:
    """What the jobs of a file read from disk."""
    # only now: it imports torch, which most tests here do without
    from helpers.real_run import World

    return World.make(tmp_path_factory.mktemp("world"))
