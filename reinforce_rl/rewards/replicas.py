"""Replicas of one reward model: probes in the background, least-outstanding routing and backoff."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reinforce_rl.errors import Fault, RewardServerError
from reinforce_rl.rewards import transport, wire
from reinforce_rl.rewards.transport import Call, FailedAttempt, ModelAddress
from reinforce_rl.rewards.wire import ServerInfo

logger = logging.getLogger(__name__)

REPORT_CHECK_SECONDS = 1.0  # how often a waiter checks whether a report is due
QUIET_REPORTS = 6  # of a call that nothing is wrong with

T = TypeVar("T")


@dataclass
class _Replica:
    model: ModelAddress
    pause: float  # next pause in seconds, before jitter
    turn: int  # when it last got a request; breaks ties
    info: ServerInfo | None = None  # once it was up
    up: bool = False  # may be asked for scores
    probes: int = 0  # how often it was found up
    outstanding: int = 0  # samples
    trouble: str | None = None  # last problem; once it was up, None only after scores
    fatal: RewardServerError | None = None  # why it cannot be used at all, as of the last probe


class Replicas:
    """Probes each server in the background until it is up, and routes requests to those that are.

    A request goes to the server with the fewest outstanding samples. One that fails is set aside for a growing pause
    and probed again; its description must equal its former one and those of the others.

    Coroutines and state changes belong to one event loop; the arguments are those of `RemoteGPTRMClient`.
    """

    def __init__(
        self,
        models: Sequence[ModelAddress],
        first_backoff_seconds: float,
        max_backoff_seconds: float,
        on_wait: Callable[[str], None] | None,
        wait_report_seconds: float,
    ):
        self._first_pause = first_backoff_seconds
        self._max_pause = max_backoff_seconds
        self._on_wait = on_wait
        self._report_seconds = wait_report_seconds
        # its own, so that jitter does not touch the trainer's random state
        self._random = random.Random()
        # Random first turns, so that the first requests of all ranks do not go to the same server.
        turns = self._random.sample(range(-len(models), 0), len(models))
        ordered = zip(models, turns, strict=True)
        self._replicas = [_Replica(model, first_backoff_seconds, turn) for model, turn in ordered]
        self._turns = itertools.count()
        self._described: tuple[ServerInfo, ModelAddress] | None = None
        self._difference: Fault | None = None  # two servers of different models: nothing can go on
        # done at the next change, and then replaced
        self._changed: asyncio.Future[None] | None = None
        self._probing: set[asyncio.Task[None]] = set()
        self._next_report = 0.0
        self._report_lock = threading.Lock()
        self._several = len(models) > 1
        self._kind = "reward servers" if self._several else "reward server"
        self._places = ", ".join(str(model.place) for model in models)
        self.title = f"{self._kind} {self._places}"  # for messages

    def troubles(self) -> list[str]:
        """Return what is wrong with each failing server, prefixed by its address if there are several."""
        found = [
            (replica.model.place, replica.trouble)
            for replica in self._replicas
            if replica.trouble is not None
        ]
        return [f"{place} {trouble}" if self._several else trouble for place, trouble in found]

    def report(self, call: Call, *, without_trouble: bool = False) -> None:
        """Report what is wrong, or after a while also that nothing is, at most every `wait_report_seconds`."""
        troubles = self.troubles()
        if not troubles and (
            not without_trouble or call.elapsed < QUIET_REPORTS * self._report_seconds
        ):
            return
        text = "; ".join(troubles)
        if len(troubles) == len(self._replicas):
            text += "; retrying"
        else:
            samples = sum(replica.outstanding for replica in self._replicas)
            now = f"{'are' if self._several else 'is'} scoring {samples} samples"
            silent = f"{'have' if self._several else 'has'} not answered yet; waiting"
            text += f"{'; the rest ' if troubles else ''}{now if samples else silent}"
        logger.debug("event=reward_retry id=%s %s", call.id, text)
        with self._report_lock:
            if time.monotonic() < self._next_report:
                return
            self._next_report = time.monotonic() + self._report_seconds
        title = "reward servers:" if self._several and troubles else self.title
        sentence = f"{title} {text}, {call.elapsed:.0f} s of {call.seconds:.0f} s"
        if self._on_wait is not None:
            self._on_wait(sentence)
        is_warning = troubles and self._on_wait is None  # else it would be shown twice
        logger.log(
            logging.WARNING if is_warning else logging.INFO, "%s (request %s)", sentence, call.id
        )

    def past_deadline(self, call: Call) -> RewardServerError:
        """Return the error for a call whose deadline passed, with what to check."""
        model = self._replicas[0].model
        last = "; ".join(self.troubles()) or "it has not answered"
        return RewardServerError(
            f"no answer of the {self._kind} at {self._places} (model '{model.name}') within {call.seconds:.0f} s; the "
            f"last error: {last}. Check that it runs (curl http://{model.place}/v2/health/ready), that its log shows "
            "no error, and that this machine can reach that host and port; the request's id there and here is "
            f"{call.id}. Start it again on the same port and continue the run.",
            key="reward_server.server.no_answer",
        )

    async def describe(
        self, call: Call, *, all_probed: bool = False
    ) -> tuple[ServerInfo, ModelAddress]:
        """Wait until one server is up; return its description and address.

        `all_probed` probes every server first, and raises if any cannot be used at all. Raises RewardServerError if
        the deadline passed, no server can be used, or two serve different models.
        """

        def inspect() -> tuple[ServerInfo, ModelAddress] | None:
            if not all_probed:
                return self._described
            for replica in self._replicas:
                if replica.fatal is not None:
                    raise RewardServerError(str(replica.fatal), key=replica.fatal.key)
            probed = all(
                replica.info is not None or replica.trouble is not None
                for replica in self._replicas
            )
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
        replica.turn, probes = next(self._turns), replica.probes
        replica.outstanding += samples
        try:
            yield replica.model
            if replica.trouble is not None and self._several:
                logger.info("event=reward_server_back place=%s", replica.model.place)
            replica.trouble = None
            replica.pause = self._first_pause
        except FailedAttempt as failure:
            if replica.up and replica.probes == probes:  # else another request has reported it
                if replica.trouble is None and self._several:
                    logger.warning(
                        "event=reward_server_set_aside place=%s reason=%s",
                        replica.model.place,
                        failure,
                    )
                replica.up, replica.trouble, replica.fatal = False, str(failure), failure.fatal
                self._wake()
                self._probe_in_background(replica, self._next_pause(replica, failure.retry_after))
            raise
        finally:
            replica.outstanding -= samples

    async def close(self) -> None:
        """Cancel the background probes."""
        for task in self._probing:
            task.cancel()

    async def _wait(self, inspect: Callable[[], T | None], call: Call) -> T:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
            for replica in self._replicas:
                self._probe_in_background(replica, 0.0)
        while True:
            if self._difference is not None:
                raise RewardServerError(self._difference, key=self._difference.key)
            found = inspect()
            if found is not None:
                return found
            fatal = [replica.fatal for replica in self._replicas if replica.fatal is not None]
            if len(fatal) == len(self._replicas):
                raise RewardServerError(str(fatal[0]), key=fatal[0].key)
            if call.remaining <= 0:
                raise self.past_deadline(call)
            self.report(call)
            # Not wait_for, which before Python 3.12 drops a cancellation that comes with the
            # change.
            await asyncio.wait(
                {self._changed}, timeout=max(0.0, min(call.remaining, REPORT_CHECK_SECONDS))
            )

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
            # Never sooner than asked, and spread out: all of the server's clients got the same
            # answer.
            return retry_after * self._random.uniform(1.0, 1.5)
        return pause

    async def _probe(self, replica: _Replica, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            retry_after = None
            fatal = None
            try:
                self._accept(
                    replica, await transport.ask_description(replica.model, transport.PROBE_SECONDS)
                )
                return
            except FailedAttempt as error:
                trouble = str(error)
                retry_after = error.retry_after
            except Exception as error:  # a bug too: it must not end the task unnoticed
                if isinstance(error, RewardServerError):
                    fatal = error
                else:
                    fatal = RewardServerError(
                        repr(error), key="reward_server.client.unexpected_error"
                    )
                trouble = f"cannot be used: {fatal}"
            if replica.trouble != trouble and replica.info is None and self._several:
                logger.warning(
                    "event=reward_server_away place=%s reason=%s", replica.model.place, trouble
                )
            replica.trouble = trouble
            replica.fatal = fatal
            self._wake()
            pause = self._next_pause(replica, retry_after)

    def _accept(self, replica: _Replica, info: ServerInfo) -> None:
        """Mark a server as up if its description is the expected one."""
        self._described = self._described or (info, replica.model)
        known, by = self._described
        replica.fatal = None
        if replica.info is not None and (
            differences := replica.info.differences(info, "before", "now")
        ):
            self._difference = Fault(
                f"the reward server at {replica.model.place} was replaced by another one during the run "
                f"({'; '.join(differences)}). Start the one from before, or start the run again.",
                key="reward_server.server.replaced",
            )
        elif differences := known.differences(info, f"at {by.place}", f"at {replica.model.place}"):
            self._difference = wire.unlike(by.place, replica.model.place, differences)
        else:
            if replica.info is None:
                replica.trouble = None
            replica.info, replica.up, replica.probes = info, True, replica.probes + 1
        self._wake()
