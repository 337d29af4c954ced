"""Ctrl-C at any moment of a save or a load.

It stays an interrupt, and the last checkpoint stays intact.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_run import Run
from helpers.errors import raises_error
from helpers.models import tiny_llama_folder

from reinforce_rl.megatron import checkpointer as subject
from reinforce_rl.megatron.checkpointer import latest_checkpoint

MOMENTS = 40


# These release process-wide state when a `with` block exits; an interrupt there would keep it
# acquired. A lock of pytest's log handler made the next logging thread wait forever, and disabled
# gradients made other test files fail.
SHARED = (
    "logging",
    "contextlib",
    "threading",
    "warnings",
    "torch.autograd.grad_mode",
    "torch.utils._contextlib",
)


def is_moment(frame: Any, event: str) -> bool:
    return event == "call" and frame.f_globals.get("__name__") not in SHARED


def count_calls(action: Callable[[], object]) -> int:
    """Count calls of Python functions, the moments at which a signal can be handled."""
    count = 0

    def step(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += is_moment(frame, event)

    sys.setprofile(step)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def interrupt_at(moment: int, action: Callable[[], object]) -> BaseException | None:
    """Interrupt this call; return the exception that results, or None if there is none."""
    count = 0

    def step(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += is_moment(frame, event)
        if count == moment:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(step)
    try:
        action()
    except BaseException as error:
        return error
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
        torch.set_grad_enabled(True)
    return None


@pytest.fixture(scope="module")
def run(mesh, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("interrupted")
    run = Run(mesh, tiny_llama_folder(folder / "model"), folder / "checkpoints")
    run.train(1)
    run.checkpointer.save(1, {"step": 1})
    return run


@pytest.mark.more
def test_within_a_save(run):
    folder = run.checkpointer.folder
    saved = {1: run.weights()}
    run.train(1)
    step = 1
    calls = count_calls(lambda: run.checkpointer.save(2, {"step": 2}))
    saved[2] = run.weights()
    step = 2
    interrupted = 0
    for number in range(MOMENTS):
        run.train(1)
        save = partial(run.checkpointer.save, step + 1, {"step": step + 1})
        raised = interrupt_at(1 + number * calls // MOMENTS, save)
        assert raised is None or type(raised) is KeyboardInterrupt, (
            f"call {number * calls // MOMENTS}: {raised!r}"
        )
        interrupted += raised is not None
        run.checkpointer._running = None  # of a process that has ended
        named = latest_checkpoint(folder)
        assert named is not None
        assert named.trainer_state["step"] in (step, step + 1)
        if named.trainer_state["step"] > step:
            step += 1
            saved[step] = run.weights()
        run.checkpointer.restore(named)
        for name, value in run.weights().items():
            assert torch.equal(value, saved[step][name])
    assert interrupted > MOMENTS * 0.8


def test_within_a_load(run):
    named = latest_checkpoint(run.checkpointer.folder)
    calls = count_calls(lambda: run.checkpointer.restore(named))
    interrupted = 0
    for number in range(MOMENTS):
        raised = interrupt_at(
            1 + number * calls // MOMENTS, lambda: run.checkpointer.restore(named)
        )
        # None: the interrupt hit a finalizer, and Python ignores its exceptions.
        assert raised is None or type(raised) is KeyboardInterrupt, (
            f"call {number * calls // MOMENTS}: {raised!r}"
        )
        interrupted += raised is not None
    assert interrupted > MOMENTS * 0.8


class TestReportsOfFailures:
    def check(self, run: Run, key: str, *values: object) -> None:
        with raises_error(key, run.checkpointer.folder / "step_00000099.part", *values):
            run.checkpointer.save(99, {"step": 99})
        run.checkpointer._running = None

    @pytest.mark.parametrize("limit", [0, 20_000])
    def test_a_disk_that_is_full(self, run, limit):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            self.check(run, "checkpoint.disk.full", "GB")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    def test_a_quota_at_a_rename(self, run, monkeypatch, number):
        def failing(source, target):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(subject.os, "replace", failing)
        self.check(run, "checkpoint.disk.full", os.strerror(number), "GB")

    @pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
    def test_other_faults_of_a_disk(self, run, monkeypatch, number):
        def failing(source, target):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(subject.os, "replace", failing)
        self.check(run, "checkpoint.folder.not_written", os.strerror(number))

    def test_a_fault_of_the_program(self, run, monkeypatch):
        def failing(*args, **kwargs):
            raise ValueError("an unheard-of tensor")

        monkeypatch.setattr(subject.files.ShardedWriter, "write", failing)
        self.check(run, "checkpoint.folder.not_written", "an unheard-of tensor")

    def test_a_folder_that_cannot_be_made(self, run):
        blocked = Path(run.checkpointer.folder / "step_00000099.part")
        shutil.rmtree(blocked, ignore_errors=True)
        blocked.write_text("a file")
        try:
            self.check(run, "checkpoint.folder.not_written")
        finally:
            blocked.unlink()
