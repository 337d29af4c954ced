"""A second run in a folder is refused, and a dead run leaves no lock."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.errors import check_error, printed_keys, raises_error
from helpers.other_user import NOBODY

from reinforce_rl.errors import ConfigError
from reinforce_rl.runtime import run_lock as module
from reinforce_rl.runtime.run_lock import LOCK_FILE, refuse_second_run, run_lock
from reinforce_rl.runtime.status import STATUS_FILE

HOLDS = """
import socket, sys
from pathlib import Path
socket.gethostname = lambda: {host!r}
from reinforce_rl.runtime.run_lock import run_lock
from reinforce_rl.runtime.status import StatusFile
with run_lock(Path({folder!r})):
    StatusFile(Path({folder!r}), enabled=True).begin()
    print(flush=True)
    sys.stdin.read()
"""
HAS_STATUS = """
import sys
from pathlib import Path
from reinforce_rl.runtime.status import StatusFile
StatusFile(Path({folder!r}), enabled=True).begin()
print(flush=True)
sys.stdin.read()
"""
LOOKS_AS_ANOTHER = """
import os
from pathlib import Path
from reinforce_rl.errors import ConfigError
from reinforce_rl.runtime.run_lock import refuse_second_run
os.setuid({user})
try:
    refuse_second_run(Path({folder!r}))
except ConfigError as error:
    print(error.with_keys())
