"""Runs a side in a process of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from rloo_step.workload import SideReport, Workload, read_report, write

BENCHMARKS = Path(__file__).resolve().parents[1]
OURS = "rloo_step.ours"
PEER = "rloo_step.trl_side"


class SideFailed(Exception):
    """A side's process ended with an error, or not at all."""


def run_side(python: Path, module: str, workload: Workload, seconds: float) -> SideReport:
    """
    Args:
        python: of the side's environment.
        module: `OURS` or `PEER`.
        workload: what to do.
        seconds: that it may take.

    Raises:
        SideFailed: with the end of what it printed.
    """
    path = [str(BENCHMARKS)]
    if module == OURS:
        path += [str(BENCHMARKS.parent)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(workload.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as name:
        asked = Path(name, "workload.json")
        report = Path(name, "report.json")
        write(asked, workload)
        command = [str(python), "-W", "ignore", "-m", module, str(asked), str(report)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                timeout=seconds,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            raise SideFailed(
                f"{module} did not end within {seconds:.0f} s; ask for less work, or allow more with --deadline"
            ) from error
        if done.returncode:
            raise SideFailed(
                f"{module} ended with status {done.returncode}:\n{done.stdout[-4000:]}"
            )
        return read_report(report)
