"""The trainers' side of generators that are programs of their own, which come and go while a run goes on.

Work is given to a generator that has its version of the weights: one that came later has those since. What a lost
generator had under way goes back to its place in the queue, with its number, seed and version, so that the numbers of
a run do not depend on who is lost. Only where nobody has a version any more its work is done with a newer one.
"""

from __future__ import annotations

import contextlib
import reprlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Prompt
from reinforce_rl.errors import GenerationError, ReinforceError
from reinforce_rl.rollout.generator_pool import GeneratorPool
from reinforce_rl.rollout.message_codec import BadMessageError, encode
from reinforce_rl.rollout.messages import (
    HELLO,
    RANKS,
    Abandoned,
    Arrival,
    Dismissed,
    EndReceived,
    GeneratorFailed,
    Message,
    NewWeights,
    Received,
    Result,
    ResultBounds,
    Work,
    WorkRequest,
    Works,
)
from reinforce_rl.rollout.remote import Generators, Ticket
from reinforce_rl.rollout.rendezvous import INVITATION_FILE, OpenInvitation, host_store
from reinforce_rl.rollout.weight_group import ReformedGroup
from reinforce_rl.rollout.weights import send_weights
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.runtime.phases import wait_for_role
from reinforce_rl.runtime.settings import shared_settings
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.utils.control_characters import quoted
from reinforce_rl.utils.job_rank import JobRank

_POLL_SECONDS = 0.2
_MOST_WORKS = 1 << 16  # that a generator can have asked for
_MOST_NOTES = 1000  # that wait to be told
_MOST_FAILURES = 3  # to receive weights, after which a generator is sent away
_MOST_LETTERS = 200  # of a generator's name


@dataclass(eq=False)
class _Generator:
    """A generator that has come: the ranks that share one copy of the model."""

    number: int
    size: int
    name: str
    ranks: set[int] = field(default_factory=set)
    is_ready: bool = False  # it has loaded the model
    version: int = -1  # of the newest weights that it has
    since: int = -1  # version of the first ones
    failures: int = 0  # to receive weights, since the last success
    lacks_scores: bool = False  # it got none for the last work that it answered
    under_way: dict[int, Work] = field(default_factory=dict)

    @property
    def leader(self) -> int:
        return self.number * RANKS


