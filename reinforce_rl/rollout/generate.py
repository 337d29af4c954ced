"""A rank that only generates: it answers the trainers' prompts, has the rewards told, and follows their weights."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from reinforce_rl.data.batches import Completions
from reinforce_rl.errors import GenerationError, LostRankError, ReinforceError
from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.generation.responses import completions_of, unbegun
from reinforce_rl.rewards.base import RewardFuture, RewardSource
from reinforce_rl.rollout.generator_pool import INVITATION
from reinforce_rl.rollout.message_codec import BadMessageError, decode, encode
from reinforce_rl.rollout.messages import (
    HELLO,
    EndReceived,
    GeneratorFailed,
    Message,
    Result,
    RunEnded,
    WeightsAnnounced,
    Work,
    WorkRequest,
    Works,
)
from reinforce_rl.rollout.rendezvous import Guest
from reinforce_rl.rollout.reward_requests import reward_request
from reinforce_rl.rollout.weights import load_weights, receive_weights
from reinforce_rl.runtime.links import Invitation, Links, LinkThread
from reinforce_rl.runtime.phases import PhaseTracker, wait_for_role
from reinforce_rl.runtime.roles import RankRole

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel

_AT_ONCE = 8  # micro-batches whose rewards are waited for
_POLL_SECONDS = 0.2
_ON_THEIR_WAY_SECONDS = 0.02
CONNECT_SECONDS = 60.0


class GeneratorRank:
    """A generator's rank, from the first prompt to the end of the run.

    Args:
        device: where the weights are.
        silence_seconds: after which rank 0 counts as lost.
        staleness: versions of the weights besides the newest that may still be asked for.
        groups: prompts answered together, each given back when it is finished; None: works in their order.
        inflight: of `groups`, what becomes of the cache when new weights come; None: they wait until no response is
            under way.
    """

    def __init__(
        self,
        role: RankRole | Guest,
        device: torch.device,
        *,
        silence_seconds: float,
        staleness: int,
        groups: int | None = None,
        inflight: Literal["recompute", "keep"] | None = None,
    ):
        self._staleness = staleness
        self.version = 0
        self._groups = groups
        self._inflight = inflight
        self._changed = threading.Condition()
        self._inbox: deque[Work] = deque()
        self._asked = 0  # works that are to come
        self._announced: deque[int] = deque()  # versions to receive
        self._staged: dict[int, dict[str, Tensor]] = {}  # received and not used yet
        self._has_ended = False
        self._unscored = 0  # results that wait for their scores
        # the generator's, while the weights stay the same
        self._awake: contextlib.ExitStack | None = None
        self._failure: BaseException | None = None
        self._links = Links.connect(
            Invitation.from_json(role.shared(INVITATION)), role.rank, HELLO, CONNECT_SECONDS
        )
        # At once, as it also shows rank 0 that this rank is alive while it loads the model.
        self._thread = LinkThread(self._links, silence_seconds, self._on_message, self._on_lost)
        self._group = role.weight_group(device)

    def close(self) -> None:
        self._thread.close()

    def fail(self, error: ReinforceError) -> None:
        """Give the trainers an error that keeps this generator from going on, and wait until they have ended."""
        self._links.send(0, *encode(GeneratorFailed(error)))
        with self._changed:
            self._wait(lambda: self._has_ended)

    def run(
        self, model: MegatronGPTReinforceActorModel, rm: RewardSource, phases: PhaseTracker
    ) -> None:
        """Answer prompts until the trainers end; `rm` scores the answers, asked by the block's first rank.

        Raises ConnectionError: rank 0 is lost. What a generator's engine or a reward source raises goes to the
        trainers, which end the run.
        """
        self._model = model
        self._rm = rm
        self._phases = phases
        self._is_leader = model.mesh.is_model_parallel_rank_0
        self._is_alone = model.mesh.world_size == 1
        threading.Thread(target=self._receive, name="weights", daemon=True).start()
        self._scoring = ThreadPoolExecutor(_AT_ONCE, "rewards")
        try:
            if self._groups is None:
                while (works := self._take(1, 1)) is not None:
                    self._respond(works[0])
            else:
                self._answer_groups(self._groups)
            self._sleep()
        except GenerationError as error:  # of an engine that does not fall asleep
            self.fail(error)
        finally:
            # closing `rm` ends those that wait for scores
            self._scoring.shutdown(wait=False, cancel_futures=True)

    def _take(self, count: int, room: int, *, waits: bool = True) -> list[Work] | None:
        """Ask for this many works; return those that there are, after waiting for one. Same on all ranks of the block.

        Of works for whatever is finished first, at most `room`. Returns none at a count of 0. None: the trainers have
        ended.
        """
        works: list[Work] | None = None
        if self._is_leader:
            if waits:
                self._phases.begin("waiting for prompts")
            with self._changed:
                self._ask(count)
                if waits:
                    self._wait(lambda: bool(self._inbox) or self._has_ended, "waiting for prompts")
                    # A call of few prompts takes as long as one of many: those on their way come
                    # along.
                    wait_for_role(
                        self._changed,
                        _ON_THEIR_WAY_SECONDS,
                        lambda: len(self._inbox) >= count or self._has_ended,
                    )
                if not self._has_ended:
                    works = []
                    for work in list(self._inbox) if count else []:
                        if not work.or_newer or room > 0:
                            room -= work.or_newer
                            works.append(work)
                            self._inbox.remove(work)
        elif waits:
            self._phases.begin("waiting for prompts")
        return self._model.mesh.from_model_parallel_rank_0(works)

    def _ask(self, count: int) -> None:
        more = count - self._asked - len(self._inbox)
        if more > 0:
            self._asked += more
            self._links.send(0, *encode(WorkRequest(more)))

    def _withdraw(self) -> None:
        """Take back what was asked for and has not come, so that others get it; what is on its way is taken later."""
        with self._changed:
            asked = self._asked
            self._asked = 0
        if asked:
            self._links.send(0, *encode(WorkRequest(-asked)))

    def _respond(self, work: Work) -> None:
        """Answer a work with the weights that it asks for."""
        self._phases.step = work.step
        if work.version != self.version:
            self._phases.begin("waiting for weights")
            self._advance(work.version)
        self._phases.begin("generate")
        self._deliver(*self._answer(work))

    def _answer_groups(self, count: int) -> None:
        """Answer prompts as they come, this many at once, until the trainers end."""
        groups: dict[int, tuple[Work, list[PartialResponse]]] = {}
        while True:
            rows = [one for _, responses in groups.values() for one in responses]
            running = sum(one.finish_reason is None for one in rows)
            # all groups have as many samples
            room = count - -(-running * len(groups) // max(len(rows), 1))
            # Without updates in flight, the responses under way keep their version, and other works
            # wait.
            is_free = self._inflight is not None or not running
            # One besides, without which a validation would never come.
            works = self._take(max(room, 1) if is_free else 0, room, waits=not groups)
            if works is None:
                return
            for work in works:
                if not work.or_newer:  # a validation
                    self._respond(work)
                    continue
                groups[work.number] = work, unbegun(work.prompts, work.num_samples, work.seed)
                if work.version > self.version:
                    self._advance(work.version)
            if (newest := self._newest()) > self.version and is_free:
                self._advance(newest)
            if groups:
                self._phases.step = max(work.step for work, _ in groups.values())
                self._phases.begin("generate")
                self._lengthen(groups, count)

    def _lengthen(self, groups: dict[int, tuple[Work, list[PartialResponse]]], count: int) -> None:
        """Go on with the responses of all groups, until their end or an interruption; remove what is finished.

        There is room for `count` groups.
        """
        begun = [one for _, responses in groups.values() for one in responses]
        if self._inflight is None and self._is_leader:
            # nothing new is begun before these are at their end
            self._withdraw()
        few = sum(one.finish_reason is None for one in begun) // 2
        samples = len(begun) // len(groups)
        updates = InFlight(self, few, with_room=(count - 1) * samples)
        try:
            self._wake()
            found = iter(self._model.generator.go_on(begun, self._model.settings.sampling, updates))
        except GenerationError as error:
            self._awake = None
            for work, _ in groups.values():
                self._deliver(Result(work.number, (work.prompts[0].id,), failure=error), None)
            groups.clear()
            return
        for number, (work, responses) in list(groups.items()):
            responses = [next(found) for _ in responses]
            groups[number] = work, responses
            if all(one.finish_reason is not None for one in responses):
                del groups[number]
                lm = self._model.lm
                pad_id = self._model.pad_id
                whole = completions_of(responses, pad_id).within_vocabulary(
                    lm.architecture.vocab_size, pad_id
                )
                self._deliver(
                    Result(number, (work.prompts[0].id,), whole), self._ask_for_scores(work, whole)
                )

    def next_action(
        self, unfinished: int, few: int, with_room: int
    ) -> Literal["go on", "load", "stop"]:
        """Return what is to happen before the next token.

        Args:
            unfinished: responses of the call.
            few: so many end the call, so that groups that are whole are given back.
            with_room: with so many there is room for a group more.
        """
        action: Literal["go on", "load", "stop"] = "go on"
        if self._is_leader:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._has_ended:
                    action = "stop"
                elif self._inflight is not None:
                    if any(version > self.version for version in self._staged):
                        action = "load" if self._inflight == "keep" else "stop"
                    elif any(not work.or_newer or unfinished <= with_room for work in self._inbox):
                        action = "stop"
            if unfinished <= few:
                action = "stop"
        return action if self._is_alone else self._model.mesh.from_model_parallel_rank_0(action)

    def load_newest(self) -> None:
        self._load(self._newest())

    def _newest(self) -> int:
        """Return the newest version that model-parallel rank 0 has.

        The block's other ranks have it, or are receiving it.
        """
        with self._changed:
            own = max(self._staged, default=self.version)
        return self._model.mesh.from_model_parallel_rank_0(own)

    def _advance(self, version: int) -> None:
        """Use the weights of a version once they have come; an engine takes them over when it wakes the next time."""
        self._sleep()
        self._load(version)
        self._model.generator.refit()

    def _load(self, version: int) -> None:
        with self._changed:
            # A newer one may have taken its place; on the ranks of a block all are kept, and come
            # in order.
            self._wait(lambda: self._has_ended or any(one >= version for one in self._staged))
            if not (there := [one for one in self._staged if one >= version]):
                return  # the trainers have ended, and nothing is drawn with these any more
            version = min(there)
            found = self._staged.pop(version)
            for old in [one for one in self._staged if one < version]:
                del self._staged[old]
        load_weights(self._model.lm, found)
        self.version = version

    def _wake(self) -> None:
        if self._awake is None:
            awake = contextlib.ExitStack()
            awake.enter_context(self._model.generator.awake())
            self._awake = awake

    def _sleep(self) -> None:
        if self._awake is not None:
            awake = self._awake
            self._awake = None
            awake.close()

    def _answer(self, work: Work) -> tuple[Result, RewardFuture | None]:
        result = Result(work.number, tuple(prompt.id for prompt in work.prompts))
        future = None
        try:
            self._wake()
            found = self._model.infer(
                work.prompts, work.num_samples, work.seed, validation=work.validation
            )
            versions = torch.full_like(found.tokens, self.version)
            result = replace(result, completions=replace(found, weight_versions=versions))
            future = self._ask_for_scores(work, found)
        except GenerationError as error:
            # one that has failed is not put to sleep, and wakes with the next weights
            self._awake = None
            result = replace(result, failure=error)
        return result, future

    def _ask_for_scores(self, work: Work, found: Completions) -> RewardFuture | None:
        return (
            self._rm.infer_rm(reward_request(self._model, work.prompts, found))
            if self._is_leader
            else None
        )

    def _deliver(self, result: Result, future: RewardFuture | None) -> None:
        """Give a result to the trainers once it has its scores."""
        if self._is_leader:
            with self._changed:
                self._unscored += 1
            self._scoring.submit(self._send, result, future)

    def _send(self, result: Result, future: RewardFuture | None) -> None:
        try:
            try:
                result = result if future is None else replace(result, rewards=future.result())
            except ReinforceError as error:
                result = replace(result, failure=error)
            self._links.send(0, *encode(result))
        except BaseException as error:  # a fault of this program: the main thread raises it
            self._failure = error
        with self._changed:
            self._unscored -= 1
            self._changed.notify_all()

    def _receive(self) -> None:
        """Receive weights as they are announced; on a thread of its own."""
        try:
            while True:
                with self._changed:
                    self._wait(lambda: bool(self._announced) or self._has_ended)
                    if not self._announced:
                        return
                    version = self._announced.popleft()
                found = receive_weights(self._model.lm, self._group)
                with self._changed:
                    self._staged[version] = found
                    for old in [one for one in self._staged if one < version - self._kept]:
                        del self._staged[old]
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    @property
    def _kept(self) -> int:
        """How many versions besides the newest are kept: those that may be asked for, or that another rank has."""
        return self._staleness if self._groups is None else 0 if self._is_alone else sys.maxsize

    def _wait(self, condition: Callable[[], bool], phase: str = "") -> None:
        """Wait with the lock held; raise what has gone wrong meanwhile.

        `phase` has a deadline, of the reward source, as long as scores are waited for too.
        """
        while not condition():
            if self._failure is not None:
                raise self._failure
            if phase and self._phases.phase.has_deadline != bool(self._unscored):
                self._phases.begin(phase, has_deadline=bool(self._unscored))
            wait_for_role(self._changed, _POLL_SECONDS)

    def _on_message(self, rank: int, parts: list[memoryview]) -> None:
        try:
            self._take_message(decode(parts))
        except BadMessageError as error:
            with self._changed:
                failure = LostRankError(
                    f"rank 0, which trains, sent an invalid message: {error}",
                    key="generators.trainers.invalid_message",
                )
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _take_message(self, message: Message) -> None:
        with self._changed:
            if isinstance(message, RunEnded):
                self._has_ended = True
                self._links.send(0, *encode(EndReceived()))
            elif isinstance(message, WeightsAnnounced):
                self._announced.append(message.version)
            elif isinstance(message, Works):
                self._inbox.extend(message.works)
                self._asked = max(self._asked - len(message.works), 0)
            else:
                raise BadMessageError(f"{type(message).__name__} is of a generator")
            self._changed.notify_all()

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            if not self._has_ended:
                self._failure = self._failure or ConnectionError(f"rank 0, which trains, {reason}")
            self._changed.notify_all()


class InFlight:
    """See `WeightUpdates`."""

    def __init__(self, rank: GeneratorRank, few: int, with_room: int):
        self._rank = rank
        self._few = few
        self._with_room = with_room

    @property
    def version(self) -> int:
        return self._rank.version

    def next_action(self, unfinished: int) -> Literal["go on", "load", "stop"]:
        return self._rank.next_action(unfinished, self._few, self._with_room)

    def load(self) -> None:
        self._rank.load_newest()
