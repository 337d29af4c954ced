"""The trainers' side of generation on ranks of its own: a queue of prompts, and the rollouts that come back.

Rank 0 gives micro-batches of prompts, in order, to whichever generator is free, with the version of the weights that
each must be drawn with: the number of steps that they have been trained for. Step s (from 1) uses version
max(0, s - 1 - max_staleness), so a run's samples depend neither on how fast ranks are nor on how many generate.

With rollout_order=finished a work is one prompt, drawn with the newest weights that its generator has, and a step
takes the works that are finished first.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import ReinforceError, StoppedEarly
from reinforce_rl.generation.weight_sync import send_weights
from reinforce_rl.rewards.base import STATUS_OK, Rewards
from reinforce_rl.runtime.links import Links, LinkThread, host_of_rank_0
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.runtime.stop import StopRequest

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
    from reinforce_rl.megatron.mesh import Mesh

INVITATION = "generators"  # where rank 0's `Invitation` is shared
T = TypeVar("T")
_POLL_SECONDS = 0.2
_TENSORS = ("tokens", "lengths", "log_probs", "weight_versions")  # of `Completions`


@dataclass(frozen=True)
class Work:
    """A micro-batch of prompts to answer."""

    number: int
    step: int  # 0 of a validation
    version: int  # of the weights
    prompts: tuple[Prompt, ...]
    num_samples: int
    seed: int
    or_newer: bool = False  # of weights of this version or, rather, newer ones; then of one prompt

    @property
    def validation(self) -> bool:
        return self.step == 0


@dataclass(frozen=True)
class Result:
    """The answer to a `Work`."""

    number: int
    prompt_ids: tuple[int, ...]
    completions: Completions | None = None  # None after a failure
    rewards: Rewards | None = None
    failure: Exception | None = None  # of the engine if there are no completions, else of the reward source


@dataclass(frozen=True)
class Known:
    """A `RewardFuture` whose scores, or failure, are there."""

    rewards: Rewards | None
    failure: Exception | None = None

    def result(self) -> Rewards:
        if self.failure is not None:
            raise self.failure
        assert self.rewards is not None
        return self.rewards


class GeneratorPool:
    """Rank 0's connections to the generators, and the queue between them.

    A generator of which nothing is heard for `silence_seconds` is lost. `device` is where the weights are.

    Raises ConnectionError: a generator did not come.
    """

    def __init__(self, role: RankRole, device: torch.device, silence_seconds: float):
        self._changed = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._room = dict.fromkeys(role.leaders, 0)  # works that each has asked for
        self._begun, self._leaders = set[int](), set(role.leaders)
        self._given: dict[int, Work] = {}  # and not forgotten
        self._given_again = set[int]()  # as their rollouts were too old
        self._results: dict[int, Result] = {}
        self._lost: str | None = None
        self._failure: ReinforceError | None = None  # of a generator that cannot go on
        links, invitation = Links.listen(host_of_rank_0())
        role.share(INVITATION, invitation)
        self._links, seconds = links, role.timeout.total_seconds()
        if missing := sorted(set(role.generators) - links.accept(role.generators, seconds).keys()):
            links.close()
            raise ConnectionError(f"the ranks {missing}, which generate, did not come within {seconds:.0f} s")
        self.group = role.weight_group(device)
        self._thread = LinkThread(links, silence_seconds, self._on_message, self._on_lost)

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
                self._changed.wait(_POLL_SECONDS)
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
        dropped = 0
        with self._changed:
            again = set(self._given_again)
            while True:
                dropped += self._give_again(oldest)
                found, prompts = [], set[tuple[int, ...]]()
                for numbers, count in shares:
                    found.append(self._first(numbers, count, again, prompts))
                    prompts |= {result.prompt_ids for result in found[-1] or ()}
                if all(one is not None for one in found):
                    return [result for one in found for result in one or ()], dropped
                if stop.reason is not None:
                    return None
                self._check()
                self._changed.wait(_POLL_SECONDS)

    def _give_again(self, oldest: int) -> int:
        late = [number for number, result in self._results.items() if _age(result, oldest) < oldest]
        for number in late:
            del self._results[number]
            self._given_again.add(number)
        self._waiting.extendleft(self._given[number] for number in reversed(late))
        self._assign()
        return len(late)

    def _first(
        self, numbers: Sequence[int], count: int, again: set[int], prompts: set[tuple[int, ...]]
    ) -> list[Result] | None:
        """Return the results to take, those given `again` among them, but no others of `prompts`; None: not yet.

        Where a share has no more to come, a prompt of two epochs is taken twice rather than left at the run's end.
        """
        own, count = set(numbers), min(count, len(numbers))
        missing = own - self._results.keys()
        if missing & again:
            return None
        order = sorted(own & again) + [number for number in self._results if number in own - again]
        chosen, known = list[int](), set(prompts)
        for number in order:
            if self._results[number].prompt_ids not in known:
                known.add(self._results[number].prompt_ids)
                chosen.append(number)
        if len(chosen) < count and not missing:
            chosen += [number for number in order if number not in set(chosen)]
        return [self._results[number] for number in sorted(chosen[:count])] if len(chosen) >= count else None

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
            found = [result for result in self._results.values() if _is_sound(result)]
            return [result for result in found if self._given[result.number].or_newer]  # not a validation's

    def announce(self, version: int) -> None:
        """Have all generators' ranks receive weights, once each has loaded its model; raises as `wait`."""
        with self._changed:
            while self._begun < self._leaders:
                self._check()
                self._changed.wait(_POLL_SECONDS)
        self._links.send_all(pickle.dumps(version))

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._lost is not None:
            raise ConnectionError(self._lost)

    def close(self) -> None:
        """End the generators."""
        self._thread.stopping.set()
        self._links.send_all(pickle.dumps(None))
        self._thread.wait_closed(_POLL_SECONDS)
        self._thread.close()

    def _on_message(self, rank: int, parts: list[memoryview]) -> None:
        message: Result | ReinforceError | int = pickle.loads(parts[0])
        with self._changed:
            if isinstance(message, int):
                self._begun.add(rank)
                self._room[rank] += message
                self._assign()
            elif isinstance(message, Result):
                self._results[message.number] = message
            else:
                self._failure = message
            self._changed.notify_all()

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
            self._links.send(rank, pickle.dumps(works))


