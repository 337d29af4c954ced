"""Where the first task of a step is: a file of this attempt, which its other tasks and the supervisor wait for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from reinforce_rl.errors import ReinforceError
from reinforce_rl.utils.files import write_atomically

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Place:
    """Attributes:
    host: name of the node.
    address: by which other nodes reach it.
    rank_port: where ranks find each other.
    http_port: where the reward server listens; 0 for the actor.
    """

    host: str
    address: str
    rank_port: int
    http_port: int = 0

    @property
    def http(self) -> str:
        return f"{self.address}:{self.http_port}"


def publish(folder: Path, component: str, place: Place) -> None:
    """Say where `component` is."""
    write_atomically(_path(folder, component), json.dumps(asdict(place)) + "\n")


def look_up(folder: Path, component: str) -> Place | None:
    """Where `component` is; None while nobody has said it."""
    path = _path(folder, component)
    # A listing, since NFS may remember for half a minute that a file is not there, but looks anew at an opened folder.
    if not folder.is_dir() or path.name not in os.listdir(folder):
        return None
    return Place(**json.loads(path.read_text(encoding="utf-8")))


def wait_for(folder: Path, component: str, seconds: float, stopped: Callable[[], bool]) -> Place | None:
    """Where `component` is, as soon as it is known; None where `stopped` says so before.

    Raises:
        ReinforceError: not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not stopped():
        place = look_up(folder, component)
        if place is not None:
            return place
        if time.monotonic() > deadline:
            raise ReinforceError(
                f"the first task of {component} has not said within {seconds:.0f} s where it is "
                f"({_path(folder, component)}); see its lines in the log, and whether all nodes share the folder"
            )
        time.sleep(POLL_SECONDS)
    return None


def _path(folder: Path, component: str) -> Path:
    return folder / f"rendezvous-{component}.json"