"""


@contextlib.contextmanager
def other_process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline()
            yield other
        finally:
            other.kill()
            other.wait()


def refused(folder: Path) -> list[str]:
    """Return what both functions that check a folder say while it is in use."""
    refusals = []
    for look in (lambda: refuse_second_run(folder), lambda: run_lock(folder).__enter__()):
        with pytest.raises(ConfigError) as error:
            look()
        check_error(error.value, "run.folder.in_use", folder)
        refusals.append(error.value.faults[0])
    return refusals


def test_a_run_on_this_machine_is_left_alone_and_its_end_is_seen(tmp_path):
    import socket

    with other_process(HOLDS.format(host=socket.gethostname(), folder=str(tmp_path))) as other:
        for fault in refused(tmp_path):
            assert f"process {other.pid} " in fault
    refuse_second_run(tmp_path)
    with run_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_bytes() == b""


def test_a_lock_of_this_machine_is_not_waited_for(tmp_path, monkeypatch):
    """Also if the process of the status has ended and one of its children holds the lock."""
    import socket

    monkeypatch.setattr(module, "is_alive", lambda status: False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with other_process(HOLDS.format(host=socket.gethostname(), folder=str(tmp_path))) as other:
        for fault in refused(tmp_path):
            assert f"process {other.pid} " in fault


def test_a_run_without_a_lock_is_known_by_its_status(tmp_path):
    with other_process(HAS_STATUS.format(folder=str(tmp_path))) as other:
        for fault in refused(tmp_path):
            assert f"process {other.pid} " in fault
    with run_lock(tmp_path):
        pass


def test_without_locks_a_second_run_is_refused_on_the_same_machine_only(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "lockf", no_locks)
    with other_process(HAS_STATUS.format(folder=str(tmp_path))) as other:
        with raises_error("run.folder.in_use", f"process {other.pid} "), run_lock(tmp_path):
            pass
        status = json.loads((tmp_path / STATUS_FILE).read_text())
        (tmp_path / STATUS_FILE).write_text(json.dumps({**status, "host": "node7"}))
        with run_lock(tmp_path):
            pass


def test_a_run_on_another_machine_is_refused_once_its_lease_is_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.1)
    with other_process(HOLDS.format(host="node7", folder=str(tmp_path))) as other:
        for fault in refused(tmp_path):
            assert f"process {other.pid} " in fault
            assert "node7" in fault
    assert capsys.readouterr().err.count("node7") == 2


def test_a_machine_that_dies_meanwhile_gives_its_lock_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)
    with other_process(HOLDS.format(host="node7", folder=str(tmp_path))) as other:
        monkeypatch.setattr(time, "sleep", lambda seconds: (other.kill(), other.wait()))
        with run_lock(tmp_path):
            assert other.poll() is not None


@pytest.mark.parametrize("said", [b"", b"{", b"[" * 100_000, b"\xff\x00"])
def test_whatever_the_status_says_of_its_owner_the_lock_counts(tmp_path, monkeypatch, said):
    monkeypatch.setattr(module, "LEASE_SECONDS", 0.0)
    with other_process(HOLDS.format(host="node7", folder=str(tmp_path))):
        (tmp_path / STATUS_FILE).write_bytes(said)
        for fault in refused(tmp_path):
            assert "another machine" in fault
    with run_lock(tmp_path):
        pass


def test_a_link_in_its_place_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).symlink_to(victim)
    path = tmp_path / "run" / LOCK_FILE
    with raises_error("run.lock.no_regular_file", path), run_lock(tmp_path / "run"):
        pass
    assert victim.read_text() == "precious"


def test_a_folder_that_leads_out_of_the_run_is_refused(tmp_path):
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    for folder in (run / "rollouts", elsewhere):
        folder.mkdir(parents=True)
    (run / "latest").symlink_to("rollouts")
    (run / "validation").symlink_to(elsewhere)
    with pytest.raises(ConfigError) as error, run_lock(run):
        pass
    check_error(error.value, "run.link.leads_out", run / "validation", elsewhere)
    assert "latest" not in str(error.value)


def test_a_checkpoint_that_leads_out_of_the_run_is_refused(tmp_path):
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    for folder in (run / "checkpoints" / "step_00000002", elsewhere):
        folder.mkdir(parents=True)
    (run / "checkpoints" / "step_00000001").symlink_to(elsewhere)
    with pytest.raises(ConfigError) as error, run_lock(run):
        pass
    assert error.value.keys == ["run.link.leads_out"]
    check_error(error.value, "run.link.leads_out", "checkpoints/step_00000001 ", elsewhere)


def test_a_folder_that_leads_out_is_one_fault_whatever_lies_there(tmp_path):
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    for step in range(5):
        (elsewhere / f"step_0000000{step}").mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(ConfigError) as error, run_lock(run):
        pass
    assert error.value.keys == ["run.link.leads_out"]
    check_error(error.value, "run.link.leads_out", f"{run / 'checkpoints'} ", elsewhere)


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_no_other_user_can_open_it_and_hold_it(tmp_path, before):
    """A shared lock needs only read access, and would keep the run from starting."""
    if before is not None:
        (tmp_path / LOCK_FILE).touch()
        (tmp_path / LOCK_FILE).chmod(before)
    umask = os.umask(0)
    try:
        with run_lock(tmp_path):
            assert stat.S_IMODE((tmp_path / LOCK_FILE).stat().st_mode) == 0o600
    finally:
        os.umask(umask)


def test_a_mount_that_keeps_its_modes_is_no_fault(tmp_path, monkeypatch):
    def keep(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / LOCK_FILE).touch(0o644)
    (tmp_path / LOCK_FILE).chmod(0o644)
    monkeypatch.setattr(module.os, "fchmod", keep)
    with run_lock(tmp_path):
        assert stat.S_IMODE((tmp_path / LOCK_FILE).stat().st_mode) == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_one_of_another_user_is_reported_in_a_sentence():
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with run_lock(Path(folder)):
            pass
        command = [sys.executable, "-c", LOOKS_AS_ANOTHER.format(user=NOBODY, folder=folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert printed_keys(done.stdout) == ["run.lock.of_another_user"]
    assert LOCK_FILE in done.stdout
    assert "(Permission denied)" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_may_not_be_written_is_not_another_users_run():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        code = LOOKS_AS_ANOTHER.format(user=NOBODY, folder=folder)
        code = code.replace("refuse_second_run(Path", "run_lock(Path")
        code = code.replace("))\nexcept", ")).__enter__()\nexcept")
        code = code.replace("import refuse_second_run", "import run_lock")
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert printed_keys(done.stdout) == ["run.folder.not_writable"]
    assert LOCK_FILE in done.stdout
    assert "(Permission denied)" in done.stdout


def test_a_pipe_in_its_place_holds_up_nobody(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with raises_error("run.lock.no_regular_file", tmp_path / LOCK_FILE), run_lock(tmp_path):
        pass


def test_looking_makes_no_file(tmp_path):
    refuse_second_run(tmp_path)
    refuse_second_run(tmp_path / "absent")
    assert not list(tmp_path.iterdir())
