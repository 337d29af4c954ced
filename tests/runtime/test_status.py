"""The status file of a run, which launchers read."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable

import pytest

from reinforce_rl.errors import EXIT_ERROR, EXIT_STOPPED
from reinforce_rl.runtime.status import STATUS_FILE, StatusFile, read_status, run_status, saved_step


def test_a_restarted_run_knows_how_long_a_save_took(tmp_path):
    first = StatusFile(tmp_path, enabled=True)
    first.begin()
    assert first.save_seconds is None
    first.saved(12.5)
    first.progress(3, 9)
    first.end(EXIT_STOPPED, "the time is used up")
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "stopped"
    assert status.step == 3
    assert status.save_seconds == 12.5

    again = StatusFile(tmp_path, enabled=True)
    again.begin()
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "running"
    assert status.step == 3
    assert status.reason == ""
    assert again.save_seconds == status.save_seconds == 12.5


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "finished", "unheard_of": 1}'])
def test_what_is_not_understood_is_replaced(tmp_path, text):
    (tmp_path / STATUS_FILE).write_text(text)
    status = StatusFile(tmp_path, enabled=True)
    status.begin()
    assert status.save_seconds is None
    assert json.loads((tmp_path / STATUS_FILE).read_text())["save_seconds"] is None


def without_space() -> Callable[..., int]:
    real_open = os.open

    def open_without_space(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(path, flags, *arguments)

    return open_without_space


@pytest.mark.parametrize("reason", ["no space left on the disk", "é" * 9000])
def test_the_end_of_a_run_is_written_on_a_full_disk(tmp_path, monkeypatch, reason):
    """It is written into the blocks that status.json already has."""
    status = StatusFile(tmp_path, enabled=True)
    status.begin()
    status.progress(3, 9, {"cut": "x" * 300})
    blocks = (tmp_path / STATUS_FILE).stat().st_blocks
    monkeypatch.setattr("reinforce_rl.utils.files.os.open", without_space())
    status.end(EXIT_ERROR, reason)
    written = read_status(tmp_path)
    assert written is not None
    assert written.state == "failed"
    assert written.exit_code == EXIT_ERROR
    assert written.step == 3
    assert written.reason
    assert reason.startswith(written.reason)
    assert (tmp_path / STATUS_FILE).stat().st_blocks == blocks
    assert run_status(tmp_path).state == "failed"


def test_a_shorter_end_leaves_nothing_of_the_longer_status(tmp_path, monkeypatch):
    status = StatusFile(tmp_path, enabled=True)
    status.begin()
    status.waiting("w" * 3000)
    monkeypatch.setattr("reinforce_rl.utils.files.os.open", without_space())
    status.end(EXIT_ERROR, "short")
    written = read_status(tmp_path)
    assert written is not None
    assert written.reason == "short"


def test_other_ranks_write_nothing(tmp_path):
    status = StatusFile(tmp_path, enabled=False)
    status.begin()
    status.saved(1.0)
    assert list(tmp_path.iterdir()) == []


def test_the_saved_step_is_the_one_that_a_run_resumes_from(tmp_path):
    assert saved_step(tmp_path) == 0
    folder = tmp_path / "checkpoints"
    for name in ("step_00000004", "step_00000012"):  # the second is not complete
        (folder / name).mkdir(parents=True)
    assert saved_step(tmp_path) == 0
    (folder / "latest").write_text("step_00000004\n")
    assert saved_step(tmp_path) == 4
