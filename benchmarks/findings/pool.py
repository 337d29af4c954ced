"""Runs jobs in worker processes that load the libraries once, each job with a deadline."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from helpers.ranks import kill_tree

from findings.runs import Job, Outcome

START_SECONDS = 120.0  # imports, on a busy machine


class Worker:
    """A process, and the job that it has."""

    def __init__(self, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # no daemon, as it may have processes
        self.process = context.Process(target=_work, args=(theirs, folder))
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.deadline = 0.0
        self._fresh = True

    def give(self, job: Job, seconds: float) -> None:
        self.connection.send(job)
        self.job = job
        self.deadline = time.monotonic() + seconds
        if self._fresh:
            self.deadline += START_SECONDS
        self._fresh = False

    def take(self) -> Outcome | str:
        """What came of the job: an outcome, or why there is none."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            answer = f"the worker ended with {self.process.exitcode}"
        self.job = None
        return answer

    def end(self) -> None:
        """Wait for an idle worker, and end one that is busy."""
        if self.job is None and self.process.is_alive():
            self.connection.send(None)
            self.process.join(30)
        if self.process.is_alive():
            kill_tree(self.process.pid or 0)
        self.process.join()
        self.connection.close()


def run_all(
    jobs: Sequence[Job], folder: Path, processes: int, seconds: float
) -> Iterator[tuple[Job, Outcome | str]]:
    """Each job with its outcome as it comes, or with the reason why it has none.

    Args:
        jobs: to be run.
        folder: that `pretraining.prepare` has filled.
        processes: at once.
        seconds: that a job may take; it is ended then.
    """
    waiting = deque(jobs)
    workers = [Worker(folder) for _ in range(min(processes, len(jobs)))]
    try:
        while waiting or any(worker.job for worker in workers):
            for index, worker in enumerate(workers):
                if worker.job is None and waiting:
                    if not worker.process.is_alive():
                        worker.end()
                        worker = Worker(folder)
                        workers[index] = worker
                    worker.give(waiting.popleft(), seconds)
            ready = wait([worker.connection for worker in workers if worker.job], timeout=1.0)
            for index, worker in enumerate(workers):
                job = worker.job
                if job is None:
                    continue
                if worker.connection in ready:
                    yield job, worker.take()
                elif time.monotonic() > worker.deadline:
                    worker.end()
                    workers[index] = Worker(folder)
                    yield job, f"it took more than {seconds:g} s"
    finally:
        for worker in workers:
            worker.end()


def _work(connection: Connection, folder: Path) -> None:
    """One job after another, until None comes or the parent is gone."""
    import torch

    torch.set_num_threads(1)

    from findings.forked import run_forked

    while (job := _next(connection)) is not None:
        try:
            connection.send(run_forked(job, folder))
        except Exception:
            connection.send(traceback.format_exc())


def _next(connection: Connection) -> Job | None:
    try:
        return connection.recv()
    except EOFError:
        return None
