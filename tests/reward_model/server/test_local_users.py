"""What another user of the server's machine can do, as docs/security.md describes it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import psutil
import pytest
from helpers.other_user import as_nobody, load_model
from helpers.toy_server import ToyServer

from reinforce_rl.reward_model.server.triton import SHARED_MEMORY_PREFIX, keep_private

pytest.importorskip("pytriton", reason="the reward server needs nvidia-pytriton")

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can attack the server as another user"),
]


def pids_of(server: ToyServer) -> list[int]:
    return [server.process.pid, *(process.pid for process in server.descendants)]


def ports_of(server: ToyServer) -> list[int]:
    """Return the ports on which the server's processes listen, without the front door's."""
    connections = [
        connection
        for process in server.descendants
        for connection in process.net_connections("tcp")
    ]
    return [
        connection.laddr.port
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port != server.port
    ]


def sockets_of(server: ToyServer) -> list[str]:
    return [
        str(path) for path in server.temporary.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)
    ]


def test_another_user_cannot_run_code_in_the_server(server, tmp_path):
    written = tmp_path / "written"
    places = [*ports_of(server), *sockets_of(server)]
    report = as_nobody("load_model", pids_of(server), places, str(written))
    assert not written.exists(), report
    assert report["secrets"] == []
    assert len(report["answers"]) >= 3
    assert set(report["answers"]) == {"PermissionError"}


def test_nor_does_triton_load_code_for_its_own_user(server, tmp_path):
    """Such as a reward function, which runs as the server's user."""
    written = tmp_path / "written"
    triton = [path for path in sockets_of(server) if path.endswith("triton.sock")]
    ports = [*ports_of(server), *triton]
    report = load_model(pids_of(server), ports, str(written))
    assert not written.exists(), report
    assert len(report["answers"]) == 1 and report["answers"][0].split()[1] in ("400", "503"), report


def test_another_user_cannot_read_requests(server):
    mapped = {
        Path(region.path) for process in server.descendants for region in process.memory_maps()
    }
    shared = [str(path) for path in mapped if path.is_relative_to("/dev/shm") and path.exists()]
    assert any(SHARED_MEMORY_PREFIX in path for path in shared)
    files = [str(path) for path in server.temporary.rglob("*") if path.is_file()]
    assert files
    assert as_nobody("open_files", [*shared, *files]) == []


def test_no_secret_is_in_the_log_or_in_tritonserver(tmp_path, monkeypatch):
    """tritonserver keeps the rest of the environment and finds its Python by PATH."""
    secret = "s3cret" * 8
    for name in ("REINFORCE_REWARD_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("HARMLESS_VARIABLE", "printed")
    with ToyServer(tmp_path, "--log-level", "DEBUG") as server:
        environment = server.tritonserver.environ()
        assert environment["HARMLESS_VARIABLE"] == "printed", "so that the test can fail"
        assert secret not in environment.values()
        assert not {"REINFORCE_REWARD_TOKEN", "WANDB_API_KEY"} & environment.keys()
        assert " DEBUG " in server.log.read_text(), "so that the test can fail"
        assert secret not in server.log.read_text()


def test_a_healthy_server_logs_no_error(server):
    lines = server.log.read_text().splitlines()
    errors = [line for line in lines if line.startswith(("E1", "E0", "W1", "W0"))]
    assert errors == []
    assert "\x1b[" not in server.log.read_text()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_a_segment_changes_no_file_of_the_user(tmp_path, link):
    (tmp_path / "tool").touch(0o755)
    (tmp_path / "tool").chmod(0o755)
    link(tmp_path / "tool", tmp_path / "segment")
    with contextlib.suppress(OSError):
        keep_private(tmp_path / "segment")
    assert (tmp_path / "tool").stat().st_mode & 0o777 == 0o755
    (tmp_path / "own").touch(0o644)
    keep_private(tmp_path / "own")
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600
