"""Links and stores between machines, by IPv4 and IPv6."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta

import pytest
import zmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reinforce_rl.rollout.rendezvous import host_store
from reinforce_rl.runtime import links as runtime_links
from reinforce_rl.runtime.links import Invitation, Links, LinkThread

HOSTS = [
    "127.0.0.1",
    "localhost",
    pytest.param(
        "0:0:0:0:0:0:0:1",  # stands for another machine's address, since ::1 is taken for 127.0.0.1
        marks=pytest.mark.skipif(
            not socket.has_dualstack_ipv6(), reason="this machine has no IPv6"
        ),
    ),
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_rank_reaches_rank_0(host):
    links, invitation = Links.listen(host)
    try:
        guest = Links.connect(invitation, 1, b"hello", 10.0)
        assert links.accept([1], 10.0) == {1: b"hello"}
        guest.close()
    finally:
        links.close()


@pytest.mark.parametrize("host", HOSTS)
def test_a_guest_reaches_the_store(host):
    store, port = host_store(host, timedelta(seconds=10))
    store.set("key", "value")
    guest = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
    assert guest.get("key") == b"value"


def test_the_address_of_a_lost_rank_0_has_brackets():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
    links, invitation = Links.listen("127.0.0.1")
    links.close()
    keys = (invitation.server_key, invitation.public_key, invitation.secret_key)
    with pytest.raises(ConnectionError, match=re.escape(f"rank 0 at [::1]:{port}:")):
        Links.connect(Invitation("::1", port, *keys), 1, b"hello", 5.0)


def test_an_invitation_keeps_its_keys():
    invitation = Invitation("host", 5, b"a" * 40, b"b$" * 20, b"c" * 40)
    assert Invitation.from_json(invitation.to_json()) == invitation


def stranger_of(invitation: Invitation, name: bytes) -> zmq.Socket:
    """A program that has the invitation and uses its name."""
    stranger: zmq.Socket = zmq.Context().socket(zmq.DEALER)
    if name:
        stranger.routing_id = name
    stranger.curve_serverkey = invitation.server_key
    stranger.curve_publickey = invitation.public_key
    stranger.curve_secretkey = invitation.secret_key
    stranger.connect(f"tcp://127.0.0.1:{invitation.port}")
    return stranger


NO_RANKS = [b"", b"someone", b"rank x", b"rank -3", b"rank 0", b"rank  7", b"rank " + b"9" * 20]


@pytest.mark.parametrize("name", NO_RANKS)
def test_who_has_no_rank_is_not_heard_and_others_are(name):
    links, invitation = Links.listen("127.0.0.1")
    stranger = stranger_of(invitation, name)
    try:
        stranger.send(b"hello")
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            assert links.poll(0.05) == []
        assert links.peers == {}
        guest = Links.connect(invitation, 1, b"hello", 10.0)
        assert links.accept([1], 10.0) == {1: b"hello"}
        guest.close()
    finally:
        stranger.context.destroy(0)
        links.close()


def test_a_message_that_is_too_large_closes_its_connection(monkeypatch):
    monkeypatch.setattr(runtime_links, "MAX_PART_BYTES", 1000)
    links, invitation = Links.listen("127.0.0.1")
    guest = Links.connect(invitation, 1, b"hello", 10.0)
    assert links.accept([1], 10.0) == {1: b"hello"}
    lost: list[tuple[int, str]] = []
    heard: list[int] = []
    thread = LinkThread(
        links,
        30.0,
        on_message=lambda rank, parts: heard.append(len(parts[0])),
        on_lost=lambda rank, reason: lost.append((rank, reason)),
        is_open=True,
    )
    try:
        guest.send(0, b"a" * 900)
        guest.poll(0.1)
        guest.send(0, b"a" * 1001)
        deadline = time.monotonic() + 10
        while not lost and time.monotonic() < deadline:
            guest.poll(0.05)
        assert lost == [(1, "died: its connection is closed")]
        assert heard == [900]
    finally:
        guest.close()
        thread.close()
