"""Tests on fake CUDA tensors, in separate processes: `make test-fake-cuda`.

A process cannot stop being a fake GPU machine, so these are not collected with the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.fake_cuda.machine import Machine

if os.environ.get("FAKE_CUDA") == "1":
    from helpers.fake_cuda.machine import install

    install()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This process as any rank of a GPU cluster."""
    return install()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Tiny models by number of layers."""
    from helpers.models import tiny_llama_folder

    return {
        n: tiny_llama_folder(tmp_path_factory.mktemp(f"tiny{n}"), vocab_size=61, layers=n)
        for n in (2, 4)
    }


@pytest.fixture(autouse=True)
def nothing_left(machine: Machine) -> Iterator[None]:
    """Remove a failed test's process group and objects that its ranks sent."""
    machine.network.objects.clear()
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
