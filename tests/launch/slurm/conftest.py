"""A lab for a file of tests."""

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
    """Yield a lab; skip if none can run, but fail if .ci/run installs Slurm and it is missing."""
    missing, can_be_installed = missing_for_a_lab()
    if missing and can_be_installed and os.environ.get("SLURM_TESTS") == "required":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    with SlurmLab() as lab:
        yield lab


@pytest.fixture(scope="module")
def world(lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Return the input files of the jobs."""
    # import late: it imports torch, which most tests here do not need
    from helpers.real_run import World

    return World.make(tmp_path_factory.mktemp("world"))
