"""The servers of one reward model: which of them is up, which one a request goes to, and when one is asked again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards.transport import PROBE_SECONDS, FailedAttempt, ask_description
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.addresses import Address, ModelAddress

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


class Deadline:
    """How long something has been going on, and how long it still may.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        return self.seconds - self.elapsed


class Backoff:
    """Pauses that double, each with jitter.

    Args:
        first_seconds, max_seconds: they grow from one to the other.
        rng: of the jitter.
    """

    def __init__(self, first_seconds: float, max_seconds: float, rng: random.Random):
        self._first = first_seconds
        self._max = max_seconds
        self._random = rng
        self._next = first_seconds

    def pause(self, retry_after: float | None = None) -> float:
        """Seconds until the next attempt.

        Args:
            retry_after: the server's own wish, which goes before.
        """
        pause = min(self._next * self._random.uniform(0.5, 1.5), self._max)
        self._next = min(2 * self._next, self._max)
        if retry_after is not None:
            # The server knows when it will have time. Later, never sooner: all of its clients got such an answer.
            return retry_after * self._random.uniform(1.0, 1.5)
        return pause

    def reset(self) -> None:
        """Begin anew, after a success."""
        self._next = self._first


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
    """Asks each server who it is, in a task of its own while it is not up, and deals out those that are.

    What is a coroutine here, and what changes the state, is for one event loop.

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
        self._described: tuple[ServerInfo, ModelAddress] | None = None
        self._difference: str | None = None  # two servers of different models: nothing can go on
        self._news: asyncio.Future[None] | None = None  # done at the next change; then there is a new one
        self._probing: set[asyncio.Task[None]] = set()

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
        found = [(replica.model.place, replica.trouble) for replica in self._replicas]
        return [f"{place} {trouble}" if self.several else trouble for place, trouble in found if trouble is not None]

    def all_in_trouble(self) -> bool:
        """Whether none has given scores since it failed."""
        return all(replica.trouble is not None for replica in self._replicas)

    async def describe(self, deadline: Deadline, waiting: Callable[[], None]) -> tuple[ServerInfo, ModelAddress]:
        """What they serve, and one that said so, as soon as one is up.

        Args:
            deadline: of the wait.
            waiting: called every now and then meanwhile.

        Raises:
            NoServerInTime: none came up.
            RewardServerError: none can be used at all, or two serve different models.
        """
        return await self._wait(lambda: self._described, deadline, waiting)

    async def ready(self, deadline: Deadline, waiting: Callable[[], None]) -> tuple[ServerInfo, ModelAddress]:
        """As `describe`, once every server was asked; each that answers must be one that can be used.

        Raises:
            NoServerInTime: none came up.
            RewardServerError: one cannot be used at all, or two serve different models.
        """

        def look() -> tuple[ServerInfo, ModelAddress] | None:
            for replica in self._replicas:
                if replica.fault is not None:
                    raise RewardServerError(str(replica.fault))
            tried = all(replica.tried for replica in self._replicas) or deadline.remaining <= 0
            return self._described if tried and any(replica.up for replica in self._replicas) else None

        return await self._wait(look, deadline, waiting)

    @contextlib.asynccontextmanager
    async def lease(self, samples: int, deadline: Deadline, waiting: Callable[[], None]) -> AsyncIterator[Lease]:
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

        lease = await self._wait(choose, deadline, waiting)
        try:
            yield lease
        finally:
            self._replicas[lease.number].outstanding -= samples

    def succeeded(self, lease: Lease) -> None:
        """It gave scores."""
        replica = self._replicas[lease.number]
        if replica.failures and self.several:
            logger.info("event=reward_server_back place=%s", replica.model.place)
        replica.failures = 0
        replica.trouble = None
        replica.backoff.reset()

    def failed(self, lease: Lease, failure: FailedAttempt) -> None:
        """It gave none: set it aside, and ask it again who it is after a pause."""
        replica = self._replicas[lease.number]
        if not replica.up or self._probes[lease.number] != lease.probes:
            return  # another request has said so
        replica.up = False
        replica.failures += 1
        replica.trouble = str(failure)
        replica.fault = failure.fatal
        if replica.failures == 1 and self.several:
            logger.warning("event=reward_server_set_aside place=%s reason=%s", replica.model.place, failure)
        self._tell()
        self._probe_in_background(lease.number, replica.backoff.pause(failure.retry_after))

    async def close(self) -> None:
        """End what asks in the background."""
        for task in self._probing:
            task.cancel()

    async def _wait(self, look: Callable[[], T | None], deadline: Deadline, waiting: Callable[[], None]) -> T:
        """What `look` returns, as soon as it returns something."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
            for number in range(len(self._replicas)):
                self._probe_in_background(number, 0.0)
        while True:
            if self._difference is not None:
                raise RewardServerError(self._difference)
            found = look()
            if found is not None:
                return found
            faults = [replica.fault for replica in self._replicas]
            if all(faults):
                raise RewardServerError(str(faults[0]))
            if deadline.remaining <= 0:
                raise NoServerInTime
            waiting()
            await asyncio.wait({self._news}, timeout=max(0.0, min(deadline.remaining, LOOK_SECONDS)))

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
        self._news = asyncio.get_running_loop().create_future()

    def _probe_in_background(self, number: int, pause: float) -> None:
        task = asyncio.create_task(self._probe(number, pause))
        self._probing.add(task)  # the loop itself holds tasks by weak references
        task.add_done_callback(self._probing.discard)

    async def _probe(self, number: int, pause: float) -> None:
        """Ask the server who it is until it is up."""
        replica = self._replicas[number]
        unknown_since: float | None = None
        while True:
            await asyncio.sleep(pause)
            info, fault, retry_after = None, None, None
            model, trouble = replica.model, ""
            try:
                info = await ask_description(model, PROBE_SECONDS)
            except FailedAttempt as error:
                trouble, retry_after = str(error), error.retry_after
                unknown_since = (unknown_since or time.monotonic()) if error.unknown else None
                if unknown_since is not None and time.monotonic() - unknown_since > UNKNOWN_MODEL_SECONDS:
                    fault = RewardServerError(
                        f"the server at {model.place} {trouble}, and that for {UNKNOWN_MODEL_SECONDS:.0f} s: "
                        "it is no reward server of this project. Check host and port."
                    )
            except Exception as error:  # an error of ours, or a bug, which must not end the task unheard
                fault = error if isinstance(error, RewardServerError) else RewardServerError(repr(error))
                trouble = f"cannot be used: {fault}"
            replica.tried = True
            replica.fault = fault
            if info is not None:
                self._accept(number, info)
            self._tell()
            if info is not None:
                return
            if replica.trouble != trouble and replica.info is None and self.several:
                logger.warning("event=reward_server_away place=%s reason=%s", model.place, trouble)
            replica.trouble = trouble
            pause = replica.backoff.pause(retry_after)

    def _accept(self, number: int, info: ServerInfo) -> None:
        """Take it among those that are up, if it is what it should be."""
        replica = self._replicas[number]
        self._described = self._described or (info, replica.model)
        known, by = self._described
        if replica.info is not None and (differences := replica.info.differences(info, "before", "now")):
            self._difference = (
                f"the reward server at {replica.model.place} was replaced by another one during the run "
                f"({'; '.join(differences)}). Start the one from before, or start the run again."
            )
        elif differences := known.differences(info, f"at {by.place}", f"at {replica.model.place}"):
            self._difference = unlike(by.place, replica.model.place, differences)
        if self._difference is None:
            replica.info = info
            replica.up = True
            self._probes[number] += 1
            if replica.failures == 0:
                replica.trouble = None
