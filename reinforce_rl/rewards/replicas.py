"""Replica pool: health, least-outstanding routing, backoff, and reports while requests wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards.transport import PROBE_SECONDS, FailedAttempt, ModelAddress, ask_description
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.net import Address

logger = logging.getLogger(__name__)

UNKNOWN_MODEL_SECONDS = 30.0  # how long a starting server may lack its models
REPORT_CHECK_SECONDS = 1.0  # how often a waiter checks whether a report is due

T = TypeVar("T")


def unlike(first: Address, second: Address, differences: Sequence[str]) -> str:
    """Return the error for two servers that should serve the same model and do not."""
    return (
        f"the reward servers at {first} and {second} do not serve the same model with the same limits "
        f"({'; '.join(differences)}). Replicas must be alike: start one of them anew, or take it out of "
        "remote_rm.reward_model.replicas."
    )


@dataclass(frozen=True)
class Call:
    """A request in flight: its id in both sides' logs, and its deadline."""

    id: str
    seconds: float  # deadline, counted from `start`
    start: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def remaining(self) -> float:
        return self.seconds - self.elapsed


@dataclass
class _Replica:
    model: ModelAddress
    pause: float  # next pause in seconds, before jitter
    turn: int  # when it last got a request; breaks ties
    info: ServerInfo | None = None  # once it was up
    up: bool = False  # may be asked for scores
    probes: int = 0  # how often it was found up
    outstanding: int = 0  # samples
    failing: bool = False  # no scores since its last failure
    trouble: str | None = None  # last problem; None once it gave scores
    fatal: RewardServerError | None = None  # why it cannot be used at all, as of the last probe


