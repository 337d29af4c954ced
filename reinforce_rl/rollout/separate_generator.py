"""A rank of a generator that is a program of its own; the trainers' side is `separate.py`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import EXIT_LOST_RANK, LostRankError, ReinforceError
from reinforce_rl.rewards.base import RewardFuture
from reinforce_rl.rollout.generate import GeneratorRank
from reinforce_rl.rollout.message_codec import encode
from reinforce_rl.rollout.messages import (
    Abandoned,
    Arrival,
    Dismissed,
    GeneratorFailed,
    Message,
    NewWeights,
    Received,
    Result,
)
from reinforce_rl.rollout.rendezvous import Guest
from reinforce_rl.rollout.weights import exchange_weights, receive_weights
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.phases import StackWatcher


class SeparateGeneratorRank(GeneratorRank):
    """A generator's rank, which keeps older weights as long as they may be asked for, and leaves when it is stopped.

    Args:
        arrival: how it presents itself.
    """

    def __init__(
        self,
        guest: Guest,
        device: torch.device,
        arrival: Arrival,
        cfg: TrainConfig,
        control: RunControl,
    ):
        self._offers: deque[NewWeights] = deque()
        self._newest_received = -1  # version
        self._stop = control.stop
        self._own_phases = control.phases
        # Then it ends, where generation stands still.
        self._hang_seconds = cfg.trainer.collective_timeout_seconds
        self._place = StackWatcher(threading.get_ident())
        try:
            super().__init__(
                guest,
                device,
                silence_seconds=cfg.trainer.heartbeat_timeout_seconds,
                staleness=cfg.staleness,
                groups=cfg.prompts_under_way,
                inflight=cfg.cache_after_update,
            )
        except ConnectionError:
            if hasattr(self, "_thread"):  # the links were there, and the store was not
                self.close()
            raise
        self.version = -1  # none but those of a file
        self._links.set_beat(self._links.beat_seconds, self._beat)
        self._links.send(0, *encode(arrival))

    @property
    def formed(self) -> Any:
        return self._group

    def fail(self, error: ReinforceError) -> None:
        """Tell the trainers why this generator ends, and raise it."""
        self._links.send(0, *encode(GeneratorFailed(error)))
        raise error

    def _beat(self) -> list[bytes]:
        phase = self._own_phases.phase
        place = self._place.look()
        if (
            phase.name == "generate"
            and (seconds := time.monotonic() - max(place.still_since, phase.since))
            > self._hang_seconds
        ):
            print(
                f"error: generation stands still at {place.line} for {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_LOST_RANK)  # the main thread cannot end
        return [b""]

    def _wait(self, condition: Callable[[], bool], phase: str = "") -> None:
        """As of `GeneratorRank`; where it waits for prompts and is stopped, it ends with what it has under way."""
        super()._wait(lambda: condition() or bool(phase and self._stop.reason), phase)
        if phase and self._stop.reason:
            super()._wait(lambda: not self._unscored, phase)
            self._has_ended = True

    def _ask(self, count: int) -> None:
        if self._stop.reason:
            self._inbox.clear()  # others answer these
        else:
            super()._ask(count)

    def _newest(self) -> int:
        """Return the newest version that all ranks of this generator have: a transfer may fail on one of them."""
        with self._changed:
            own = {self.version, *self._staged}
        of_ranks = self._model.mesh.gather_on_model_parallel_rank_0(own)
        return self._model.mesh.from_model_parallel_rank_0(
            max(set.intersection(*of_ranks)) if of_ranks else None
        )

    def _load(self, version: int) -> None:
        if self._groups is not None:  # a work is given once all ranks have a version for it
            if (newest := self._newest()) > self.version:
                super()._load(newest)
            return
        with self._changed:
            self._wait(lambda: version in self._staged)
            found = self._staged.pop(version)
        exchange_weights(self._model.lm, found)
        with self._changed:
            if self.version >= 0:
                self._staged[self.version] = found
            self.version = version
            self._forget_old()

    def _deliver(self, result: Result, future: RewardFuture | None) -> None:
        if result.completions is None and result.failure is not None:
            raise result.failure  # the work goes to another one
        super()._deliver(result, future)

    def _receive(self) -> None:
        """Receive weights as they are offered, in groups that are formed for it; on a thread of its own."""
        try:
            while (offer := self._next_offer()) is not None:
                fault = ""
                group = self.formed
                try:
                    if group.epoch != offer.epoch or group.fault:
                        group.form(offer.epoch, offer.place, offer.size)
                    found = receive_weights(self._model.lm, group)
                    with self._changed:
                        self._staged[offer.version] = found
                        self._newest_received = max(self._newest_received, offer.version)
                        self._forget_old()
                        self._changed.notify_all()
                except RuntimeError as error:
                    fault = str(error) or type(error).__name__
                    group.close()
                self._links.send(0, *encode(Received(offer.epoch, offer.version, fault)))
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _next_offer(self) -> NewWeights | None:
        with self._changed:
            self._wait(lambda: bool(self._offers) or self._has_ended)
            return self._offers.popleft() if self._offers else None

    def _forget_old(self) -> None:
        for old in [one for one in self._staged if one < self._newest_received - self._kept]:
            del self._staged[old]

    def _take_message(self, message: Message) -> None:
        if isinstance(message, Abandoned):
            self.formed.abandon(message.epoch, message.why)
        elif isinstance(message, NewWeights | Dismissed):
            with self._changed:
                if isinstance(message, NewWeights):
                    self._offers.append(message)
                else:
                    failure = LostRankError(
                        f"the trainers sent this generator away: {message.why}",
                        key="generators.generator.sent_away",
                    )
                    self._failure = self._failure or failure
                self._changed.notify_all()
        else:
            super()._take_message(message)
