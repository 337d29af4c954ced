"""Links and stores between machines, by IPv4 and IPv6."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reinforce_rl.runtime.guests import host_store
from reinforce_rl.runtime.links import Invitation, Links

HOSTS = [
    "127.0.0.1",
    "localhost",
    pytest.param(
        "0:0:0:0:0:0:0:1",  # as an address of another machine, since ::1 is taken for 127.0.0.1
        marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6"),
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
