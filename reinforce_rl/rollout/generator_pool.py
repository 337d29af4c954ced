"""Rank 0's queue of prompts for generators on ranks of their own, and the rollouts that come back.

Micro-batches of prompts are given, in order, to whichever generator is free, with the version of the weights that each
must be drawn with: the number of steps that they have been trained for. Step s (from 1) uses version
max(0, s - 1 - max_staleness), so a run's samples depend neither on how fast ranks are nor on how many generate.

With rollout_order=finished a work is one prompt, drawn with the newest weights that its generator has, and a step
takes the works that are finished first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from reinforce_rl.errors import GenerationError, ReinforceError
from reinforce_rl.rewards.base import STATUS_OK
from reinforce_rl.rollout.message_codec import BadMessageError, decode, encode
from reinforce_rl.rollout.messages import (
    EndReceived,
    GeneratorFailed,
    Message,
    Result,
    ResultBounds,
    RunEnded,
    WeightsAnnounced,
    Work,
    WorkRequest,
    Works,
    fault_of_result,
)
from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.runtime.phases import wait_for_role
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.job_rank import JobRank

INVITATION = "generators"  # where rank 0's `Invitation` is shared
_POLL_SECONDS = 0.2
_MAX_JSON_BYTES = 64 << 20  # of a message; memory for its values is many times that
_END_SECONDS = 10.0  # for generators to read that the run has ended
_MOST_SOURCES = 2048  # in all results: the dashboard leaves out a run of more than 4096 metrics


class GeneratorPool:
    """Rank 0's connections to the generators, and the queue between them.

    A generator of which nothing is heard for `silence_seconds` is lost. `device` is where the weights are,
    and `bounds` are those of the results that it accepts.

    Raises ConnectionError: a generator did not come.
    """

    def __init__(
        self, role: RankRole, device: torch.device, silence_seconds: float, bounds: ResultBounds
    ):
        self._begin_empty(bounds)
        self._room = dict.fromkeys(role.leaders, 0)  # works that each has asked for
        self._begun = set[int]()
        self._leaders = set(role.leaders)
        self._lost: str | None = None
        links, invitation = Links.listen(JobRank.of_process().host_of_first)
        role.share(INVITATION, invitation.to_json())
        self._links, seconds = links, role.timeout.total_seconds()
        if missing := sorted(set(role.generators) - links.accept(role.generators, seconds).keys()):
            links.close()
            raise ConnectionError(
                f"the ranks {missing}, which generate, did not come within {seconds:.0f} s"
            )
        self.group = role.weight_group(device)
        self._thread = LinkThread(links, silence_seconds, self._on_message, self._on_lost)

    def _begin_empty(self, bounds: ResultBounds) -> None:
        self._bounds = bounds
        self._source_names = set(bounds.sources or ())  # in all results so far
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._given: dict[int, Work] = {}  # and not forgotten
        self._given_again = set[int]()  # as their rollouts were too old
        self._results: dict[int, Result] = {}
        # while `take` waits: works that were given again before
        self._again: set[int] | None = None
        self._dropped = 0  # since then
        self._failure: ReinforceError | None = None  # of a generator that cannot go on
        self._informed_of_end = set[int]()  # ranks that have read that the run has ended
        self._newest = 0  # version of the weights that generators were sent

    def submit(self, work: Iterable[Work]) -> None:
        with self._changed:
            self._waiting.extend(work)
            self._assign()

    def wait(self, numbers: Sequence[int], stop: StopRequest | None = None) -> list[Result] | None:
        """Wait for these results and return them; None once a stop is asked for.

        Raises ConnectionError: a generator's rank is lost. ReinforceError: it cannot go on.
        """
        with self._changed:
            while not all(number in self._results for number in numbers):
                if stop is not None and stop.reason is not None:
                    return None
                self._check()
                wait_for_role(self._changed, _POLL_SECONDS)
            return [self._results[number] for number in numbers]

    def take(
        self, shares: Sequence[tuple[Sequence[int], int]], oldest: int, stop: StopRequest
    ) -> tuple[list[Result], int] | None:
        """Wait for the works of each share, (numbers, count), that are finished first; None once a stop is asked for.

        What has a token of weights older than version `oldest` is dropped, and its prompt answered again before the
        others; the next call waits for it, so that long responses get their turn. A prompt is taken once a call.

        Returns:
            The results, and how many were dropped.
        """
        with self._changed:
            while (found := self._to_take(shares, oldest)) is None:
                if stop.reason is not None:
                    return None
                self._check()
                wait_for_role(self._changed, _POLL_SECONDS)
            dropped = self._dropped
            self._dropped = 0
            self._again = None
            return found, dropped

    def _to_take(
        self, shares: Sequence[tuple[Sequence[int], int]], oldest: int
    ) -> list[Result] | None:
        """Return what `take` does, once it is there."""
        self._again = set(self._given_again) if self._again is None else self._again
        self._give_again(oldest)
        found = list[Result]()
        prompts = set[tuple[int, ...]]()
        for numbers, count in shares:
            own = self._first(numbers, count, self._again, prompts)
            if own is None:
                return None
            found += own
            prompts |= {result.prompt_ids for result in own}
        return found

    def _give_again(self, oldest: int) -> None:
        late = [number for number, result in self._results.items() if _age(result, oldest) < oldest]
        for number in late:
            del self._results[number]
            self._given_again.add(number)
        self._waiting.extendleft(self._given[number] for number in reversed(late))
        self._dropped += len(late)
        self._assign()

    def _first(
        self, numbers: Sequence[int], count: int, again: set[int], prompts: set[tuple[int, ...]]
    ) -> list[Result] | None:
        """Return the results to take, those given `again` among them, but no others of `prompts`; None: not yet.

        Where a share has no more to come, a prompt of two epochs is taken twice rather than left at the run's end.
        """
        own = set(numbers)
        count = min(count, len(numbers))
        missing = own - self._results.keys()
        there = own & again - missing
        if missing & again and len(there) < count:
            return None
        order = sorted(there) + [number for number in self._results if number in own - again]
        chosen = list[int]()
        known = set(prompts)
        for number in order:
            if self._results[number].prompt_ids not in known:
                known.add(self._results[number].prompt_ids)
                chosen.append(number)
        if len(chosen) < count and not missing:
            chosen += [number for number in order if number not in set(chosen)]
        return (
            [self._results[number] for number in sorted(chosen[:count])]
            if len(chosen) >= count
            else None
        )

    def forget(self, numbers: Iterable[int]) -> None:
        with self._changed:
            for number in numbers:
                self._results.pop(number, None)
                self._given.pop(number, None)
                self._given_again.discard(number)

    def readmit(self, work: Work, result: Result) -> None:
        """Take a result from a checkpoint as the answer to this work."""
        with self._changed:
            self._given[work.number], self._results[work.number] = work, result

    def finished(self) -> list[Result]:
        """Return the results to take that are there, without failures."""
        with self._changed:
            found = [result for result in self._results.values() if is_sound(result)]
            # not a validation's
            return [result for result in found if self._given[result.number].or_newer]

    def announce(self, version: int) -> None:
        """Have all generators' ranks receive weights, once each has loaded its model; raises as `wait`."""
        with self._changed:
            while self._begun < self._leaders:
                self._check()
                wait_for_role(self._changed, _POLL_SECONDS)
        self._newest = version
        self._links.send_all(*encode(WeightsAnnounced(version)))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._lost is not None:
            raise ConnectionError(self._lost)

    def close(self) -> None:
        """End the generators."""
        self._thread.stopping.set()
        self._links.send_all(*encode(RunEnded()))
        self._await_end(time.monotonic() + _END_SECONDS)
        self._thread.close()

    def _await_end(self, deadline: float) -> None:
        """Wait until all generators that are there have read that the run has ended.

        A connection that closes takes with it what its peer has not read, and the generator would call this run lost.
        """
        with self._changed:
            while time.monotonic() < deadline:
                peers = list(self._links.peers.values())
                if all(peer.closed or peer.rank in self._informed_of_end for peer in peers):
                    return
                wait_for_role(self._changed, _POLL_SECONDS)

    def _on_message(self, rank: int, parts: list[memoryview]) -> None:
        try:
            size = len(parts[0])
            if size > _MAX_JSON_BYTES:
                raise BadMessageError(f"{size} bytes of JSON, expected at most {_MAX_JSON_BYTES}")
            message = decode(parts)
            with self._changed:
                self._take_message(rank, message)
                self._changed.notify_all()
        except BadMessageError as error:
            with self._changed:
                self._refuse_message(rank, f"sent an invalid message: {quoted(error)}")
                self._changed.notify_all()

    def _refuse_message(self, rank: int, why: str) -> None:
        self._failure = GenerationError(
            f"rank {rank}, which generates, {why}", key="generators.generator.invalid_message"
        )

    def _take_message(self, rank: int, message: Message) -> None:
        if isinstance(message, WorkRequest):
            self._begun.add(rank)
            self._room[rank] = max(self._room[rank] + message.count, 0)
            self._assign()
        elif isinstance(message, Result):
            work = self._given.get(message.number)
            if work is None:  # nobody waits for it any more
                return
            self._results[message.number] = self._checked(work, message)
        elif isinstance(message, GeneratorFailed):
            self._failure = message.failure
        elif isinstance(message, EndReceived):
            self._informed_of_end.add(rank)
        else:
            raise BadMessageError(f"{type(message).__name__} is of the trainers")

    def _checked(self, work: Work, result: Result) -> Result:
        """Return a result, without scores of more sources than a run can have.

        Only a reward server knows the names of its attributes, so those of a wrong generator must
        not have the others sent away. Raises BadMessageError: it cannot be the answer to the work.
        """
        fault = fault_of_result(work, result, newest=self._newest, bounds=self._bounds)
        if fault:
            raise BadMessageError(fault)
        if result.rewards is None:
            return result
        kept = {}
        for name, values in result.rewards.by_source.items():
            if len(self._source_names) < _MOST_SOURCES:
                self._source_names.add(name)
            if name in self._source_names:
                kept[name] = values
        return replace(result, rewards=replace(result.rewards, by_source=kept))

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            self._lost = f"rank {rank}, which generates, {reason}"
            self._changed.notify_all()

    def _assign(self) -> None:
        given: dict[int, list[Work]] = {}
        while self._waiting and any(self._room.values()):
            rank = max(self._room, key=self._room.__getitem__)
            self._room[rank] -= 1
            work = self._waiting.popleft()
            self._given[work.number] = work
            given.setdefault(rank, []).append(work)
        for rank, works in given.items():
            self._links.send(rank, *encode(Works(tuple(works))))


def is_sound(result: Result) -> bool:
    """Return False after a failure, of scores too, which a run that goes on may be spared."""
    return result.failure is None and (
        result.rewards is None or bool((result.rewards.status == STATUS_OK).all())
    )


def _age(result: Result, unknown: int) -> int:
    """Return the version of the oldest weights that drew a token."""
    versions = None if result.completions is None else result.completions.weight_versions
    return unknown if versions is None or not versions.numel() else int(versions.min())
