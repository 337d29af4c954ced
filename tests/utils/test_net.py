"""Hosts and ports with IPv4, IPv6 and names: parsing, listening and connecting."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest
from helpers.errors import raises_error
from helpers.fake_reward_server import FakeRewardServer

from reinforce_rl.config.load import read
from reinforce_rl.config.rewards import InferenceConfig, RewardServerConfig
from reinforce_rl.utils import net
from reinforce_rl.utils.net import (
    CLAIMED_PORTS,
    FIRST_CLAIMED_PORT,
    Address,
    address_towards,
    checked_host,
    claim_ports,
    free_port,
    interface_of,
    is_loopback,
    listen,
    open_port,
    own_address,
    published_address,
)

HAS_IPV6 = socket.has_dualstack_ipv6()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("node7", "node7:5555"),
        ("10.0.0.7", "10.0.0.7:5555"),
        ("::1", "[::1]:5555"),
        ("fd00::2", "[fd00::2]:5555"),
    ],
)
def test_an_address_is_written_and_read(host, text):
    assert str(Address(host, 5555)) == text
    assert Address(host, 5555).url == f"http://{text}"
    assert Address.parse(text) == Address(host, 5555)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("::1:5555", "brackets"),
        ("[fe80::1%eth0]:5555", "zone"),
        ("[::1]", "brackets"),
        ("node7", "HOST:PORT"),
        ("node7:0", "HOST:PORT"),
        ("[node7]:5555", "HOST:PORT"),
        ("a b:5555", "HOST:PORT"),
        ("http://node7:5555", "HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("FD00::2", "fd00::2"),
        ("node7", "node7"),
        ("0.0.0.0", "0.0.0.0"),
    ],
)
def test_a_host_has_one_form(text, host):
    assert checked_host(text) == host


@pytest.mark.parametrize(
    "text", ["", "node7:5555", "http://node7", "fe80::1%eth0", "[::1]:5555", "a b", "u@node7"]
)
def test_what_is_no_host_is_refused(text):
    with pytest.raises(ValueError):
        checked_host(text)


@pytest.mark.parametrize(
    ("schema", "key"),
    [(InferenceConfig, "inference.host"), (RewardServerConfig, "remote_rm.reward_model.ip")],
)
@pytest.mark.parametrize(
    ("value", "host"),
    [("::1", "::1"), (["::1"], "::1"), ("[::1]", "::1"), ("fe80::1%eth0", None), ("a:5", None)],
)
def test_host_keys_take_ipv6_with_or_without_brackets(schema, key, value, host):
    from omegaconf import OmegaConf

    section, _, name = key.rpartition(".")
    config, faults = read(schema, OmegaConf.create({name: value}), f"{section}.")
    if host is None:
        assert len(faults) == 1
        assert key in faults[0]
        assert value in faults[0]
    else:
        assert faults == []
        assert getattr(config, name) == host


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0.0.0.0", pytest.param("::1", marks=needs_ipv6)]
)
def test_a_free_port_is_listened_on(host):
    port = free_port(host)
    with open_port(host, port) as listener:
        assert listener.getsockname()[1] == port
        with socket.create_connection(tuple(vars(Address(host, port).local).values()), timeout=5):
            pass
        with pytest.raises(OSError):
            listen(host, port)


@needs_ipv6
def test_every_address_of_ipv6_takes_ipv4_too():
    with listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()


def test_a_name_whose_first_address_is_not_here(monkeypatch):
    """Such as ::1 for localhost in /etc/hosts of a machine without IPv6."""
    resolve = socket.getaddrinfo
    absent = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.7", 0))

    def resolved(host, port, *args, **kwargs):
        return [absent, *resolve("127.0.0.1", port, *args, **kwargs)]

    monkeypatch.setattr(net.socket, "getaddrinfo", resolved)
    with listen("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_host_of_another_machine_is_named():
    with raises_error("server.port.not_listening", "198.51.100.7:5555"):
        open_port("198.51.100.7", 5555)
    with raises_error("server.port.none_free", "198.51.100.7"):
        free_port("198.51.100.7")


@pytest.mark.more
@needs_ipv6
def test_a_busy_ipv6_port_is_named():
    with listen("::1", 0) as listener:
        port = listener.getsockname()[1]
        with raises_error("server.port.in_use", "::1", port):
            open_port("::1", port)


def test_all_addresses_are_no_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True, True, True]
    assert [is_loopback(host) for host in ("0.0.0.0", "::")] == [False, False]


def test_names_of_this_machine_need_no_name_server(monkeypatch):
    address = address_towards("192.0.2.1") if has_route() else "127.0.0.2"
    monkeypatch.setattr(net.socket, "gethostname", lambda: "Node7.cluster.example")
    here = [
        "localhost",
        "LOCALHOST.",
        "a.localhost",
        "127.0.0.5",
        "::1",
        "0.0.0.0",
        "node7",
        "node7.cluster.example",
    ]
    outside = ["192.0.2.1", "node70", "judge.invalid", "cluster.example", ""]
    assert [host for host in [*here, address, *outside] if net.names_this_machine(host)] == [
        *here,
        address,
    ]


def has_route() -> bool:
    try:
        return bool(address_towards("192.0.2.1"))  # an address of RFC 5737, which no host has
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_the_address_towards_a_host_is_of_its_family(host):
    assert address_towards(host) == host


def test_the_printed_address_is_what_http_clients_take():
    with FakeRewardServer() as server:
        address = Address("127.0.0.1", server.port)
        connection = HTTPConnection(str(address))
        assert connection.host == "127.0.0.1"
        assert connection.port == server.port
    connection = HTTPConnection(str(Address("::1", 5555)))
    assert connection.host == "::1"
    assert connection.port == 5555


CLAIMED = range(FIRST_CLAIMED_PORT, FIRST_CLAIMED_PORT + CLAIMED_PORTS)
CLAIM = """
import sys
from reinforce_rl.utils.net import claim_ports
with claim_ports(2, "7-0 actor") as ports:
    print(*ports, flush=True)
    sys.stdin.read()
