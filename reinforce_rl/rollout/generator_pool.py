"""Rank 0's queue of prompts for the generators, and the rollouts that come back.

Micro-batches of prompts are given, in order, to whichever generator is free and has the version of
the weights that they must be drawn with: the number of steps that trained these weights. Step s
(from 1) uses version max(0, s - 1 - max_staleness), so the samples of a run depend neither on the
speed of the ranks nor on the number of generators.

Generators may join or leave mid-run. Requests of a lost generator are re-queued with the same
number, seed and weight version, so results do not depend on which generator fails. If no generator
still holds that version, the request runs on a newer one. Generators that are ranks of the
trainers' job (`generation_ranks`) register like all others, but the loss of one ends the run.

With rollout_order=finished a request has one prompt, which is drawn with the newest weights that
its generator has, and a step takes the results that are finished first.
"""

from __future__ import annotations

import contextlib
import reprlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import GenerationError
from reinforce_rl.rewards.base import STATUS_OK
from reinforce_rl.rollout.message_codec import BadMessageError, decode, encode
from reinforce_rl.rollout.messages import (
    HELLO,
    Abandoned,
    Dismissed,
    EndReceived,
    GenerationRequest,
    GenerationRequests,
    GenerationResult,
    GeneratorFailed,
    Message,
    NewWeights,
    Received,
    Register,
    RequestCredit,
    ResultBounds,
    RunEnded,
    fault_of_result,
)
from reinforce_rl.rollout.rendezvous import (
    RENDEZVOUS,
    RENDEZVOUS_FILE,
    RendezvousInfo,
    host_store,
)
from reinforce_rl.rollout.weight_group import ElasticWeightGroup
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.runtime.phases import wait_for_role
from reinforce_rl.runtime.roles import RANKS, RankRole
from reinforce_rl.runtime.settings import shared_settings
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.job_rank import JobRank

_POLL_SECONDS = 0.2
_MAX_JSON_BYTES = 64 << 20  # of a message; memory for its values is many times that
_END_SECONDS = 10.0  # for generators to read that the run has ended
_MAX_SOURCES = 2048  # in all results: the dashboard leaves out a run of more than 4096 metrics
_MAX_REQUESTED = 1 << 16  # requests that a generator can have asked for
_MAX_NOTES = 1000  # that wait to be printed
_MAX_RECEIVE_FAILURES = 3  # in a row, after which a generator is dismissed
_MAX_NAME_LENGTH = 200


@dataclass(eq=False)
class _Generator:
    """A registered generator: the ranks that share one copy of the model."""

    number: int
    size: int
    name: str
    ranks: set[int] = field(default_factory=set)
    is_ready: bool = False  # it has loaded the model
    version: int = -1  # of the newest weights that it has
    since: int = -1  # version of the first ones
    failures: int = 0  # to receive weights, since the last success
    lacks_scores: bool = False  # it got none for the last request that it answered
    under_way: dict[int, GenerationRequest] = field(default_factory=dict)

    @property
    def model_parallel_rank_0(self) -> int:
        return self.number * RANKS


