"""The processes of jobs in a lab, and what may not be left of a job that has ended."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from helpers.slurm_lab.lab import Job, SlurmLab

END_SECONDS = 20.0  # Slurm's own end of a step that was killed takes a few


def processes_of(lab: SlurmLab, job: Job | None = None) -> list[psutil.Process]:
    """All of the lab's processes that belong to a job, or to any job; zombies have ended.

    Whatever a job starts stays below the lab's first process. One without an environment of a job, such as slurmstepd,
    counts for every job.
    """
    ids = set() if job is None else {component.id for component in lab.components(job)}
    found = []
    for process in lab.descendants():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or is_daemon(process):
                continue
            of = job_id_of(process)
            if job is None or of is None or of in ids:
                found.append(process)
    return found


def is_daemon(process: psutil.Process) -> bool:
    """Of the lab itself: by its program, or as one of the shells of namespaces.sh."""
    if process.name() in ("munged", "slurmctld", "slurmscriptd", "slurmd", "unshare"):
        return True
    words = process.cmdline()[1:3]
    return process.name() in ("bash", "sh") and any(
        "namespaces.sh" in w or "slurmd -D" in w for w in words
    )


def job_id_of(process: psutil.Process) -> int | None:
    step = re.match(r"slurmstepd: \[(\d+)", " ".join(process.cmdline()))
    found = step.group(1) if step else process.environ().get("SLURM_JOB_ID")
    return None if found is None else int(found)


def published_ports(run_dir: Path) -> set[tuple[str, int]]:
    """Addresses and ports of the tasks of all of a run's attempts, as they wrote them down for others."""
    attempts = run_dir / "slurm"
    meetings = [json.loads(path.read_text()) for path in attempts.glob("*/rendezvous-*.json")]
    servers = [json.loads(path.read_text()) for path in attempts.glob("*/ready-*.json")]
    addresses = {(meeting["address"], meeting["port"]) for meeting in meetings}
    return addresses | {(server["host"], server["port"]) for server in servers}


def is_listening(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return True
    return False


def left_of(lab: SlurmLab, job: Job, ports: set[tuple[str, int]]) -> list[str]:
    found = [f"step {name}" for name in lab.steps(job)]
    for process in processes_of(lab, job):
        with contextlib.suppress(psutil.Error):
            found.append(f"process {process.pid} {' '.join(process.cmdline())[:200]}")
    found += [f"port {port} of {address}" for address, port in ports if is_listening(address, port)]
    if not processes_of(lab):  # else those of another job
        found += [
            f"shared memory {path}" for path in lab.shared_memory.rglob("*") if not path.is_dir()
        ]
    return found


def assert_nothing_left(
    lab: SlurmLab, job: Job, run_dir: Path | None = None, seconds: float = END_SECONDS
) -> None:
    """No step, process, shared memory or listening port of an ended job.

    Args:
        run_dir: of the run whose published ports are looked at.
        seconds: that it may take until all is gone.
    """
    ports: set[tuple[str, int]] = set() if run_dir is None else published_ports(run_dir)
    deadline = time.monotonic() + seconds
    while left := left_of(lab, job, ports):
        assert time.monotonic() < deadline, "\n".join(["left behind:", *left, job.output])
        time.sleep(0.25)
