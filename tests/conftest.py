"""Setup of all tests: the path of the helpers, no model hub, no spinning of idle OpenMP threads."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.toy_server import ToyServer

    from reinforce_rl.megatron.mesh import Mesh

os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # workers that each use all cores would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as in a shell's background job; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Files that take minutes. They start first, so that no worker starts one of them when the others
# are done.
LONG_FILES = (
    "test_jobs.py",
    "test_job_recovery.py",
    "test_job_faults.py",
    "test_job_limits.py",
    "test_job_generators.py",
    "test_job_separate.py",
    "test_disaggregated.py",
    "test_vllm_updates.py",
    "test_resume.py",
    "test_end_to_end.py",
    "test_layouts.py",
    "test_ranked_server.py",
    "test_resharding.py",
    "test_families.py",
    "test_transformer_engine.py",
    "test_lost_ranks.py",
    "test_stopping.py",
    "test_peers.py",
    "test_traps.py",
    "test_docs_commands.py",
    "test_first_hour.py",
    "test_resume_ranks.py",
    "test_replay.py",
)

TESTS = str(Path(__file__).parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


FAST_TIER = "not more and not slow and not gpu and not engine"  # as in pyproject.toml


def pytest_configure(config: pytest.Config) -> None:
    """Run a test that is named by `FILE::TEST`, whatever its tier."""
    names_test = any("::" in argument for argument in config.args)
    if names_test and config.option.markexpr == FAST_TIER:
        config.option.markexpr = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; the other files keep their order."""
    items.sort(
        key=lambda item: (
            LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES)
        )
    )


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """This process as the only rank.

    A process can have one mesh at a time, so the fixture's scope is the module.
    """
    from reinforce_rl.megatron.mesh import parallel_mesh

    with parallel_mesh() as only:
        yield only


@pytest.fixture(scope="module")
def server_options() -> list[str]:
    """Options of the module's `server`."""
    return []


@pytest.fixture(scope="module")
def shared_server(server_options: list[str], tmp_path_factory) -> Iterator[ToyServer]:
    from helpers.toy_server import ToyServer

    pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")
    with ToyServer(tmp_path_factory.mktemp("server"), *server_options) as server:
        yield server


@pytest.fixture
def server(shared_server: ToyServer) -> ToyServer:
    """A real reward server with a toy model, which the tests of a module share."""
    return shared_server.ensure_running()