@dataclass(frozen=True)
class Ticket:
    """The prompts of a step, or of a validation, that were submitted together."""

    numbers: list[list[int]]  # of each data-parallel rank's micro-batches, in order
    version: int
    stored: dict[int, dict[str, Any]] | None = None  # by prompt, all ranks' results from a checkpoint


class Generators:
    """What every trainer knows of the generators. All trainers call its methods together.

    Args:
        pool: on rank 0, else None.
        cut: called with (prompts, validation); yields the micro-batches.
        takes_finished: see rollout_order.
    """

    def __init__(
        self,
        model: MegatronGPTReinforceActorModel,
        pool: GeneratorPool | None,
        cut: Callable[[Sequence[Prompt], bool], Iterable[Sequence[Prompt]]],
        stop: StopRequest,
        takes_finished: bool = False,
    ):
        self.takes_finished = takes_finished
        self._model, self._pool, self._cut, self._stop = model, pool, cut, stop
        self._numbers = count()
        self._stored: dict[int, dict[str, Any]] = {}  # by prompt, rollouts of a checkpoint that may be trained on
        self.version = 0  # of the newest weights that the generators were sent
        self._oldest = 0  # that they may still be asked for

    @property
    def _mesh(self) -> Mesh:
        return self._model.mesh

    def submit(self, prompts: Sequence[Prompt], num_samples: int, seed: int, step: int, version: int) -> Ticket:
        """Queue this rank's share of the prompts of a step, 0 for a validation, behind all submitted before."""
        or_newer = self.takes_finished and step > 0
        parts = [(prompt,) for prompt in prompts] if or_newer else map(tuple, self._cut(prompts, step == 0))
        shares = self._mesh.gather_over_dp(list(parts))
        version = self._oldest if or_newer else max(version, self._oldest)
        numbered = [[(next(self._numbers), part) for part in share] for share in shares]
        # Ends of shares may be smaller; taking them last shortens the final wait.
        order = sorted((i, owner) for owner, share in enumerate(numbered) for i in range(len(share)))
        if self._pool is not None:
            ordered = (numbered[owner][i] for i, owner in order)
            self._give([Work(n, step, version, part, num_samples, seed, or_newer) for n, part in ordered], self._pool)
        return Ticket([[number for number, _ in share] for share in numbered], version)

    def _give(self, works: Sequence[Work], pool: GeneratorPool) -> None:
        new = []
        for work in works:
            stored = self._stored.pop(work.prompts[0].id, None) if work.or_newer else None
            if stored is None:
                new.append(work)
            else:
                pool.readmit(work, _unpacked(work.prompts[0].id, stored, work.number))
        pool.submit(new)

    def collect(self, ticket: Ticket, prompts: Sequence[Prompt]) -> list[Result]:
        """Wait for the work of a ticket; return the results of this rank's share, which are of `prompts`, in order.

        Raises StoppedEarly on all ranks once one is asked to stop, and what `GeneratorPool.wait` raises.
        """
        if ticket.stored is not None:
            return [_unpacked(prompt.id, ticket.stored[prompt.id]) for prompt in prompts]
        found = None
        with self._mesh.together():
            if self._pool is not None:
                found = self._pool.wait(list(chain.from_iterable(ticket.numbers)), self._stop)
        by_number = {result.number: result for result in self._unless_stopped(found)}
        return [by_number[number] for number in ticket.numbers[self._mesh.dp_rank]]

    def collect_first(self, numbers: Sequence[int], count: int, oldest: int) -> tuple[list[Result], int]:
        """Wait for the first of this rank's works to finish, this many; see `GeneratorPool.take`. Raises as `collect`.

        Returns:
            This rank's results, in the order of their numbers, and how many were dropped on all ranks.
        """
        shares, found = self._mesh.gather_over_dp((list(numbers), count)), None
        with self._mesh.together():
            if self._pool is not None:
                found = self._pool.take(shares, oldest, self._stop)
        results, dropped = self._unless_stopped(found)
        own = set(numbers)
        return [result for result in results if result.number in own], dropped

    def _unless_stopped(self, found: T | None) -> T:
        """Return on all ranks what the first one has found."""
        found = self._mesh.from_main(found)
        if found is None:
            raise StoppedEarly(f"stopped by {self._stop.reason or 'a signal to another rank'}")
        return found

    def forget(self, ticket: Ticket) -> None:
        self.forget_numbers(chain.from_iterable(ticket.numbers))

    def forget_numbers(self, numbers: Iterable[int]) -> None:
        """Drop the results of these works; rank 0 knows all ranks'."""
        if self._pool is not None:
            self._pool.forget(numbers)

    def state(self, tickets: Mapping[int, Ticket]) -> bytes:
        """Return the rollouts of the tickets, by step, for `restore`, after waiting for them; on rank 0, else nothing.

        Those of the newest weights are left out, as a resumed run makes the same ones. So are a step with a failure
        and all after it. With `takes_finished`, all works that are finished are returned too, by prompt.
        """
        steps, pool = [], self._pool
        if pool is None:
            return b""
        for step, ticket in tickets.items():
            if ticket.version == self.version:
                break
            stored = ticket.stored
            if stored is None:
                try:
                    results = pool.wait(list(chain.from_iterable(ticket.numbers)))
                except ReinforceError:  # the one that ends the run, which is saved without these
                    break
                if results is None or not all(map(_is_sound, results)):
                    break
                stored = {prompt: packed for result in results for prompt, packed in _packed(result).items()}
            steps.append({"step": step, "version": ticket.version, "stored": stored})
        if self.takes_finished:
            stored = {prompt: packed for result in pool.finished() for prompt, packed in _packed(result).items()}
            steps += [{"step": 0, "version": 0, "stored": stored}] if stored else []
        content = io.BytesIO()
        torch.save(steps, content)
        return content.getvalue() if steps else b""

    def restore(self, content: bytes) -> dict[int, Ticket]:
        """Return the tickets of a `state`, by step."""
        steps = torch.load(io.BytesIO(content), weights_only=True) if content else []
        self._stored = {prompt: packed for one in steps if not one["step"] for prompt, packed in one["stored"].items()}
        return {one["step"]: Ticket([], one["version"], one["stored"]) for one in steps if one["step"]}

    def publish(self, version: int, *, as_oldest: bool = False) -> None:
        """Send the policy's weights as this version; `as_oldest` where the generators are to have no earlier one."""
        with self._mesh.together():
            if self._pool is not None:
                self._pool.announce(version)
        if self._mesh.dp_rank == 0:
            group = self._pool.group if self._pool is not None else None
            send_weights(self._model.lm, group)
        self.version, self._oldest = version, version if as_oldest else self._oldest


