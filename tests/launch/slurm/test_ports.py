"""Ports that two jobs on one node cannot share."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reinforce_rl.errors import ReinforceError
from reinforce_rl.launch.slurm import ports
from reinforce_rl.launch.slurm.ports import FIRST_PORT, PORTS, claim_ports, own_address

CLAIM = """
import sys
from pathlib import Path
from reinforce_rl.launch.slurm.ports import claim_ports
with claim_ports(2, "7-0 actor", Path(sys.argv[1])) as found:
    print(*found, flush=True)
    sys.stdin.read()
"""


def claim_in_another_process(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(port) for port in process.stdout.readline().split()]


def test_two_processes_with_the_same_wish_get_different_ports(tmp_path: Path) -> None:
    process, theirs = claim_in_another_process(tmp_path)
    try:
        with claim_ports(2, "7-0 actor", tmp_path) as ours:
            assert len({*ours, *theirs}) == 4
            assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in [*ours, *theirs])
    finally:
        process.kill()
        process.communicate(timeout=30)
    with claim_ports(2, "7-0 actor", tmp_path) as ours:  # a killed process holds nothing
        assert ours == theirs


def test_a_port_that_is_listened_on_is_left_out(tmp_path: Path) -> None:
    with claim_ports(1, "key", tmp_path) as found:
        wish = found[0]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", wish))
        listener.listen()
        with claim_ports(1, "key", tmp_path) as found:
            assert found != [wish]
    with claim_ports(1, "key", tmp_path) as found:
        assert found == [wish]


def test_all_users_may_lock(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    with claim_ports(1, "key", folder) as found:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
        assert (folder / str(found[0])).exists()
    assert not list(folder.iterdir())


def test_a_lock_on_a_file_that_is_no_longer_there_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "20000"
    first = ports._lock(path)
    assert first is not None
    late = os.open(path, os.O_RDONLY)  # as somebody who comes between its opening and its lock
    ports._unlock(path, first)
    second = ports._lock(path)  # of a new file
    assert second is not None and os.fstat(second).st_ino != os.fstat(late).st_ino
    assert ports._lock(path) is None
    ports._unlock(path, second)
    os.close(late)


def test_the_numbers_wrap_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.zlib, "crc32", lambda key: PORTS - 1)
    with claim_ports(2, "key", tmp_path) as found:
        assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in found)


def address_with(monkeypatch: pytest.MonkeyPatch, names: dict[str, str], route: str = "") -> str:
    """`own_address` of a node called here, with these addresses of names, from which packets go by `route`."""

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, address: tuple[str, int]) -> None: ...
        def getsockname(self) -> tuple[str, int]:
            return route, 0

    monkeypatch.setattr(ports.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(ports, "_address_of", names.get)
    monkeypatch.setattr(ports.socket, "socket", Probe)
    return own_address(["there"])


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_with(monkeypatch, {"here": "10.0.0.1"}) == "10.0.0.1"
    # as Debian's installer writes /etc/hosts
    assert address_with(monkeypatch, {"here": "127.0.1.1", "there": "10.0.0.2"}, route="10.0.0.1") == "10.0.0.1"
    assert address_with(monkeypatch, {"here": "127.0.1.1"}) == "127.0.1.1"
    with pytest.raises(ReinforceError, match="the name of this node, here, has no IPv4 address"):
        address_with(monkeypatch, {})
    # several nodes on one machine
    assert address_with(monkeypatch, {"here": "127.0.77.10", "there": "127.0.77.20"}) == "127.0.77.10"
