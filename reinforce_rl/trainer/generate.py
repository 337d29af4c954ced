"""A rank that only generates: it answers the trainers' prompts, has the rewards told, and follows their weights."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforce_rl.errors import GenerationError, ReinforceError
from reinforce_rl.generation.weight_sync import load_weights, receive_weights
from reinforce_rl.rewards.base import RewardFuture, RewardSource
from reinforce_rl.runtime.guests import Guest
from reinforce_rl.runtime.links import Links, LinkThread
from reinforce_rl.runtime.phases import Activity
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.trainer.disaggregated import INVITATION, Result, Work
from reinforce_rl.trainer.reward_requests import reward_request

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel

_AT_ONCE = 8  # micro-batches whose rewards are waited for
_POLL_SECONDS = 0.2
CONNECT_SECONDS = 60.0


class GeneratorRank:
    """A generator's rank, from the first prompt to the end of the run.

    Args:
        device: where the weights are.
        silence_seconds: after which rank 0 counts as lost.
        staleness: versions of the weights besides the newest that may still be asked for.
    """

    def __init__(self, role: RankRole | Guest, device: torch.device, *, silence_seconds: float, staleness: int):
        self._staleness, self._version = staleness, 0
        self._changed = threading.Condition()
        self._inbox: deque[Work] = deque()
        self._announced: deque[int] = deque()  # versions to receive
        self._staged: dict[int, dict[str, Tensor]] = {}  # received and not used yet
        self._has_ended = False
        self._unscored = 0  # results that wait for their scores
        self._awake: contextlib.ExitStack | None = None  # the generator's, while the weights stay the same
        self._failure: BaseException | None = None
        self._links = Links.connect(role.shared(INVITATION), role.rank, b"generator", CONNECT_SECONDS)
        # At once, as it also shows rank 0 that this rank is alive while it loads the model.
        self._thread = LinkThread(self._links, silence_seconds, self._on_message, self._on_lost)
        self._group = role.weight_group(device)

    def close(self) -> None:
        self._thread.close()

    def fail(self, error: ReinforceError) -> None:
        """Give the trainers an error that keeps this generator from going on, and wait until they have ended."""
        self._links.send(0, pickle.dumps(error))
        with self._changed:
            self._wait(lambda: self._has_ended)

    def run(self, model: MegatronGPTReinforceActorModel, rm: RewardSource, activity: Activity) -> None:
        """Answer prompts until the trainers end; `rm` scores the answers, asked by the block's first rank.

        Raises ConnectionError: rank 0 is lost. What a generator's engine or a reward source raises goes to the
        trainers, which end the run.
        """
        self._model, self._rm, self._activity, self._is_leader = model, rm, activity, model.mesh.is_block_leader
        threading.Thread(target=self._receive, name="weights", daemon=True).start()
        scoring = ThreadPoolExecutor(_AT_ONCE, "rewards")
        try:
            for work in self._works():
                activity.step = work.step
                if work.version != self._version:
                    activity.begin("waiting for weights")
                    self._advance(work.version)
                activity.begin("generate")
                result, future = self._answer(work)
                if self._is_leader:
                    with self._changed:
                        self._unscored += 1
                    scoring.submit(self._send, result, future)
            self._sleep()
        except GenerationError as error:  # of an engine that does not fall asleep
            self.fail(error)
        finally:
            scoring.shutdown(wait=False, cancel_futures=True)  # closing `rm` ends those that wait for scores

    def _works(self) -> Iterator[Work]:
        """Yield this block's work, on all of its ranks alike."""
        while True:
            self._activity.begin("waiting for prompts")
            work = None
            if self._is_leader:
                self._links.send(0, pickle.dumps(None))
                with self._changed:
                    self._wait(lambda: bool(self._inbox) or self._has_ended, "waiting for prompts")
                    work = None if self._has_ended else self._inbox.popleft()
            work = self._model.mesh.from_block_leader(work)
            if work is None:
                return
            yield work

    def _advance(self, version: int) -> None:
        """Load the weights of a version once they have come; an engine takes them over when it wakes the next time."""
        self._sleep()
        with self._changed:
            self._wait(lambda: version in self._staged)
            found = self._staged.pop(version)
            for old in [one for one in self._staged if one < version]:
                del self._staged[old]
        load_weights(self._model.lm, found)
        self._model.generator.refit()
        self._version = version

    def _sleep(self) -> None:
        if self._awake is not None:
            awake, self._awake = self._awake, None
            awake.close()

    def _answer(self, work: Work) -> tuple[Result, RewardFuture | None]:
        result, future = Result(work.number, tuple(prompt.id for prompt in work.prompts)), None
        try:
            if self._awake is None:
                awake = contextlib.ExitStack()
                awake.enter_context(self._model.generator.awake())
                self._awake = awake
            found = self._model.infer(work.prompts, work.num_samples, work.seed, validation=work.validation)
            versions = torch.full_like(found.tokens, self._version)
            result = replace(result, completions=replace(found, weight_versions=versions))
            if self._is_leader:
                future = self._rm.infer_rm(reward_request(self._model, work.prompts, found))
        except GenerationError as error:
            self._awake = None  # one that has failed is not put to sleep, and wakes with the next weights
            result = replace(result, failure=error)
        return result, future

    def _send(self, result: Result, future: RewardFuture | None) -> None:
        try:
            try:
                result = result if future is None else replace(result, rewards=future.result())
            except ReinforceError as error:
                result = replace(result, failure=error)
            pickle.loads(pickle.dumps(result.failure))  # an exception of somebody else's may not survive it
            self._links.send(0, pickle.dumps(result))
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
                    # No rollout of a step that is still to come is of older ones.
                    for old in [one for one in self._staged if one < version - self._staleness]:
                        del self._staged[old]
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], phase: str = "") -> None:
        """Wait with the lock held; raise what has gone wrong meanwhile.

        `phase` has a deadline, of the reward source, as long as scores are waited for too.
        """
        while not condition():
            if self._failure is not None:
                raise self._failure
            if phase and self._activity.phase.has_deadline != bool(self._unscored):
                self._activity.begin(phase, has_deadline=bool(self._unscored))
            self._changed.wait(_POLL_SECONDS)

    def _on_message(self, rank: int, parts: list[memoryview]) -> None:
        message: Work | int | None = pickle.loads(parts[0])
        with self._changed:
            if message is None:
                self._has_ended = True
            elif isinstance(message, int):
                self._announced.append(message)
            else:
                self._inbox.append(message)
            self._changed.notify_all()

    def _on_lost(self, rank: int, reason: str) -> None:
        with self._changed:
            if not self._has_ended:
                self._failure = self._failure or ConnectionError(f"rank 0, which trains, {reason}")
            self._changed.notify_all()