class Replicas:
    """Probes each server in the background until it is up, and routes requests to those that are.

    A request goes to the server with the fewest outstanding samples. One that fails is set aside for a growing pause
    and probed again; its description must equal its former one and those of the others.

    Coroutines and state changes belong to one event loop.

    Args:
        models: the same model at one or several servers.
        first_backoff_seconds, max_backoff_seconds: the pause grows from one to the other.
        on_wait: called with a sentence while no server answers, from any thread.
        report_seconds: minimum time between two such calls.
    """

    def __init__(
        self,
        models: Sequence[ModelAddress],
        first_backoff_seconds: float,
        max_backoff_seconds: float,
        on_wait: Callable[[str], None] | None,
        report_seconds: float,
    ):
        self._first_pause = first_backoff_seconds
        self._max_pause = max_backoff_seconds
        self._on_wait = on_wait
        self._report_seconds = report_seconds
        self._random = random.Random()  # its own, so that jitter does not touch the trainer's random state
        # Random first turns, so that the first requests of all ranks do not go to the same server.
        turns = self._random.sample(range(-len(models), 0), len(models))
        self._replicas = [
            _Replica(model, first_backoff_seconds, turn) for model, turn in zip(models, turns, strict=True)
        ]
        self._turns = itertools.count()
        self._described: tuple[ServerInfo, ModelAddress] | None = None
        self._difference: str | None = None  # two servers of different models: nothing can go on
        self._changed: asyncio.Future[None] | None = None  # done at the next change, and then replaced
        self._probing: set[asyncio.Task[None]] = set()
        self._next_report = 0.0
        self._report_lock = threading.Lock()

    @property
    def several(self) -> bool:
        return len(self._replicas) > 1

    @property
    def title(self) -> str:
        """All servers, for messages."""
        return f"reward server{'s' if self.several else ''} {self._places}"

    @property
    def _places(self) -> str:
        return ", ".join(str(replica.model.place) for replica in self._replicas)

    def troubles(self) -> list[str]:
        """Return what is wrong with each failing server, prefixed by its address if there are several."""
        found = [(replica.model.place, replica.trouble) for replica in self._replicas]
        return [f"{place} {trouble}" if self.several else trouble for place, trouble in found if trouble is not None]

    def report(self, call: Call, *, without_trouble: bool = False) -> None:
        """Report what is wrong, at most every `report_seconds` over all threads.

        `without_trouble` also reports a long wait if nothing is wrong.
        """
        troubles = self.troubles()
        if not troubles and not without_trouble:
            return
        text = "; ".join(troubles)
        if len(troubles) == len(self._replicas):
            text += "; retrying"
        else:
            text += f"{'; the rest ' if troubles else ''}{'have' if self.several else 'has'} not answered yet; waiting"
        logger.debug("event=reward_retry id=%s %s", call.id, text)
        with self._report_lock:
            if time.monotonic() < self._next_report:
                return
            self._next_report = time.monotonic() + self._report_seconds
        title = "reward servers:" if self.several and troubles else self.title
        sentence = f"{title} {text}, {call.elapsed:.0f} s of {call.seconds:.0f} s"
        level = logging.WARNING if troubles else logging.INFO
        if self._on_wait is not None:
            self._on_wait(sentence)
            level = logging.INFO  # a warning would show it twice
        logger.log(level, "%s (request %s)", sentence, call.id)

    def past_deadline(self, call: Call) -> RewardServerError:
        """Return the error for a call whose deadline passed, with what to check."""
        model = self._replicas[0].model
        last = "; ".join(self.troubles()) or "it has not answered"
        return RewardServerError(
            f"no answer of the {'reward servers' if self.several else 'reward server'} at {self._places} "
            f"(model '{model.name}') within {call.seconds:.0f} s; the last error: {last}. Check that it runs "
            f"(curl http://{model.place}/v2/health/ready), that its log shows no error, and that this "
            "machine can reach that host and port; the request's id there and here is "
            f"{call.id}. Start it again on the same port and continue the run."
        )

    async def describe(self, call: Call) -> tuple[ServerInfo, ModelAddress]:
        """Wait until one server is up; return its description and address.

        Raises RewardServerError if the deadline passed, no server can be used, or two serve different models.
        """
        return await self._wait(lambda: self._described, call)

    async def ready(self, call: Call) -> tuple[ServerInfo, ModelAddress]:
        """As `describe`, but probe every server first, and raise if any cannot be used at all."""

        def inspect() -> tuple[ServerInfo, ModelAddress] | None:
            for replica in self._replicas:
                if replica.fatal is not None:
                    raise RewardServerError(str(replica.fatal))
            probed = all(replica.info is not None or replica.trouble is not None for replica in self._replicas)
            any_up = any(replica.up for replica in self._replicas)
            return self._described if any_up and (probed or call.remaining <= 0) else None

        return await self._wait(inspect, call)

    @contextlib.asynccontextmanager
    async def lease(self, samples: int, call: Call) -> AsyncIterator[ModelAddress]:
        """Wait for and lend the least busy server; raises as `describe` does.

        A FailedAttempt that leaves the block sets the server aside; a normal exit marks it as healthy.
        """

        def choose() -> _Replica | None:
            up = [replica for replica in self._replicas if replica.up and call.remaining > 0]
            return min(up, key=lambda replica: (replica.outstanding, replica.turn), default=None)

        replica = await self._wait(choose, call)
        probes = replica.probes
        replica.turn = next(self._turns)
        replica.outstanding += samples
        try:
            yield replica.model
            self._on_success(replica)
        except FailedAttempt as failure:
            if replica.up and replica.probes == probes:  # else another request has reported it
                self._set_aside(replica, failure)
            raise
        finally:
            replica.outstanding -= samples

    async def close(self) -> None:
        """Cancel the background probes."""
        for task in self._probing:
            task.cancel()

    def _on_success(self, replica: _Replica) -> None:
        if replica.failing and self.several:
            logger.info("event=reward_server_back place=%s", replica.model.place)
        replica.failing = False
        replica.trouble = None
        replica.pause = self._first_pause

    def _set_aside(self, replica: _Replica, failure: FailedAttempt) -> None:
        if not replica.failing and self.several:
            logger.warning("event=reward_server_set_aside place=%s reason=%s", replica.model.place, failure)
        replica.up = False
        replica.failing = True
        replica.trouble = str(failure)
        replica.fatal = failure.fatal
        self._wake()
        self._probe_in_background(replica, self._next_pause(replica, failure.retry_after))

    async def _wait(self, inspect: Callable[[], T | None], call: Call) -> T:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
            for replica in self._replicas:
                self._probe_in_background(replica, 0.0)
        while True:
            if self._difference is not None:
                raise RewardServerError(self._difference)
            found = inspect()
            if found is not None:
                return found
            if all(replica.fatal is not None for replica in self._replicas):
                raise RewardServerError(str(self._replicas[0].fatal))
            if call.remaining <= 0:
                raise self.past_deadline(call)
            self.report(call)
            await asyncio.wait({self._changed}, timeout=max(0.0, min(call.remaining, REPORT_CHECK_SECONDS)))

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    def _probe_in_background(self, replica: _Replica, pause: float) -> None:
        task = asyncio.create_task(self._probe(replica, pause))
        self._probing.add(task)  # the loop itself holds tasks by weak references
        task.add_done_callback(self._probing.discard)

    def _next_pause(self, replica: _Replica, retry_after: float | None) -> float:
        """Double the pause, with jitter; the server's own Retry-After takes precedence."""
        pause = min(replica.pause * self._random.uniform(0.5, 1.5), self._max_pause)
        replica.pause = min(2 * replica.pause, self._max_pause)
        if retry_after is not None:
            # Never sooner than asked, and spread out: all of the server's clients got the same answer.
            return retry_after * self._random.uniform(1.0, 1.5)
        return pause

    async def _probe(self, replica: _Replica, pause: float) -> None:
        place = replica.model.place
        unknown_since: float | None = None
        while True:
            await asyncio.sleep(pause)
            retry_after = None
            try:
                info = await ask_description(replica.model, PROBE_SECONDS)
                replica.fatal = None
                self._accept(replica, info)
                self._wake()
                return
            except FailedAttempt as error:
                trouble, retry_after, replica.fatal = str(error), error.retry_after, None
                unknown_since = (unknown_since or time.monotonic()) if error.unknown else None
                if unknown_since is not None and time.monotonic() - unknown_since > UNKNOWN_MODEL_SECONDS:
                    replica.fatal = RewardServerError(
                        f"the server at {place} {trouble}, and that for {UNKNOWN_MODEL_SECONDS:.0f} s: "
                        "it is no reward server of this project. Check host and port."
                    )
            except Exception as error:  # a bug too: it must not end the task unnoticed
                replica.fatal = error if isinstance(error, RewardServerError) else RewardServerError(repr(error))
                trouble = f"cannot be used: {replica.fatal}"
            if replica.trouble != trouble and replica.info is None and self.several:
                logger.warning("event=reward_server_away place=%s reason=%s", place, trouble)
            replica.trouble = trouble
            self._wake()
            pause = self._next_pause(replica, retry_after)

    def _accept(self, replica: _Replica, info: ServerInfo) -> None:
        """Mark a server as up if its description is the expected one."""
        self._described = self._described or (info, replica.model)
        known, by = self._described
        if replica.info is not None and (differences := replica.info.differences(info, "before", "now")):
            self._difference = (
                f"the reward server at {replica.model.place} was replaced by another one during the run "
                f"({'; '.join(differences)}). Start the one from before, or start the run again."
            )
        elif differences := known.differences(info, f"at {by.place}", f"at {replica.model.place}"):
            self._difference = unlike(by.place, replica.model.place, differences)
        else:
            replica.info = info
            replica.up = True
            replica.probes += 1
            if not replica.failing:
                replica.trouble = None