"""


def claim_in_another_process() -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, [int(port) for port in process.stdout.readline().split()]


def test_two_processes_with_the_same_wish_get_different_ports() -> None:
    process, theirs = claim_in_another_process()
    try:
        with claim_ports(2, "7-0 actor") as ours:
            assert len({*ours, *theirs}) == 4
            for port in [*ours, *theirs]:
                assert port in CLAIMED
    finally:
        process.kill()
        process.communicate(timeout=30)
    with claim_ports(2, "7-0 actor") as ours:  # a killed process holds no port
        assert ours == theirs


def test_a_port_that_is_listened_on_is_left_out() -> None:
    with claim_ports(1, "key") as (wish,):
        pass
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", wish))
        listener.listen()
        with claim_ports(1, "key") as others:
            assert others != [wish]
    with claim_ports(1, "key") as again:
        assert again == [wish]


def test_the_numbers_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net.zlib, "crc32", lambda key: CLAIMED_PORTS - 1)
    with claim_ports(2, "key") as ports:
        for port in ports:
            assert port in CLAIMED


def address_with(
    monkeypatch: pytest.MonkeyPatch,
    names: dict[str, str],
    route: str = "",
) -> str:
    """Return `own_address` of a node with this name; packets go from `route`."""
    play_names(monkeypatch, names, route)
    return own_address(["there"])


def play_names(monkeypatch: pytest.MonkeyPatch, names: dict[str, str], route: str) -> None:
    """Let this machine have this name and the address `route`; an empty route means no network."""

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, address: tuple[str, int]) -> None:
            if not route:
                raise OSError(errno.ENETUNREACH, "no route")

        def getsockname(self) -> tuple[str, int]:
            return route, 0

    monkeypatch.setattr(net.socket, "gethostname", lambda: "here")
    addresses = {**names, net.ANYWHERE: net.ANYWHERE}
    monkeypatch.setattr(net, "_address_of", addresses.get)
    monkeypatch.setattr(net.socket, "socket", Probe)


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_with(monkeypatch, {"here": "10.0.0.1"}) == "10.0.0.1"
    # as Debian's installer writes /etc/hosts
    apart = {"here": "127.0.1.1", "there": "10.0.0.2"}
    assert address_with(monkeypatch, apart, route="10.0.0.1") == "10.0.0.1"
    assert address_with(monkeypatch, {"here": "127.0.1.1"}) == "127.0.1.1"
    with raises_error("slurm.rendezvous.node_without_address", "here"):
        address_with(monkeypatch, {})
    assert address_with(monkeypatch, {"here": "fd00::2"}) == "fd00::2"
    apart = {"here": "::1", "there": "fd00::2"}
    assert address_with(monkeypatch, apart, route="fd00::1") == "fd00::1"
    # several nodes on one machine
    together = {"here": "127.0.77.10", "there": "127.0.77.20"}
    assert address_with(monkeypatch, together) == "127.0.77.10"


@pytest.mark.parametrize(
    ("host", "names", "route", "expected"),
    [
        ("0.0.0.0", {"here": "10.0.0.1"}, "10.9.0.1", "10.0.0.1"),
        ("0.0.0.0", {"here": "127.0.1.1"}, "10.9.0.1", "10.9.0.1"),  # Debian
        ("0.0.0.0", {}, "10.9.0.1", "10.9.0.1"),
        ("0.0.0.0", {"here": "127.0.1.1"}, "", "127.0.1.1"),
        ("0.0.0.0", {}, "", "127.0.0.1"),
        ("::", {}, "", "::1"),
        ("127.0.0.1", {"here": "10.0.0.1"}, "10.9.0.1", "127.0.0.1"),
        ("rm0", {"here": "10.0.0.1"}, "10.9.0.1", "rm0"),
    ],
)
def test_where_others_reach_a_server(
    monkeypatch: pytest.MonkeyPatch, host: str, names: dict[str, str], route: str, expected: str
) -> None:
    play_names(monkeypatch, names, route)
    assert published_address(Address(host, 5555)) == Address(expected, 5555)


@pytest.mark.parametrize(
    ("host", "meeting_host", "expected"),
    [
        ("0.0.0.0", "10.1.0.1", "10.1.0.1"),  # the default route is another network's
        ("::", "fd00::7", "fd00::7"),
        ("0.0.0.0", "127.0.0.1", "10.9.0.1"),  # ranks of one machine
        ("0.0.0.0", None, "10.9.0.1"),
        ("rm0", "10.1.0.1", "rm0"),
    ],
)
def test_a_server_is_reached_where_its_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, host: str, meeting_host: str | None, expected: str
) -> None:
    play_names(monkeypatch, {"here": "127.0.1.1"}, route="10.9.0.1")
    assert published_address(Address(host, 5555), meeting_host) == Address(expected, 5555)


def test_the_interface_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {
        "lo": [SimpleNamespace(address="127.0.0.1"), SimpleNamespace(address="::1")],
        "eth1": [SimpleNamespace(address="10.1.0.7"), SimpleNamespace(address="fd00::7")],
    }
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    assert interface_of("10.1.0.7") == "eth1"
    assert interface_of("fd00::7") == "eth1"
    assert interface_of("localhost") == "lo"
    assert interface_of("127.0.77.10") == "lo"
    with pytest.raises(OSError, match=r"10\.1\.0\.8"):
        interface_of("10.1.0.8")
