"""How programs outside of a job join it: rank 0's invitation in a file of the run's folder, and a guest's role."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reinforce_rl.rollout.weight_group import ReformedGroup
from reinforce_rl.runtime.links import Invitation
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.net import EVERY_ADDRESS, LOOPBACK, Address, address_towards, listen
from reinforce_rl.utils.untrusted_files import read_published

INVITATION_FILE = "generators.json"


@dataclass(frozen=True)
class OpenInvitation:
    """How to reach rank 0; whoever can read it is let in."""

    links: Invitation
    store_port: int  # of torch's store, by which weight groups are formed

    def write(self, folder: Path) -> None:
        """Put it into a run's folder, where its owner alone can read it."""
        values = {**self.links.to_values(), "store_port": self.store_port}
        write_atomically(folder / INVITATION_FILE, json.dumps(values) + "\n", mode=0o600)

    @classmethod
    def read(cls, folder: Path) -> OpenInvitation | None:
        """Return a run's invitation; None where there is none, or one of another version."""
        try:
            values = read_published(folder / INVITATION_FILE)
            port = values.pop("store_port")
            return cls(Invitation.from_values(values), port)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True)
class Guest:
    """A rank of a program that joins the trainers, in the place of a `RankRole`."""

    rank: int  # a number that nobody else has
    invitation: OpenInvitation
    timeout: timedelta  # of a transfer of weights

    def shared(self, name: str) -> str:
        """Return the invitation to rank 0's links, the only thing that is shared."""
        return self.invitation.links.to_json()

    def weight_group(self, device: torch.device) -> ReformedGroup:
        """Return the group, which has to be formed. Raises ConnectionError: rank 0 is not there."""
        host = self.invitation.links.host
        port = self.invitation.store_port
        try:
            store = TCPStore(host, port, is_master=False, timeout=self.timeout)
        except RuntimeError as error:
            raise ConnectionError(
                f"cannot reach rank 0's store at {Address(host, port)}: {error}"
            ) from error
        return ReformedGroup(store, address_towards(host), device, self.timeout)


def host_store(host: str, timeout: timedelta) -> tuple[Any, int]:
    """Return a store that guests reach on this machine, and its port.

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
