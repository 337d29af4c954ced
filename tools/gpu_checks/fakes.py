"""This process as a machine with a GPU that computes nothing: see `tests/helpers/fake_cuda`."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

from gpu_checks.runner import ROOT, python_path

TRY = "from helpers.fake_cuda.machine import install; install()"


def why_no_fakes() -> str | None:
    """Why there can be no fake CUDA here, such as a missing compiler."""
    done = subprocess.run(
        [sys.executable, "-c", TRY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=600,
        encoding="utf-8",
        errors="replace",
    )
    return (done.stderr.strip().splitlines() or ["unknown"])[-1] if done.returncode else None


def machine() -> AbstractContextManager[Any]:
    """Become such a machine, before anything imports torch; its only rank inside the block."""
    from helpers.fake_cuda.machine import install

    return install().rank()


def counting() -> AbstractContextManager[Any]:
    """Yield a `Ledger` of the block."""
    from helpers.fake_cuda.machine import install

    return install().gpu.counting()