def _packed(result: Result) -> dict[int, dict[str, Any]]:
    """Return the rollouts of each prompt, by its id, as plain values and tensors."""
    completions, rewards = result.completions, result.rewards
    assert completions is not None
    samples, found = len(completions.lengths) // len(result.prompt_ids), {}
    for at, prompt in enumerate(result.prompt_ids):
        own = slice(at * samples, (at + 1) * samples)
        tensors = {name: getattr(completions, name) for name in _TENSORS}
        tensors = {name: None if value is None else value[own].clone() for name, value in tensors.items()}
        scores = None
        if rewards is not None:
            by_source = {name: values[own].clone() for name, values in rewards.by_source.items()}
            faults = {row - own.start: text for row, text in rewards.faults.items() if own.start <= row < own.stop}
            values, status = rewards.values[own].clone(), rewards.status[own].clone()
            scores = {"values": values, "status": status, "by_source": by_source, "faults": faults}
        found[prompt] = {**tensors, "finish_reasons": list(completions.finish_reasons[own]), "scores": scores}
    return found


def _unpacked(prompt: int, stored: dict[str, Any], number: int = -1) -> Result:
    tensors = {name: stored[name] for name in _TENSORS}
    completions = Completions(**tensors, finish_reasons=tuple(stored["finish_reasons"]))
    rewards = None if stored["scores"] is None else Rewards(**stored["scores"])
    return Result(number, (prompt,), completions, rewards)


def _is_sound(result: Result) -> bool:
    """Return False after a failure, of scores too, which a run that goes on may be spared."""
    return result.failure is None and (result.rewards is None or bool((result.rewards.status == STATUS_OK).all()))


def _age(result: Result, unknown: int) -> int:
    """Return the version of the oldest weights that drew a token."""
    versions = None if result.completions is None else result.completions.weight_versions
    return unknown if versions is None or not versions.numel() else int(versions.min())
