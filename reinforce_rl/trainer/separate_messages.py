"""Messages between the trainers and generators that are programs of their own, besides works and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RANKS = 4096  # ranks of a generator have the numbers from RANKS times its own on
HELLO = b"generator"


@dataclass(frozen=True)
class Arrival:
    """A generator's rank has come."""

    size: int  # ranks of this generator
    name: str  # host and process
    settings: Mapping[str, Any]  # those that must be the trainers'


@dataclass(frozen=True)
class NewWeights:
    """A rank is to receive a version in an epoch's group."""

    epoch: int
    version: int
    place: int  # rank in the group
    size: int


@dataclass(frozen=True)
class Received:
    """What has become of `NewWeights`."""

    epoch: int
    version: int
    fault: str = ""  # empty: the weights are there


@dataclass(frozen=True)
class Abandoned:
    """An epoch's transfer is not going on."""

    epoch: int
    why: str


@dataclass(frozen=True)
class Dismissed:
    """A rank is not a generator of this run any more."""

    why: str
