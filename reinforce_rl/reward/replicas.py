"""The servers of one reward model: which of them is up, which one a request goes to, and when one is asked again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from reinforce_rl.errors import RewardServerError
from reinforce_rl.reward.addresses import Address
from reinforce_rl.reward.health import NotReadyYet, check_once
from reinforce_rl.reward.infer_call import PROBE_SECONDS, ModelAddress
from reinforce_rl.reward.protocol import ServerInfo
from reinforce_rl.reward.retrying import Backoff, Deadline, FailedAttempt

logger = logging.getLogger(__name__)

UNKNOWN_MODEL_SECONDS = 30.0  # a starting server may lack its models for so long
LOOK_SECONDS = 1.0  # whoever waits looks so often whether there is something to say

T = TypeVar("T")


def unlike(first: Address, second: Address, differences: Sequence[str]) -> str:
    """For two servers that should serve the same model."""
    return (
        f"the reward servers at {first} and {second} do not serve the same model with the same limits "
        f"({'; '.join(differences)}). Replicas must be alike: start one of them anew, or take it out of "
        "remote_rm.reward_model.replicas."
    )


class NoServerInTime(Exception):
    """No server was up within the deadline."""


@dataclass
class _Replica:
    """One server.

    Attributes:
        model: where it is.
        backoff: of its pauses.
        info: its description, once it was up.
        up: it may be asked for scores.
        tried: it was probed at least once.
        outstanding: samples that it is being asked for.
        turn: of the last request that it got.
        failures: since it last gave scores.
        trouble: what was wrong last; None once it gave scores.
        fault: why it cannot be used at all, as far as is known.
    """

    model: ModelAddress
    backoff: Backoff
    info: ServerInfo | None = None
    up: bool = False
    tried: bool = False
    outstanding: int = 0
    turn: int = 0
    failures: int = 0
    trouble: str | None = None
    fault: RewardServerError | None = None


@dataclass(frozen=True)
class Lease:
    """The right to ask a server for scores.

    Attributes:
        model: the server.
        number: tells it from the other servers.
        probes: of this server, when the lease began; a failure of before a later one says nothing new.
    """

    model: ModelAddress
    number: int
    probes: int


class Replicas:
    """Asks each server who it is, in a thread of its own while it is not up, and deals out those that are.

    A request goes to the server with the fewest samples outstanding. One that fails is set aside for a pause that
    grows, and is asked again who it is; it must be what it was, and what the others are.

    Args:
        models: the same model at one server or several.
        first_backoff_seconds, max_backoff_seconds: the pause grows from one to the other.
    """

    def __init__(self, models: Sequence[ModelAddress], first_backoff_seconds: float, max_backoff_seconds: float):
        rng = random.Random()  # its own, so that jitter does not touch the trainer's random state
        backoffs = [Backoff(first_backoff_seconds, max_backoff_seconds, rng) for _ in models]
        self._replicas = [_Replica(model, backoff) for model, backoff in zip(models, backoffs, strict=True)]
        for turn, replica in enumerate(rng.sample(self._replicas, len(models))):
            replica.turn = turn - len(models)  # else the first request of every rank would go to the same server
        self._turns = 0
        self._probes = [0] * len(models)
        self._info: ServerInfo | None = None
        self._described_by: ModelAddress | None = None
        self._difference: str | None = None  # two servers of different models: nothing can go on
        self._changed = threading.Condition()
        self._news = 0
        self._started = False
        self._closed = threading.Event()

    @property
    def places(self) -> str:
        """HOST:PORT of each."""
        return ", ".join(str(replica.model.place) for replica in self._replicas)

    @property
    def several(self) -> bool:
        return len(self._replicas) > 1

    @property
    def title(self) -> str:
        """For sentences about all of them."""
        return f"reward server{'s' if self.several else ''} {self.places}"

    def troubles(self) -> list[str]:
        """What is wrong with each that has trouble; with its place, where there are several."""
        with self._changed:
            return [
                f"{replica.model.place} {replica.trouble}" if self.several else replica.trouble
                for replica in self._replicas
                if replica.trouble is not None
            ]

    def all_in_trouble(self) -> bool:
        """Whether none has given scores since it failed."""
        with self._changed:
            return all(replica.trouble is not None for replica in self._replicas)

    def describe(self, deadline: Deadline, waiting: Callable[[], None]) -> tuple[ServerInfo, ModelAddress]:
        """What they serve, and one that said so, as soon as one is up.

        Args:
            deadline: of the wait.
            waiting: called every now and then meanwhile.

        Raises:
            NoServerInTime: none came up.
            RewardServerError: none can be used at all, or two serve different models.
        """
        return self._wait(self._description, deadline, waiting)

    def ready(self, deadline: Deadline, waiting: Callable[[], None]) -> ServerInfo:
        """As `describe`, once every server was asked; each that answers must be one that can be used.

        Raises:
            NoServerInTime: none came up.
            RewardServerError: one cannot be used at all, or two serve different models.
        """

        def look() -> ServerInfo | None:
            for replica in self._replicas:
                if replica.fault is not None:
                    raise RewardServerError(str(replica.fault))
            tried = all(replica.tried for replica in self._replicas) or deadline.remaining <= 0
            return self._info if tried and any(replica.up for replica in self._replicas) else None

        return self._wait(look, deadline, waiting)

    @contextmanager
    def lease(self, samples: int, deadline: Deadline, waiting: Callable[[], None]) -> Iterator[Lease]:
        """The server that is least busy, for the time of a `with` block.

        Args:
            samples: that it will be asked for.
            deadline: of the wait for one that is up.
            waiting: called every now and then meanwhile.

        Raises:
            NoServerInTime: none was up within the deadline.
            RewardServerError: none can be used at all, or two serve different models.
        """

        def choose() -> Lease | None:
            up = [number for number, replica in enumerate(self._replicas) if replica.up]
            if not up or deadline.remaining <= 0:
                return None
            number = min(up, key=lambda n: (self._replicas[n].outstanding, self._replicas[n].turn))
            self._turns += 1
            self._replicas[number].turn = self._turns
            self._replicas[number].outstanding += samples
            return Lease(self._replicas[number].model, number, self._probes[number])

        lease = self._wait(choose, deadline, waiting)
        try:
            yield lease
        finally:
            with self._changed:
                self._replicas[lease.number].outstanding -= samples

    def succeeded(self, lease: Lease) -> None:
        """It gave scores."""
        with self._changed:
            replica = self._replicas[lease.number]
            if replica.failures and self.several:
                logger.info("event=reward_server_back place=%s", replica.model.place)
            replica.failures = 0
            replica.trouble = None
            replica.backoff.reset()

    def failed(self, lease: Lease, failure: FailedAttempt) -> None:
        """It gave none: set it aside, and ask it again who it is after a pause."""
        with self._changed:
            replica = self._replicas[lease.number]
            if not replica.up or self._probes[lease.number] != lease.probes:
                return  # another request has said so
            replica.up = False
            replica.failures += 1
            replica.trouble = str(failure)
            replica.fault = failure.fault
            if replica.failures == 1 and self.several:
                logger.warning("event=reward_server_set_aside place=%s reason=%s", replica.model.place, failure)
            self._tell()
            self._probe_in_background(lease.number, replica.backoff.pause(failure.retry_after))

    def close(self) -> None:
        """Whoever waits gets an error. Safe to call twice."""
        self._closed.set()
        with self._changed:
            self._tell()

    def _description(self) -> tuple[ServerInfo, ModelAddress] | None:
        return None if self._info is None or self._described_by is None else (self._info, self._described_by)

    def _wait(self, look: Callable[[], T | None], deadline: Deadline, waiting: Callable[[], None]) -> T:
        """What `look` returns, as soon as it returns something; it is called under the lock."""
        self._start()
        while True:
            with self._changed:
                if self._closed.is_set():
                    raise RewardServerError(f"the client of the {self.title} was closed")
                if self._difference is not None:
                    raise RewardServerError(self._difference)
                found = look()
                if found is not None:
                    return found
                faults = [replica.fault for replica in self._replicas]
                if all(faults):
                    raise RewardServerError(str(faults[0]))
                news = self._news
            if deadline.remaining <= 0:
                raise NoServerInTime
            waiting()
            with self._changed:
                if self._news == news:
                    self._changed.wait(max(0.0, min(deadline.remaining, LOOK_SECONDS)))

    def _start(self) -> None:
        with self._changed:
            if not self._started:
                self._started = True
                for number in range(len(self._replicas)):
                    self._probe_in_background(number, 0.0)

    def _tell(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def _probe_in_background(self, number: int, pause: float) -> None:
        # A daemon: a trainer that ends with an error must not wait here for a server that hangs.
        name = f"reward-probe-{self._replicas[number].model.place}"
        threading.Thread(target=self._probe, args=(number, pause), daemon=True, name=name).start()

    def _probe(self, number: int, pause: float) -> None:
        """Ask the server who it is until it is up."""
        replica = self._replicas[number]
        unknown_since: float | None = None
        while not self._closed.wait(pause):
            info, fault, retry_after = None, None, None
            model, trouble = replica.model, ""
            try:
                info = check_once(model.place.host, model.place.port, model.name, PROBE_SECONDS, token=model.token)
            except NotReadyYet as error:
                trouble, retry_after = str(error), error.retry_after
                unknown_since = (unknown_since or time.monotonic()) if error.unknown else None
                if unknown_since is not None and time.monotonic() - unknown_since > UNKNOWN_MODEL_SECONDS:
                    fault = RewardServerError(
                        f"the server at {model.place} {trouble}, and that for {UNKNOWN_MODEL_SECONDS:.0f} s: "
                        "it is no reward server of this project. Check host and port."
                    )
            except Exception as error:  # an error of ours, or a bug, which must not end the thread unheard
                fault = error if isinstance(error, RewardServerError) else RewardServerError(repr(error))
                trouble = f"cannot be used: {fault}"
            with self._changed:
                replica.tried = True
                replica.fault = fault
                self._tell()
                if info is not None:
                    self._accept(number, info)
                    return
                if replica.trouble != trouble and replica.info is None and self.several:
                    logger.warning("event=reward_server_away place=%s reason=%s", model.place, trouble)
                replica.trouble = trouble
                pause = replica.backoff.pause(retry_after)

    def _accept(self, number: int, info: ServerInfo) -> None:
        """Take it among those that are up, if it is what it should be."""
        replica = self._replicas[number]
        if self._info is None:
            self._info, self._described_by = info, replica.model
        if replica.info is not None and (differences := replica.info.differences(info, "before", "now")):
            self._difference = (
                f"the reward server at {replica.model.place} was replaced by another one during the run "
                f"({'; '.join(differences)}). Start the one from before, or start the run again."
            )
        elif self._described_by is not None:
            first, second = self._described_by.place, replica.model.place
            if differences := self._info.differences(info, f"at {first}", f"at {second}"):
                self._difference = unlike(first, second, differences)
        if self._difference is None:
            replica.info = info
            replica.up = True
            self._probes[number] += 1
            if replica.failures == 0:
                replica.trouble = None
