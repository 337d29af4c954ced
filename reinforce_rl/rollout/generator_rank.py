"""A generator's rank: it answers the trainers' prompts, has them scored, and follows the weights.

It keeps older weights as long as they may be asked for: a request of a lost generator comes back
with its own version.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Completions
from reinforce_rl.errors import (
    EXIT_LOST_RANK,
    EnvironmentProcessError,
    GenerationError,
    LostRankError,
    ReinforceError,
)
from reinforce_rl.generation.base import PartialResponse
from reinforce_rl.generation.responses import completions_of, new_responses
from reinforce_rl.rewards.base import RewardFuture, RewardSource
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
    RunEnded,
)
from reinforce_rl.rollout.rendezvous import RendezvousInfo
from reinforce_rl.rollout.scoring import reward_request
from reinforce_rl.rollout.weights import exchange_weights, load_weights, receive_weights
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.runtime.phases import StackWatcher, wait_for_role

if TYPE_CHECKING:
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

_MAX_UNSCORED = 8  # micro-batches whose rewards are waited for
_POLL_SECONDS = 0.2
_ON_THEIR_WAY_SECONDS = 0.02
CONNECT_SECONDS = 60.0


class GeneratorRank:
    """A generator's rank, from its registration to the end of the run.

    Args:
        link_rank: names this rank; see `runtime.roles.RANKS`.
        info: how to reach rank 0.
        registration: how this rank registers.
        device: of the weights.
        control: whose stop request a generator of its own program obeys.
        is_of_job: this is a rank of the trainers' job and ends with them: they handle signals, and
            the job's watch finds a hang.

    Raises:
        ConnectionError: rank 0 is not there.
    """

    def __init__(
        self,
        link_rank: int,
        info: RendezvousInfo,
        registration: Register,
        device: torch.device,
        cfg: TrainConfig,
        control: RunControl,
        *,
        is_of_job: bool,
    ):
        silence_seconds = cfg.trainer.heartbeat_timeout_seconds
        transfer_seconds = cfg.torch_timeout_seconds if is_of_job else silence_seconds
        self.version = -1  # of the weights; those of the model's folder have none
        self._is_of_job = is_of_job
        self._staleness = cfg.staleness
        # Prompts answered together, each given back when it is finished; None: in their order.
        self._groups = cfg.prompts_under_way
        self._inflight = cfg.cache_after_update
        self._stop = control.stop
        self._phases = control.phases
        self._hang_seconds = cfg.trainer.collective_timeout_seconds
        self._stack = StackWatcher(threading.get_ident())
        self._changed = threading.Condition()
        self._inbox: deque[GenerationRequest] = deque()
        self._asked = 0  # requests that are to come
        self._offers: deque[NewWeights] = deque()
        self._newest_received = -1  # version
        self._staged: dict[int, dict[str, Tensor]] = {}  # received and not in use
        self._has_ended = False
        self._unscored = 0  # results that wait for their scores
        # The generator's, while the weights stay the same.
        self._awake: contextlib.ExitStack | None = None
        self._failure: BaseException | None = None
        with contextlib.ExitStack() as connecting:
            self._links = Links.connect(info.links, link_rank, HELLO, CONNECT_SECONDS)
            # At once, as it also shows rank 0 that this rank is alive while it loads the model.
            self._thread = LinkThread(self._links, silence_seconds, self._on_message, self._on_lost)
            connecting.callback(self._thread.close)
            self._group = info.weight_group(device, timedelta(seconds=transfer_seconds))
            connecting.pop_all()
        if not is_of_job:
            self._links.set_beat(self._links.beat_seconds, self._beat)
        self._links.send(0, *encode(registration))

    def close(self) -> None:
        self._thread.close()

    def fail(self, error: ReinforceError) -> None:
        """Tell the trainers why this generator cannot continue.

        A rank of their job then waits until they have ended; any other raises the error.
        """
        self._links.send(0, *encode(GeneratorFailed(error)))
        if not self._is_of_job:
            raise error
        with self._changed:
            self._wait(lambda: self._has_ended)

    def _beat(self) -> list[bytes]:
        """Return a heartbeat; end this process if generation hangs.

        The job's watch does not see a generator of another program, whose main thread cannot end
        itself then.
        """
        phase = self._phases.phase
        place = self._stack.look()
        seconds = time.monotonic() - max(place.still_since, phase.since)
        if phase.name == "generate" and seconds > self._hang_seconds:
            print(
                f"error: generation hangs at {place.line} for {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_LOST_RANK)
        return [b""]

    def run(self, model: MegatronGPTReinforceActorModel, rm: RewardSource) -> None:
        """Answer prompts until the trainers end; model-parallel rank 0 asks `rm` for scores.

        Raises:
            ConnectionError: rank 0 is lost.
            GenerationError: the engine failed; see `fail`.
            LostRankError: the trainers refused this generator.
        """
        self._model = model
        self._rm = rm
        self._is_model_parallel_rank_0 = model.mesh.is_model_parallel_rank_0
        self._is_alone = model.mesh.world_size == 1
        threading.Thread(target=self._receive, name="weights", daemon=True).start()
        self._scoring = ThreadPoolExecutor(_MAX_UNSCORED, "rewards")
        try:
            if self._groups is None:
                while (requests := self._take(1, 1)) is not None:
                    self._respond(requests[0])
            else:
                self._answer_groups(self._groups)
            self._sleep()
        except (GenerationError, EnvironmentProcessError) as error:
            self.fail(error)
        finally:
            # closing `rm` ends the threads that wait for scores
            self._scoring.shutdown(wait=False, cancel_futures=True)

    def _take(self, count: int, room: int, *, waits: bool = True) -> list[GenerationRequest] | None:
        """Ask for up to `count` requests and return those received so far, the same on all ranks.

        Args:
            room: limit on the requests of rollout_order=finished; a validation needs no room.
            waits: block until at least one request has been received.

        Returns:
            The requests, none for a count of 0; None once the trainers have ended.
        """
        requests: list[GenerationRequest] | None = None
        if self._is_model_parallel_rank_0:
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
                    requests = []
                    for request in list(self._inbox) if count else []:
                        if not request.allow_newer or room > 0:
                            room -= request.allow_newer
                            requests.append(request)
                            self._inbox.remove(request)
        elif waits:
            self._phases.begin("waiting for prompts")
        return self._model.mesh.from_model_parallel_rank_0(requests)

    def _ask(self, count: int) -> None:
        if self._leaves:
            self._inbox.clear()  # others answer these
            return
        lacking = count - self._asked - len(self._inbox)
        if lacking > 0:
            self._asked += lacking
            self._links.send(0, *encode(RequestCredit(lacking)))

    def _withdraw(self) -> None:
        """Withdraw what it has asked for, so that other generators get the requests.

        Requests that are already on their way are taken later.
        """
        with self._changed:
            asked = self._asked
            self._asked = 0
        if asked:
            self._links.send(0, *encode(RequestCredit(-asked)))

    def _respond(self, request: GenerationRequest) -> None:
        """Answer a request with the weights that it asks for."""
        self._phases.step = request.step
        if request.version != self.version:
            self._phases.begin("waiting for weights")
            self._advance(request.version)
        self._phases.begin("generate")
        self._deliver(*self._answer(request))

    def _answer_groups(self, count: int) -> None:
        """Answer prompts as they come, this many at once, until the trainers end."""
        groups: dict[int, tuple[GenerationRequest, list[PartialResponse]]] = {}
        while True:
            rows = [response for _, responses in groups.values() for response in responses]
            running = sum(response.finish_reason is None for response in rows)
            # all groups have as many samples
            room = count - -(-running * len(groups) // max(len(rows), 1))
            # Without updates in flight, the responses under way keep their version, and other
            # requests wait.
            is_free = self._inflight is not None or not running
            # One besides, without which a validation would never come.
            requests = self._take(max(room, 1) if is_free else 0, room, waits=not groups)
            if requests is None:
                return
            for request in requests:
                if not request.allow_newer:  # a validation
                    self._respond(request)
                    continue
                groups[request.number] = (
                    request,
                    new_responses(request.prompts, request.num_samples, request.seed),
                )
                if request.version > self.version:
                    self._advance(request.version)
            if (newest := self._newest()) > self.version and is_free:
                self._advance(newest)
            if groups:
                self._phases.step = max(request.step for request, _ in groups.values())
                self._phases.begin("generate")
                self._resume_groups(groups, count)

    def _resume_groups(
        self, groups: dict[int, tuple[GenerationRequest, list[PartialResponse]]], count: int
    ) -> None:
        """Resume the responses of all groups until their end or an interruption.

        Finished groups are removed. There is room for `count` groups.
        """
        begun = [response for _, responses in groups.values() for response in responses]
        if self._inflight is None and self._is_model_parallel_rank_0:
            # nothing new is begun before these are at their end
            self._withdraw()
        few = sum(response.finish_reason is None for response in begun) // 2
        samples = len(begun) // len(groups)
        updates = InFlight(self, few, with_room=(count - 1) * samples)
        with self._waking():
            sampling = self._model.sampling
            resumed = iter(self._model.generator.resume(begun, sampling, updates))
        for number, (request, responses) in list(groups.items()):
            responses = [next(resumed) for _ in responses]
            groups[number] = request, responses
            if all(response.finish_reason is not None for response in responses):
                del groups[number]
                lm = self._model.lm
                pad_id = self._model.pad_id
                completions = completions_of(responses, pad_id).within_vocabulary(
                    lm.architecture.vocab_size, pad_id
                )
                result = GenerationResult(number, (request.prompts[0].id,), completions)
                self._deliver(result, self._ask_for_scores(request, completions))

    def next_action(
        self, unfinished: int, few: int, with_room: int
    ) -> Literal["continue", "load", "stop"]:
        """Return what is to happen before the next token.

        Args:
            unfinished: responses of the call.
            few: so many end the call, so that groups that are whole are given back.
            with_room: with so many there is room for a group more.
        """
        action: Literal["continue", "load", "stop"] = "continue"
        if self._is_model_parallel_rank_0:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._has_ended:
                    action = "stop"
                elif self._inflight is not None:
                    if any(version > self.version for version in self._staged):
                        action = "load" if self._inflight == "keep" else "stop"
                    elif any(
                        not request.allow_newer or unfinished <= with_room
                        for request in self._inbox
                    ):
                        action = "stop"
            if unfinished <= few:
                action = "stop"
        return action if self._is_alone else self._model.mesh.from_model_parallel_rank_0(action)

    def _newest(self) -> int:
        """Return the newest version that all ranks of this generator have.

        A transfer may fail on one of them.
        """
        mesh = self._model.mesh
        with self._changed:
            versions = {self.version, *self._staged}
        of_ranks = mesh.gather_on_model_parallel_rank_0(versions)
        common = max(set.intersection(*of_ranks)) if of_ranks else None
        return mesh.from_model_parallel_rank_0(common)

    def _advance(self, version: int) -> None:
        """Use a version's weights once they have come; an engine takes them over when it wakes."""
        self._sleep()
        self._load(version)
        self._model.generator.refit()

    def _load(self, version: int) -> None:
        """Use the weights of a version; where prompts have no order, the newest that there are."""
        if self._groups is not None:
            self.load_newest()
            return
        with self._changed:
            self._wait(lambda: version in self._staged or self._has_ended)
            if version not in self._staged:
                return  # the trainers have ended, and nothing is drawn with these any more
            received = self._staged.pop(version)
        exchange_weights(self._model.lm, received)
        with self._changed:
            if self.version >= 0:
                # those of before, for requests of their version
                self._staged[self.version] = received
            self.version = version
            self._forget_old()

    def load_newest(self) -> None:
        """Use the newest weights that all ranks of this generator have."""
        newest = self._newest()
        if newest <= self.version:
            return
        with self._changed:
            # Where this rank is alone, newer ones may have taken their place meanwhile.
            newest = min(version for version in self._staged if version >= newest)
            received = self._staged.pop(newest)
            for old in [version for version in self._staged if version < newest]:
                del self._staged[old]
        load_weights(self._model.lm, received)
        self.version = newest

    def _forget_old(self) -> None:
        oldest = self._newest_received - self._kept
        for old in [version for version in self._staged if version < oldest]:
            del self._staged[old]

    @contextlib.contextmanager
    def _waking(self) -> Iterator[None]:
        """Wake the engine for the block. One that fails is not put to sleep any more."""
        try:
            self._wake()
            yield
        except GenerationError:
            self._awake = None
            raise

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

    def _answer(self, request: GenerationRequest) -> tuple[GenerationResult, RewardFuture | None]:
        with self._waking():
            completions = self._model.infer(
                request.prompts, request.num_samples, request.seed, validation=request.validation
            )
        versions = torch.full_like(completions.tokens, self.version)
        result = GenerationResult(
            request.number,
            tuple(prompt.id for prompt in request.prompts),
            replace(completions, weight_versions=versions),
        )
        return result, self._ask_for_scores(request, completions)

    def _ask_for_scores(
        self, request: GenerationRequest, completions: Completions
    ) -> RewardFuture | None:
        if not self._is_model_parallel_rank_0:
            return None
        return self._rm.infer_rm(reward_request(self._model, request.prompts, completions))

    def _deliver(self, result: GenerationResult, future: RewardFuture | None) -> None:
        """Give a result to the trainers once it has its scores."""
        if self._is_model_parallel_rank_0:
            with self._changed:
                self._unscored += 1
            self._scoring.submit(self._send, result, future)

    def _send(self, result: GenerationResult, future: RewardFuture | None) -> None:
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
        """Receive weights as they are offered, in groups formed for it; on a thread of its own."""
        try:
            while (offer := self._next_offer()) is not None:
                fault = self._fault_of_receiving(offer)
                self._links.send(0, *encode(Received(offer.epoch, offer.version, fault)))
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _next_offer(self) -> NewWeights | None:
        with self._changed:
            self._wait(lambda: bool(self._offers) or self._has_ended)
            return self._offers.popleft() if self._offers else None

    def _fault_of_receiving(self, offer: NewWeights) -> str:
        """Receive weights; return why they could not be received, or nothing."""
        group = self._group
        try:
            if group.epoch != offer.epoch or group.fault:
                group.form(offer.epoch, offer.place, offer.size)
            weights = receive_weights(self._model.lm, group)
        except RuntimeError as error:
            group.close()
            return str(error) or type(error).__name__
        with self._changed:
            self._staged[offer.version] = weights
            self._newest_received = max(self._newest_received, offer.version)
            self._forget_old()
            self._changed.notify_all()
        return ""

    @property
    def _kept(self) -> int:
        """Number of versions to keep besides the newest."""
        if self._groups is None:
            return self._staleness  # a request may ask for any of them
        # Ranks of one generator receive at different times, and use the newest that all have.
        return 0 if self._is_alone else sys.maxsize

    @property
    def _leaves(self) -> bool:
        """Whether a signal asked this generator to stop; in a job the trainers handle signals."""
        return not self._is_of_job and self._stop.reason is not None

    def _wait(self, condition: Callable[[], bool], phase: str = "") -> None:
        """Wait with the lock held; raise what has gone wrong meanwhile.

        `phase` is where it waits for prompts: it has the deadline of the reward source as long as
        scores are waited for too, and a generator that leaves ends there, with what is under way.
        """
        while not (condition() or (phase and self._leaves)):
            self._wait_once(phase)
        if phase and self._leaves:
            while self._unscored:
                self._wait_once(phase)
            self._has_ended = True

    def _wait_once(self, phase: str) -> None:
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
        if isinstance(message, Abandoned):
            self._group.abandon(message.epoch, message.why)
            return
        with self._changed:
            if isinstance(message, RunEnded):
                self._has_ended = True
                self._links.send(0, *encode(EndReceived()))
            elif isinstance(message, NewWeights):
                self._offers.append(message)
            elif isinstance(message, GenerationRequests):
                self._inbox.extend(message.requests)
                self._asked = max(self._asked - len(message.requests), 0)
            elif isinstance(message, Dismissed):
                failure = LostRankError(
                    f"the trainers refused this generator: {message.why}",
                    key="generators.generator.sent_away",
                )
                self._failure = self._failure or failure
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

    def next_action(self, unfinished: int) -> Literal["continue", "load", "stop"]:
        return self._rank.next_action(unfinished, self._few, self._with_room)

    def load(self) -> None:
        self._rank.load_newest()