class SeparatePool(GeneratorPool):
    """Rank 0's connections to the generators that are there, and the queue between them.

    Args:
        cfg: its keys that change a run's meaning must be the generators', too.
        bounds: those of the results that it accepts.
        note: told what happens, on the thread that calls the methods.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        device: torch.device,
        bounds: ResultBounds,
        control: RunControl,
        note: Callable[[str], object],
    ):
        self._begin_empty(bounds)
        self._idle: deque[int] = deque()  # numbers of generators that have asked for work
        self._folder = Path(cfg.exp_manager.explicit_log_dir)
        self._settings = shared_settings(cfg)
        self._silence_seconds = cfg.trainer.heartbeat_timeout_seconds
        self._wait_seconds = cfg.generator_timeout_seconds
        self._staleness = cfg.staleness
        self._phases = control.phases
        self._status = control.status
        self._stop = control.stop
        self._note = note
        self._generators: dict[int, _Generator] = {}
        self._newest = 0  # version that generators are to have
        # the last transfer and its ranks
        self._sent: tuple[NewWeights, tuple[int, ...]] | None = None
        self._members: tuple[int, ...] = ()  # of the group
        self._answers: dict[int, Received] = {}  # to the last transfer, by rank
        self._epoch = 0
        self._notes: deque[str] = deque(maxlen=_MOST_NOTES)
        self._dismissed: set[int] = set()  # ranks that were sent away
        self._unscored: set[int] = set()  # works for which a generator got no scores
        self._told: set[int] = set()  # versions that nobody has any more
        self._last_loss = ""
        self._alone_since: float | None = None  # while the trainers wait and there is no generator
        timeout = timedelta(seconds=self._silence_seconds)  # of a transfer of weights
        host = cfg.generator_host or JobRank.of_process().host_of_first
        self._links, invitation = Links.listen(host)
        store, port = host_store(invitation.host, timeout)
        self.group = ReformedGroup(store, invitation.host, device, timeout)
        self._thread = LinkThread(
            self._links,
            self._silence_seconds,
            self._on_message,
            self._on_lost,
            is_open=True,
        )
        OpenInvitation(invitation, port).write(self._folder)

    def close(self) -> None:
        (self._folder / INVITATION_FILE).unlink(missing_ok=True)
        super().close()
        self.group.close()

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
        """Return True where a generator lacks weights meanwhile, False at the end or with a stop.

        Without a generator a stopped run does not wait. Raises GenerationError: none has come in time.
        """
        with self._phases.having_deadline(), self._changed:
            while not is_there():
                self._tell()
                is_alone = not any(one.is_ready for one in self._generators.values())
                self._look_for_anybody(is_alone)
                if self._lacking():
                    return True
                if (stop is not None and stop.reason) or (is_alone and self._stop.reason):
                    return False
                self._check()
                wait_for_role(self._changed, _POLL_SECONDS)
            self._tell()
            self._look_for_anybody(False)
            return False

    def wait(self, numbers: Sequence[int], stop: StopRequest | None = None) -> list[Result] | None:
        """Return results after `await_results`; None if a stop came before them."""
        with self._changed:
            if all(number in self._results for number in numbers):
                return [self._results[number] for number in numbers]
            self._check()
            return None

    def group_for(self, version: int) -> ReformedGroup | None:
        """Return the group through which these weights are to be sent next; None once no generator lacks them.

        Generators that are lost meanwhile are left out, and those that are left get the weights again.
        """
        self._newest = version
        while True:
            self._settle()
            with self._changed:
                self._assign()
                self._tell()
                ranks = tuple(self._lacking())
                if not ranks:
                    return None
                is_new = ranks != self._members or self.group.fault
                self._epoch += bool(is_new)
                self._members = ranks
                self._answers = {}
                for place, rank in enumerate(ranks, 1):
                    offer = NewWeights(self._epoch, version, place, 1 + len(ranks))
                    self._links.send(rank, *encode(offer))
                    self._sent = offer, ranks
            if not is_new:
                return self.group
            try:
                self.group.form(
                    self._epoch, 0, 1 + len(ranks), partial(self._are_there, set(ranks))
                )
                return self.group
            except RuntimeError as error:
                self.group.abandon(self.group.epoch, str(error))

    def _settle(self) -> None:
        """Wait for what the ranks of the last transfer say of it; those that say nothing in time are sent away."""
        if self._sent is None:
            return
        (offer, ranks), self._sent = self._sent, None
        deadline = time.monotonic() + self._silence_seconds
        if self.group.fault:
            self.group.close()  # so that the others' transfers end, too
        with self._changed:
            while set(ranks) & self._ranks() - self._answers.keys() and time.monotonic() < deadline:
                wait_for_role(self._changed, _POLL_SECONDS)
            for one in [one for one in self._generators.values() if one.ranks & set(ranks)]:
                answers = [self._answers.get(rank) for rank in one.ranks]
                faults = [answer.fault for answer in answers if answer is not None and answer.fault]
                if None in answers:
                    self._drop(
                        one,
                        f"said nothing of new weights for {self._silence_seconds:.0f} s",
                        dismiss=True,
                    )
                elif not faults:
                    one.version = offer.version
                    one.failures = 0
                    one.since = offer.version if one.since < 0 else one.since
                elif one.failures + 1 == _MOST_FAILURES:
                    why = f"could not receive weights {_MOST_FAILURES} times: {quoted(faults[0])}"
                    self._drop(one, why, dismiss=True)
                else:
                    one.failures += 1
            if self.group.fault or any(answer.fault for answer in self._answers.values()):
                self._members = ()

    def _has_newest(self) -> bool:
        return any(one.version == self._newest for one in self._generators.values())

    def _are_there(self, ranks: set[int]) -> bool:
        with self._changed:
            return ranks <= self._ranks()

    def _ranks(self) -> set[int]:
        return {rank for one in self._generators.values() for rank in one.ranks}

    def _lacking(self) -> list[int]:
        """Return the ranks that have to get the newest weights."""
        lacking = (
            one.ranks
            for one in self._generators.values()
            if one.is_ready and one.version < self._newest
        )
        return sorted(chain.from_iterable(lacking))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _look_for_anybody(self, is_alone: bool) -> None:
        if is_alone == (self._alone_since is None):
            self._alone_since = time.monotonic() if is_alone else None
            text = f"Waiting for a generator, up to {self._wait_seconds:.0f} s" if is_alone else ""
            self._status.waiting(text)
            self._note(text or "The wait for a generator is over")
        elif (
            self._alone_since is not None
            and time.monotonic() - self._alone_since > self._wait_seconds
        ):
            last = f"; the last one: {self._last_loss}" if self._last_loss else ""
            self._failure = GenerationError(
                f"no generator was there for {self._wait_seconds:.0f} s (generator_timeout_seconds){last}. "
                "Start `reinforce-rl generate` with the trainers' keys, and the trainers again",
                key="generators.generator.missing",
            )

    def _tell(self) -> None:
        while self._notes:
            self._note(self._notes.popleft())

    def _assign(self) -> None:
        """Give the work that comes first to whoever has its weights."""
        able = [one for one in self._generators.values() if one.is_ready and one.version >= 0]
        left: deque[Work] = deque()
        for work in self._waiting:
            oldest = min((max(one.since, one.version - self._staleness) for one in able), default=0)
            if able and work.version < oldest and not work.or_newer:
                if work.version not in self._told:
                    self._told.add(work.version)
                    what = f"No generator has the weights after step {work.version} any more"
                    self._notes.append(
                        f"{what}: prompts of step {work.step} are answered with those after {oldest}"
                    )
                work = replace(work, version=oldest)
            idle = dict.fromkeys(self._idle)  # each once
            able_now = (n for n in idle if self._can_do(self._generators[n], work))
            chosen = min(able_now, key=lambda n: len(self._generators[n].under_way), default=None)
            if chosen is None:
                left.append(work)
                continue
            self._idle.remove(chosen)
            self._given[work.number] = self._generators[chosen].under_way[work.number] = work
            self._links.send(self._generators[chosen].leader, *encode(Works((work,))))
        self._waiting = left

    def _can_do(self, one: _Generator, work: Work) -> bool:
        has_older = work.or_newer or max(one.since, one.version - self._staleness) <= work.version
        return has_older and work.version <= one.version

    def _drop(self, one: _Generator, why: str, *, dismiss: bool = False) -> None:
        """Forget a generator, and put its work back to its place."""
        self._generators.pop(one.number, None)
        self._idle = deque(number for number in self._idle if number != one.number)
        if one.ranks & set(self._members):
            self.group.abandon(self._epoch, f"{one.name} was lost")
        for rank in set(self._members) - one.ranks:
            self._links.send(rank, *encode(Abandoned(self._epoch, f"{one.name} was lost")))
        self._waiting = deque(
            sorted([*self._waiting, *one.under_way.values()], key=lambda work: work.number)
        )
        self._last_loss = f"{one.name} {why}"
        again = f"; {len(one.under_way)} of its micro-batches go to others" if one.under_way else ""
        self._notes.append(f"Generator {self._last_loss}{again}")
        for rank in one.ranks if dismiss else ():
            self._dismiss(rank, why)
        self._assign()
        self._changed.notify_all()

    def _dismiss(self, rank: int, why: str) -> None:
        """Send a rank away, once, whatever else it sends."""
        if rank not in self._dismissed:
            self._dismissed.add(rank)
            self._links.send(rank, *encode(Dismissed(why)))

    def _on_message(self, rank: int, parts: list[memoryview]) -> None:
        if bytes(parts[0]) != HELLO:
            super()._on_message(rank, parts)

    def _refuse_message(self, rank: int, why: str) -> None:
        generator = self._generators.get(rank // RANKS)
        if generator is not None:
            self._drop(generator, why, dismiss=True)
        elif rank not in self._dismissed:
            self._notes.append(f"A program that is no generator of this run {why}")
            self._dismiss(rank, why)

    def _take_message(self, rank: int, message: Message) -> None:
        one = self._generators.get(rank // RANKS)
        if isinstance(message, Arrival):
            self._arrive(rank, message)
        elif isinstance(message, EndReceived):
            self._informed_of_end.add(rank)
        elif one is None:
            self._dismiss(rank, "the trainers have taken it for lost")
        elif isinstance(message, WorkRequest):
            if abs(message.count) > _MOST_WORKS - self._idle.count(one.number):
                raise BadMessageError(
                    f"it asks for {message.count} works, expected at most {_MOST_WORKS} in all"
                )
            one.is_ready = one.is_ready or len(one.ranks) == one.size
            self._idle.extend([one.number] * message.count)
            for _ in range(min(-message.count, self._idle.count(one.number))):
                self._idle.remove(one.number)
            self._assign()
        elif isinstance(message, Received):
            if message.epoch == self._epoch:
                self._answers[rank] = message
        elif isinstance(message, Result):
            self._take_result(one, message)
        elif isinstance(message, GeneratorFailed):
            self._drop(one, f"cannot go on: {quoted(message.failure)}")
        else:
            raise BadMessageError(f"{type(message).__name__} is of the trainers")

    def _take_result(self, one: _Generator, result: Result) -> None:
        work = one.under_way.get(result.number)
        if work is None:
            raise BadMessageError(
                f"it answers work {result.number}, which it was not given or has answered"
            )
        result = self._checked(work, result)
        if result.failure is not None and result.completions is None:
            self._drop(one, f"gave no responses: {quoted(result.failure)}", dismiss=True)
            return
        one.lacks_scores = result.failure is not None
        if result.failure is not None and self._may_be_scored_by_another(work):
            self._unscored.add(work.number)
            self._drop(one, f"gave no scores: {quoted(result.failure)}", dismiss=True)
            return
        del one.under_way[result.number]
        self._results[result.number] = result

    def _may_be_scored_by_another(self, work: Work) -> bool:
        """Return False where the reward server itself has failed, which ends the run."""
        if work.number in self._unscored:
            return False
        return any(other.is_ready and not other.lacks_scores for other in self._generators.values())

    def _arrive(self, rank: int, arrival: Arrival) -> None:
        if rank in self._dismissed:
            return
        number = rank // RANKS
        name = quoted(arrival.name, _MOST_LETTERS)
        if not rank % RANKS < arrival.size <= RANKS:
            raise BadMessageError(
                f"rank {rank % RANKS} of {arrival.size} ranks has come, expected up to {RANKS}"
            )
        keys = self._settings.keys() | arrival.settings.keys()
        wrong = sorted(key for key in keys if self._settings.get(key) != arrival.settings.get(key))
        if wrong:
            key = quoted(wrong[0], _MOST_LETTERS)
            # Another program may have nested it deeper than `repr` can show.
            given = quoted(reprlib.repr(arrival.settings.get(wrong[0])))
            difference = f"{key} is {given}, the trainers' {self._settings.get(wrong[0])!r}"
            self._notes.append(f"Generator {name} was refused: {difference}")
            self._dismiss(rank, f"{difference}: give it the trainers' keys")
            return
        one = self._generators.setdefault(number, _Generator(number, arrival.size, name))
        if rank in one.ranks or arrival.size != one.size:
            raise BadMessageError(
                f"rank {rank % RANKS} has come twice, or with another number of ranks"
            )
        one.ranks.add(rank)
        if len(one.ranks) == one.size:
            self._notes.append(f"Generator {one.name} has come")

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            if (one := self._generators.get(rank // RANKS)) is not None:
                self._drop(one, reason, dismiss=True)


class SeparateGenerators(Generators):
    """As `Generators`, and sends weights to generators that come while the trainers wait."""

    def collect(self, ticket: Ticket, prompts: Sequence[Prompt]) -> list[Result]:
        # A run that goes on has stored rollouts: later ones may need the weights that this step
        # trains away.
        self._await([ticket], self._stop, anybody=ticket.stored is not None)
        return super().collect(ticket, prompts)

    def collect_first(
        self, numbers: Sequence[int], count: int, oldest: int
    ) -> tuple[list[Result], int]:
        shares = self._mesh.gather_over_dp((list(numbers), count))
        self._send_until(lambda pool: not pool.await_first(shares, oldest, self._stop))
        return super().collect_first(numbers, count, oldest)

    def state(self, tickets: Mapping[int, Ticket]) -> bytes:
        """As of `Generators`; a collective call, and without the rollouts that nobody is there to make."""
        waited = [
            one for one in tickets.values() if one.stored is None and one.version != self.version
        ]
        with contextlib.suppress(ReinforceError):  # the one that ends the run
            self._await(waited)
        return super().state(tickets)

    def publish(self, version: int, *, as_oldest: bool = False) -> None:
        self.version, self._oldest = version, version if as_oldest else self._oldest
        self._send()

    def _await(
        self, tickets: Iterable[Ticket], stop: StopRequest | None = None, anybody: bool = False
    ) -> None:
        numbers = [number for ticket in tickets for number in chain.from_iterable(ticket.numbers)]
        self._send_until(lambda pool: not pool.await_results(numbers, stop, anybody))

    def _send_until(self, is_over: Callable[[SeparatePool], bool]) -> None:
        """Send weights to generators that lack them, each time that a wait is interrupted, until it is over."""
        while True:
            is_wanted = False
            with self._mesh.raise_on_all_ranks():
                if isinstance(self._pool, SeparatePool):
                    is_wanted = not is_over(self._pool)
            if not self._mesh.from_main(is_wanted):
                return
            self._send()

    def _send(self) -> None:
        """Send the newest weights to all generators that lack them; a collective call."""
        while True:
            group = None
            with self._mesh.raise_on_all_ranks():
                if isinstance(self._pool, SeparatePool):
                    group = self._pool.group_for(self.version)
            if not self._mesh.from_main(group is not None):
                return
            if self._mesh.dp_rank == 0:
                send_weights(self._model.lm, group)