class GeneratorPool:
    """Rank 0's connections to the generators, and the queue between them.

    Args:
        cfg: generators must have the same values of the keys that change a run's meaning.
        device: of the policy's weights.
        bounds: of the results that it accepts.
        note: called with a line for the run's log, on the thread that calls the methods.
        role: of this rank, if ranks of its job generate; the pool waits until they have registered.

    Raises:
        ConnectionError: a rank of the job that generates did not register.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        device: torch.device,
        bounds: ResultBounds,
        control: RunControl,
        note: Callable[[str], object],
        role: RankRole | None = None,
    ):
        self._role = role
        self._folder = Path(cfg.exp_manager.explicit_log_dir)
        self._settings = shared_settings(cfg)
        self._silence_seconds = cfg.trainer.heartbeat_timeout_seconds
        self._wait_seconds = cfg.generator_timeout_seconds
        self._staleness = cfg.staleness
        self._phases = control.phases
        self._status = control.status
        self._stop = control.stop
        self._note = note
        self._begin_empty(bounds)
        timeout = timedelta(seconds=self._silence_seconds) if role is None else role.timeout
        host = cfg.generator_host or JobRank.of_process().host_of_first
        self._links, invitation = Links.listen(host)
        store, port = host_store(invitation.host, timeout)
        self.group = ElasticWeightGroup(store, invitation.host, device, timeout)
        self._thread = LinkThread(
            self._links,
            self._silence_seconds,
            self._on_message,
            self._on_lost,
            is_open=True,
        )
        self._info = RendezvousInfo(invitation, port)
        if role is None:
            self._info.write(self._folder)
        else:
            self._await_ranks_of_job(role)

    def _begin_empty(self, bounds: ResultBounds) -> None:
        self._bounds = bounds
        self._source_names = set(bounds.sources or ())  # in all results so far
        self._changed = threading.Condition()
        self._generators: dict[int, _Generator] = {}
        self._idle: deque[int] = deque()  # numbers of generators that have asked for requests
        self._waiting: deque[GenerationRequest] = deque()
        self._given: dict[int, GenerationRequest] = {}  # and not forgotten
        self._given_again = set[int]()  # as their rollouts were too old
        self._results: dict[int, GenerationResult] = {}
        # Since the last `take`: requests that were given again before.
        self._again: set[int] | None = None
        self._dropped = 0  # since then
        self._failure: Exception | None = None  # that ends the run
        self._informed_of_end = set[int]()  # ranks that have read that the run has ended
        self._newest = 0  # version of the weights that generators are to have
        # The last transfer of weights, its ranks and what they say of it.
        self._sent: tuple[NewWeights, tuple[int, ...]] | None = None
        self._members: tuple[int, ...] = ()  # ranks of the weight group
        self._answers: dict[int, Received] = {}
        self._epoch = 0
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._dismissed = set[int]()  # ranks
        self._unscored = set[int]()  # requests for which a generator got no scores
        self._lost_versions = set[int]()  # that no generator has any more, and that were noted
        self._last_loss = ""
        self._alone_since: float | None = None  # while the trainers wait and there is no generator

    def _await_ranks_of_job(self, role: RankRole) -> None:
        """Share how to connect with the ranks of the job that generate, and wait for them."""
        role.share(RENDEZVOUS, self._info.to_json())
        deadline = time.monotonic() + role.timeout.total_seconds()
        with self._changed:
            while missing := self._ranks_of_job() - self._ranks():
                if self._failure is not None or time.monotonic() > deadline:
                    break
                wait_for_role(self._changed, _POLL_SECONDS)
        if missing:
            self.close()
            self._check()
            numbers = sorted(map(role.job_rank, missing))
            raise ConnectionError(
                f"the ranks {numbers}, which generate, did not connect within "
                f"{role.timeout.total_seconds():.0f} s"
            )

    def _ranks_of_job(self) -> set[int]:
        """Return the ranks, as links name them, of the job's generators."""
        return set() if self._role is None else set(self._role.link_ranks)

    def close(self) -> None:
        """End the generators."""
        (self._folder / RENDEZVOUS_FILE).unlink(missing_ok=True)
        self._thread.stopping.set()
        self._links.send_all(*encode(RunEnded()))
        self._await_end(time.monotonic() + _END_SECONDS)
        self._thread.close()
        self.group.close()

    def _await_end(self, deadline: float) -> None:
        """Wait until all generators that are there have read that the run has ended.

        A connection that closes takes with it what its peer has not read, and the generator would
        call this run lost.
        """
        with self._changed:
            while time.monotonic() < deadline:
                peers = list(self._links.peers.values())
                if all(peer.closed or peer.rank in self._informed_of_end for peer in peers):
                    return
                wait_for_role(self._changed, _POLL_SECONDS)

    # The queue

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        with self._changed:
            self._waiting.extend(requests)
            self._assign()

    def await_results(
        self, numbers: Sequence[int], stop: StopRequest | None = None, anybody: bool = False
    ) -> bool:
        """Wait for results, and for `anybody` who has the newest weights; see `_await`."""

        def are_there() -> bool:
            return all(number in self._results for number in numbers) and (
                self._has_newest() or not anybody
            )

        return self._await(are_there, stop)

    def await_first(
        self, shares: Sequence[tuple[Sequence[int], int]], oldest: int, stop: StopRequest
    ) -> bool:
        """Wait for what `take` returns; see `_await`."""
        return self._await(lambda: self._to_take(shares, oldest) is not None, stop)

    def _await(self, is_there: Callable[[], bool], stop: StopRequest | None) -> bool:
        """Return True once a generator lacks weights, False at the end or with a stop.

        Without a generator a stopped run does not wait.

        Raises:
            GenerationError: no generator has come in time, or one of the job cannot continue.
            ConnectionError: a rank of the job is lost.
        """
        with self._waiting_phase(), self._changed:
            while not is_there():
                self._print_notes()
                is_alone = not any(generator.is_ready for generator in self._generators.values())
                self._look_for_anybody(is_alone)
                if self._lacking():
                    return True
                if (stop is not None and stop.reason) or (is_alone and self._stop.reason):
                    return False
                self._check()
                wait_for_role(self._changed, _POLL_SECONDS)
            self._print_notes()
            self._look_for_anybody(False)
            return False

    def _waiting_phase(self) -> contextlib.AbstractContextManager[None]:
        # Ranks of the job are watched one by one, so that a hang is found where it is; the wait for
        # other generators has a deadline of its own.
        if self._role is not None:
            return contextlib.nullcontext()
        return self._phases.having_deadline()

    def results(self, numbers: Sequence[int]) -> list[GenerationResult] | None:
        """Return results after `await_results`; None if a stop came before them."""
        with self._changed:
            if all(number in self._results for number in numbers):
                return [self._results[number] for number in numbers]
            self._check()
            return None

    def take(
        self, shares: Sequence[tuple[Sequence[int], int]], oldest: int
    ) -> tuple[list[GenerationResult], int] | None:
        """Return the requests of each share, (numbers, count), that are finished first.

        A result with a token of weights older than version `oldest` is dropped, and its prompt is
        queued again ahead of the others. The next call waits for these prompts, because shorter
        responses would otherwise be taken first each time. A prompt is taken once a call.

        Returns:
            The results, and how many were dropped; None if a stop came before them.
        """
        with self._changed:
            results = self._to_take(shares, oldest)
            if results is None:
                self._check()
                return None
            dropped = self._dropped
            self._dropped = 0
            self._again = None
            return results, dropped

    def _to_take(
        self, shares: Sequence[tuple[Sequence[int], int]], oldest: int
    ) -> list[GenerationResult] | None:
        """Return what `take` does, once it is there."""
        self._again = set(self._given_again) if self._again is None else self._again
        self._give_again(oldest)
        results = list[GenerationResult]()
        prompts = set[tuple[int, ...]]()
        for numbers, count in shares:
            first = self._first(numbers, count, self._again, prompts)
            if first is None:
                return None
            results += first
            prompts |= {result.prompt_ids for result in first}
        return results

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
    ) -> list[GenerationResult] | None:
        """Return the results to take, those given `again` among them, but no others of `prompts`.

        Where a share has no more to come, a prompt of two epochs is taken twice rather than left at
        the run's end. None: they are not there yet.
        """
        share = set(numbers)
        count = min(count, len(numbers))
        missing = share - self._results.keys()
        there = share & again - missing
        if missing & again and len(there) < count:
            return None
        order = sorted(there) + [number for number in self._results if number in share - again]
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

    def readmit(self, request: GenerationRequest, result: GenerationResult) -> None:
        """Take a result from a checkpoint as the answer to this request."""
        with self._changed:
            self._given[request.number] = request
            self._results[request.number] = result

    def finished(self) -> list[GenerationResult]:
        """Return the results to take that are there, without failures."""
        with self._changed:
            sound = [result for result in self._results.values() if is_sound(result)]
            # not a validation's
            return [result for result in sound if self._given[result.number].allow_newer]

    # Weights

    def group_for(self, version: int) -> ElasticWeightGroup | None:
        """Return the group through which these weights are sent next.

        None once no generator lacks them. Generators that are lost meanwhile are left out; the
        others get the weights again. Generators of the job are waited for until each has loaded its
        model. Raises as `_await`.
        """
        self._newest = version
        self._await_models()
        while True:
            self._settle()
            with self._changed:
                self._assign()
                self._print_notes()
                self._check()
                ranks = tuple(self._lacking())
                if not ranks:
                    return None
                is_new = bool(ranks != self._members or self.group.fault)
                self._offer(version, ranks, is_new=is_new)
            if not is_new or self._forms_group(ranks):
                return self.group

    def _await_models(self) -> None:
        with self._changed:
            while any(
                self._is_of_job(generator) and not generator.is_ready
                for generator in self._generators.values()
            ):
                self._check()
                wait_for_role(self._changed, _POLL_SECONDS)

    def _offer(self, version: int, ranks: tuple[int, ...], *, is_new: bool) -> None:
        """Ask these ranks to receive weights, in a new epoch of the group if `is_new`."""
        self._epoch += is_new
        self._members = ranks
        self._answers = {}
        for place, rank in enumerate(ranks, 1):
            offer = NewWeights(self._epoch, version, place, 1 + len(ranks))
            self._links.send(rank, *encode(offer))
            self._sent = (offer, ranks)

    def _forms_group(self, ranks: tuple[int, ...]) -> bool:
        """Return False if a rank did not come into the group."""
        try:
            self.group.form(self._epoch, 0, 1 + len(ranks), partial(self._are_there, set(ranks)))
        except RuntimeError as error:
            self.group.abandon(self.group.epoch, str(error))
            return False
        return True

    def _settle(self) -> None:
        """Wait until the ranks of the last transfer report its outcome; drop the silent ones."""
        if self._sent is None:
            return
        offer, ranks = self._sent
        self._sent = None
        deadline = time.monotonic() + self._silence_seconds
        if self.group.fault:
            self.group.close()  # so that the others' transfers end, too
        with self._changed:
            while set(ranks) & self._ranks() - self._answers.keys() and time.monotonic() < deadline:
                wait_for_role(self._changed, _POLL_SECONDS)
            for generator in list(self._generators.values()):
                if generator.ranks & set(ranks):
                    self._take_answers(generator, offer.version)
            if self.group.fault or any(answer.fault for answer in self._answers.values()):
                self._members = ()

    def _take_answers(self, generator: _Generator, version: int) -> None:
        """Record whether a generator has received the weights of the last transfer."""
        answers = [self._answers.get(rank) for rank in generator.ranks]
        faults = [answer.fault for answer in answers if answer is not None and answer.fault]
        if None in answers:
            why = f"did not report new weights for {self._silence_seconds:.0f} s"
            self._drop(generator, why, dismiss=True)
        elif not faults:
            generator.version = version
            generator.failures = 0
            if generator.since < 0:
                generator.since = version
        elif generator.failures + 1 == _MAX_RECEIVE_FAILURES:
            times = f"could not receive weights {_MAX_RECEIVE_FAILURES} times"
            self._drop(generator, f"{times}: {quoted(faults[0])}", dismiss=True)
        else:
            generator.failures += 1

    def _has_newest(self) -> bool:
        return any(generator.version == self._newest for generator in self._generators.values())

    def _are_there(self, ranks: set[int]) -> bool:
        with self._changed:
            return ranks <= self._ranks()

    def _ranks(self) -> set[int]:
        return {rank for generator in self._generators.values() for rank in generator.ranks}

    def _lacking(self) -> list[int]:
        """Return the ranks that have to get the newest weights."""
        lacking = (
            generator.ranks
            for generator in self._generators.values()
            if generator.is_ready and generator.version < self._newest
        )
        return sorted(chain.from_iterable(lacking))

    # Generators that register, answer and leave

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: Exception) -> None:
        """End the run by an error, at the next call that waits; the first one counts."""
        self._failure = self._failure or error

    def _is_of_job(self, generator: _Generator) -> bool:
        return generator.model_parallel_rank_0 in self._ranks_of_job()

    def _look_for_anybody(self, is_alone: bool) -> None:
        if self._role is not None:  # the loss of a generator of the job ends the run by itself
            return
        if is_alone == (self._alone_since is None):
            self._alone_since = time.monotonic() if is_alone else None
            text = ""
            if is_alone:
                text = (
                    "Waiting for a generator to register (`reinforce-rl generate`), up to "
                    f"{self._wait_seconds:.0f} s"
                )
            self._status.waiting(text)
            self._note(text or "A generator is available")
        elif (
            self._alone_since is not None
            and time.monotonic() - self._alone_since > self._wait_seconds
        ):
            last = f"; the last one: {self._last_loss}" if self._last_loss else ""
            self._fail(
                GenerationError(
                    f"no generator was registered for {self._wait_seconds:.0f} s "
                    f"(generator_timeout_seconds){last}. Restart the trainers, and start "
                    "`reinforce-rl generate` with the same keys",
                    key="generators.generator.missing",
                )
            )

    def _print_notes(self) -> None:
        while self._notes:
            self._note(self._notes.popleft())

    def _assign(self) -> None:
        """Send the first request of the queue to a free generator that has its weights."""
        able = [
            generator
            for generator in self._generators.values()
            if generator.is_ready and generator.version >= 0
        ]
        left: deque[GenerationRequest] = deque()
        for request in self._waiting:
            request = self._with_version_of(able, request)
            free = (
                number
                for number in dict.fromkeys(self._idle)  # each once
                if self._can_do(self._generators[number], request)
            )
            chosen = min(free, key=lambda n: len(self._generators[n].under_way), default=None)
            if chosen is None:
                left.append(request)
                continue
            self._idle.remove(chosen)
            self._given[request.number] = request
            self._generators[chosen].under_way[request.number] = request
            self._links.send(
                self._generators[chosen].model_parallel_rank_0,
                *encode(GenerationRequests((request,))),
            )
        self._waiting = left

    def _with_version_of(
        self, able: Sequence[_Generator], request: GenerationRequest
    ) -> GenerationRequest:
        """Return a request with weights that a generator still has: its own, or the oldest."""
        oldest = min((self._oldest_of(generator) for generator in able), default=0)
        if not able or request.allow_newer or request.version >= oldest:
            return request
        if request.version not in self._lost_versions:
            self._lost_versions.add(request.version)
            self._notes.append(
                f"No generator has the weights after step {request.version} any longer: prompts of "
                f"step {request.step} use the weights after step {oldest}"
            )
        return replace(request, version=oldest)

    def _oldest_of(self, generator: _Generator) -> int:
        """Return the oldest version that a generator still has."""
        return max(generator.since, generator.version - self._staleness)

    def _can_do(self, generator: _Generator, request: GenerationRequest) -> bool:
        has_older = request.allow_newer or self._oldest_of(generator) <= request.version
        return has_older and request.version <= generator.version

    def _drop(self, generator: _Generator, why: str, *, dismiss: bool = False) -> None:
        """Forget a generator and re-queue its requests. If it is of the job, that ends the run."""
        self._generators.pop(generator.number, None)
        self._idle = deque(number for number in self._idle if number != generator.number)
        if generator.ranks & set(self._members):
            self.group.abandon(self._epoch, f"{generator.name} was lost")
        for rank in set(self._members) - generator.ranks:
            self._links.send(rank, *encode(Abandoned(self._epoch, f"{generator.name} was lost")))
        unanswered = [*self._waiting, *generator.under_way.values()]
        self._waiting = deque(sorted(unanswered, key=lambda request: request.number))
        if self._role is not None and self._is_of_job(generator):
            rank = self._role.job_rank(generator.model_parallel_rank_0)
            self._fail(ConnectionError(f"rank {rank}, which generates, {why}"))
        else:
            self._last_loss = f"{generator.name} {why}"
            count = len(generator.under_way)
            again = f"; {count} of its micro-batches go to others" if count else ""
            self._notes.append(f"Generator {self._last_loss}{again}")
            for rank in generator.ranks if dismiss else ():
                self._dismiss(rank, why)
        self._assign()
        self._changed.notify_all()

    def _dismiss(self, rank: int, why: str) -> None:
        """Send a rank away, once, whatever else it sends; a rank of the job waits for the end."""
        if rank not in self._dismissed and rank not in self._ranks_of_job():
            self._dismissed.add(rank)
            self._links.send(rank, *encode(Dismissed(why)))

    def _on_message(self, rank: int, parts: list[memoryview]) -> None:
        if bytes(parts[0]) == HELLO:
            return
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
        if self._role is not None and rank in self._ranks_of_job():
            sender = f"rank {self._role.job_rank(rank)}, which generates,"
            error = GenerationError(f"{sender} {why}", key="generators.generator.invalid_message")
            self._fail(error)
            return
        generator = self._generators.get(rank // RANKS)
        if generator is not None:
            self._drop(generator, why, dismiss=True)
        elif rank not in self._dismissed:
            self._notes.append(f"A program that is not a generator of this run {why}")
            self._dismiss(rank, why)

    def _take_message(self, rank: int, message: Message) -> None:
        generator = self._generators.get(rank // RANKS)
        if isinstance(message, Register):
            self._register(rank, message)
        elif isinstance(message, EndReceived):
            self._informed_of_end.add(rank)
        elif generator is None:
            self._dismiss(rank, "the trainers have taken it for lost")
        elif isinstance(message, RequestCredit):
            self._take_credit(generator, message.count)
        elif isinstance(message, Received):
            if message.epoch == self._epoch:
                self._answers[rank] = message
        elif isinstance(message, GenerationResult):
            self._take_result(generator, message)
        elif isinstance(message, GeneratorFailed):
            if self._is_of_job(generator):
                self._fail(message.failure)
            else:
                self._drop(generator, f"cannot continue: {quoted(message.failure)}")
        else:
            raise BadMessageError(f"{type(message).__name__} is of the trainers")

    def _take_credit(self, generator: _Generator, count: int) -> None:
        if abs(count) > _MAX_REQUESTED - self._idle.count(generator.number):
            raise BadMessageError(
                f"it asks for {count} requests, expected at most {_MAX_REQUESTED} in all"
            )
        generator.is_ready = generator.is_ready or len(generator.ranks) == generator.size
        self._idle.extend([generator.number] * count)
        for _ in range(min(-count, self._idle.count(generator.number))):
            self._idle.remove(generator.number)
        self._assign()

    def _take_result(self, generator: _Generator, result: GenerationResult) -> None:
        request = generator.under_way.get(result.number)
        if request is None:
            raise BadMessageError(
                f"it answers request {result.number}, which it was not given or has answered"
            )
        result = self._checked(request, result)
        generator.lacks_scores = result.failure is not None
        if result.failure is not None and self._may_be_scored_by_another(generator, request):
            self._unscored.add(request.number)
            self._drop(generator, f"gave no scores: {quoted(result.failure)}", dismiss=True)
            return
        del generator.under_way[result.number]
        if request.number in self._given:  # else nobody waits for it any more
            self._results[result.number] = result

    def _may_be_scored_by_another(self, generator: _Generator, request: GenerationRequest) -> bool:
        """Return False where the reward server itself has failed, which ends the run."""
        if self._is_of_job(generator) or request.number in self._unscored:
            return False
        return any(other.is_ready and not other.lacks_scores for other in self._generators.values())

    def _checked(self, request: GenerationRequest, result: GenerationResult) -> GenerationResult:
        """Return a result, without scores of more sources than a run can have.

        Only a reward server knows the names of its attributes, so those of a wrong generator must
        not have the others sent away. Raises BadMessageError: it cannot be the answer.
        """
        fault = fault_of_result(request, result, newest=self._newest, bounds=self._bounds)
        if fault:
            raise BadMessageError(fault)
        if result.rewards is None:
            return result
        kept = {}
        for name, values in result.rewards.by_source.items():
            if len(self._source_names) < _MAX_SOURCES:
                self._source_names.add(name)
            if name in self._source_names:
                kept[name] = values
        return replace(result, rewards=replace(result.rewards, by_source=kept))

    def _register(self, rank: int, registration: Register) -> None:
        if rank in self._dismissed:
            return
        number = rank // RANKS
        name = quoted(registration.name, _MAX_NAME_LENGTH)
        if not rank % RANKS < registration.size <= RANKS:
            raise BadMessageError(
                f"rank {rank % RANKS} of {registration.size} ranks has registered, expected up to "
                f"{RANKS}"
            )
        if difference := self._difference(registration):
            if rank in self._ranks_of_job():
                raise BadMessageError(difference)
            self._notes.append(f"Generator {name} was refused: {difference}")
            self._dismiss(rank, f"{difference}: give it the trainers' keys")
            return
        generator = self._generators.setdefault(number, _Generator(number, registration.size, name))
        if rank in generator.ranks or registration.size != generator.size:
            raise BadMessageError(
                f"rank {rank % RANKS} has registered twice, or with another number of ranks"
            )
        generator.ranks.add(rank)
        if len(generator.ranks) == generator.size and not self._is_of_job(generator):
            self._notes.append(f"Generator {generator.name} has registered")

    def _difference(self, registration: Register) -> str:
        """Say which setting of a generator is not the trainers'; empty if all are."""
        keys = self._settings.keys() | registration.settings.keys()
        wrong = sorted(
            key for key in keys if self._settings.get(key) != registration.settings.get(key)
        )
        if not wrong:
            return ""
        key = quoted(wrong[0], _MAX_NAME_LENGTH)
        # Another program may have nested it deeper than `repr` can show.
        given = quoted(reprlib.repr(registration.settings.get(wrong[0])))
        return f"{key} is {given}, the trainers' {self._settings.get(wrong[0])!r}"

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            if (generator := self._generators.get(rank // RANKS)) is not None:
                self._drop(generator, reason, dismiss=True)


def is_sound(result: GenerationResult) -> bool:
    """Return False after a failure, of scores too, which a run that goes on may be spared."""
    return result.failure is None and (
        result.rewards is None or bool((result.rewards.status == STATUS_OK).all())
    )


def _age(result: GenerationResult, unknown: int) -> int:
    """Return the version of the oldest weights that drew a token."""
    versions = result.completions.weight_versions
    return unknown if versions is None or not versions.numel() else int(versions.min())
