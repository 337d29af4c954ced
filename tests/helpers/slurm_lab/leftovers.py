"""Processes of jobs in a lab, and what an ended job must not leave behind."""

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

END_SECONDS = 20.0  # Slurm takes a few seconds to end a killed step


def processes_of(lab: SlurmLab, job: Job | None = None) -> list[psutil.Process]:
    """Return the lab's processes that belong to a job, or to any job, without zombies.

    All processes of a job descend from the lab's first process. A process without a job's
    environment, such as slurmstepd, counts for every job.
    """
    ids = set() if job is None else {component.id for component in lab.components(job)}
    processes = []
    for process in lab.descendants():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or is_daemon(process):
                continue
            job_id = job_id_of(process)
            if job is None or job_id is None or job_id in ids:
                processes.append(process)
    return processes


def is_daemon(process: psutil.Process) -> bool:
    """Return whether the process is the lab's own: a daemon or a shell of namespaces.sh."""
    if process.name() in ("munged", "slurmctld", "slurmscriptd", "slurmd", "unshare"):
        return True
    words = process.cmdline()[1:3]
    return process.name() in ("bash", "sh") and any(
        "namespaces.sh" in w or "slurmd -D" in w for w in words
    )


def job_id_of(process: psutil.Process) -> int | None:
    step = re.match(r"slurmstepd: \[(\d+)", " ".join(process.cmdline()))
    job_id = step.group(1) if step else process.environ().get("SLURM_JOB_ID")
    return None if job_id is None else int(job_id)


def published_ports(run_dir: Path) -> set[tuple[str, int]]:
    """Return the addresses and ports that the tasks of all attempts of a run published."""
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
    leftovers = [f"step {name}" for name in lab.steps(job)]
    for process in processes_of(lab, job):
        with contextlib.suppress(psutil.Error):
            leftovers.append(f"process {process.pid} {' '.join(process.cmdline())[:200]}")
    leftovers += [
        f"port {port} of {address}" for address, port in ports if is_listening(address, port)
    ]
    if not processes_of(lab):  # otherwise the files may belong to another job
        leftovers += [
            f"shared memory {path}" for path in lab.shared_memory.rglob("*") if not path.is_dir()
        ]
    return leftovers


def assert_nothing_left(
    lab: SlurmLab, job: Job, run_dir: Path | None = None, seconds: float = END_SECONDS
) -> None:
    """Assert that an ended job leaves no step, process, shared memory or listening port.

    Args:
        run_dir: the run whose published ports are checked.
        seconds: the time until everything must be gone.
    """
    ports: set[tuple[str, int]] = set() if run_dir is None else published_ports(run_dir)
    deadline = time.monotonic() + seconds
    while left := left_of(lab, job, ports):
        assert time.monotonic() < deadline, "\n".join(["left behind:", *left, job.output])
        time.sleep(0.25)
