"""How a generator finds the trainers: by a file of the run's folder, or by the store of its job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reinforce_rl.rollout.weight_group import ElasticWeightGroup
from reinforce_rl.runtime.links import Invitation
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.net import EVERY_ADDRESS, LOOPBACK, Address, address_towards, listen
from reinforce_rl.utils.untrusted_files import read_published

RENDEZVOUS = "generators"  # where rank 0 shares a `RendezvousInfo` with the ranks of its job
RENDEZVOUS_FILE = "generators.json"  # of a run's folder


@dataclass(frozen=True)
class RendezvousInfo:
    """How to reach rank 0; whoever can read it is let in."""

    links: Invitation
    store_port: int  # of torch's store, by which weight groups are formed

    def to_json(self) -> str:
        return json.dumps({**self.links.to_values(), "store_port": self.store_port})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RendezvousInfo:
        """Inverse of `to_json`; raise TypeError, KeyError or AttributeError for other values."""
        links = dict(values)
        port = links.pop("store_port")
        return cls(Invitation.from_values(links), port)

    def write(self, folder: Path) -> None:
        """Put it into a run's folder, where its owner alone can read it."""
        write_atomically(folder / RENDEZVOUS_FILE, self.to_json() + "\n", mode=0o600)

    @classmethod
    def read(cls, folder: Path) -> RendezvousInfo | None:
        """Return what a run's folder has; None where there is none, or one of another version."""
        try:
            return cls.from_values(read_published(folder / RENDEZVOUS_FILE))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def weight_group(self, device: torch.device, timeout: timedelta) -> ElasticWeightGroup:
        """Return a generator's side of the weight group, which has to be formed.

        `timeout` is of a transfer. Raises ConnectionError: rank 0 is not there.
        """
        host = self.links.host
        try:
            store = TCPStore(host, self.store_port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            address = Address(host, self.store_port)
            raise ConnectionError(f"cannot reach rank 0's store at {address}: {error}") from error
        return ElasticWeightGroup(store, address_towards(host), device, timeout)


def host_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """Return a store that generators reach on this machine, and its port.

    It listens on the loopback alone if `host` is that.
    """
    # A name may resolve to another address here than there.
    listener = listen(host if host == LOOPBACK else EVERY_ADDRESS, 0)
    port = listener.getsockname()[1]
    store = TCPStore(
        *(host, port),
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    return store, port
