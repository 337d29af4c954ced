"""The trainer's side of the reward server: scores over HTTP as futures, through restarts and network faults.

What its users call is not asynchronous; what they call for runs on the event loop of `transport.py`.

A failed call never becomes a reward. It is tried again until the request's deadline, at whichever server of the model
is up, and then it is an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.base import RewardRequest, Rewards
from reinforce_rl.rewards.replicas import Deadline, NoServerInTime, Replicas
from reinforce_rl.rewards.transport import FailedAttempt, Scores, infer, submit
from reinforce_rl.rewards.wire import ServerInfo, choose_form, request_arrays, split
from reinforce_rl.utils.addresses import Address, ModelAddress
from reinforce_rl.utils.choices import AUTO_FORM

logger = logging.getLogger(__name__)

BAD_ANSWERS_ALLOWED = 3  # a proxy may mix up one answer; one that always does so is broken
DEADLINE_SLACK_SECONDS = 1.0

T = TypeVar("T")


class RemoteRewardFuture:
    """Scores that reward servers are computing."""

    def __init__(self, client: RemoteGPTRMClient, future: Future[Rewards], deadline: Deadline, id: str):
        self._client = client
        self._future = future
        self._deadline = deadline
        self._id = id

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()

    def result(self) -> Rewards:
        """Wait for the scores; calls the client's `on_wait` now and then.

        Raises:
            RewardServerError: no answer within the request's deadline, or a wrong one.
        """
        while True:
            # An attempt ends by itself at the deadline; the slack is for one that does not.
            left = self._deadline.remaining + DEADLINE_SLACK_SECONDS
            if wait([self._future], max(0.0, min(left, self._client.wait_report_seconds))).done:
                return self._client._result_of(self._future)
            if left <= 0:
                raise self._client._past_deadline(self._deadline, self._id)
            self._client._report(self._deadline, self._id, without_trouble=True)


class RemoteGPTRMClient:
    """A reward source that asks one `RewardServer` or several of the same model, in the background.

    Args:
        host, port: where the server listens.
        name: the reward model's name there.
        replicas: further servers of the same model. Each part of a request goes to the one with the fewest samples
            outstanding; one that fails is set aside until it answers again.
        token: the access token, where the servers ask for one.
        caller: begins the ids of the requests; letters, digits, '.', '_' and '-', such as a run's name and a rank.
        deadline_seconds: for a whole request, from `infer_rm` on, every attempt included.
        attempt_timeout_seconds: for one attempt, from the connection to the answer's last byte. It doubles after each
            attempt that took longer, so that a slow server gets done in the end.
        pad_to_length: tokens that rows are padded to; Triton merges only requests of equal width. None: not padded.
        pad_id: the token id for it. The server never reads it.
        on_wait: called with a sentence for people while no server answers, from any thread.
        wait_report_seconds: the least time between two such calls.
        max_in_flight: parts of requests that are under way at the same time, for each server; more are queued.
        first_backoff_seconds, max_backoff_seconds: the pause between attempts grows from one to the other.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = wire.DEFAULT_PORT,
        name: str = wire.DEFAULT_NAME,
        *,
        replicas: Sequence[Address] = (),
        token: str | None = None,
        caller: str = "client",
        deadline_seconds: float = 600.0,
        attempt_timeout_seconds: float = 180.0,
        pad_to_length: int | None = None,
        pad_id: int = 0,
        on_wait: Callable[[str], None] | None = None,
        wait_report_seconds: float = 5.0,
        max_in_flight: int = 2,
        first_backoff_seconds: float = 0.25,
        max_backoff_seconds: float = 10.0,
    ):
        self.port = port
        self.name = name
        self.wait_report_seconds = wait_report_seconds
        places = [Address(host, port), *replicas]
        models = [ModelAddress(place, name, token) for place in places]
        self._replicas = Replicas(models, first_backoff_seconds, max_backoff_seconds)
        self._first_place = places[0]
        self._caller = caller
        self._numbers = itertools.count()
        self._deadline_seconds = deadline_seconds
        self._attempt_timeout_seconds = attempt_timeout_seconds
        self._pad_to_length = pad_to_length
        self._pad_id = pad_id
        self._on_wait = on_wait
        self._slots = asyncio.Semaphore(max_in_flight * len(places))
        self._lock = threading.Lock()
        self._form: str | None = None  # what is sent; None: what the server prefers
        self._next_report = 0.0
        self._closed = False
        self._futures: set[Future[Any]] = set()

    def infer_rm(self, request: RewardRequest) -> RemoteRewardFuture:
        """Start scoring and return at once.

        Raises:
            ValueError: the request's shapes do not fit each other.
            RewardServerError: the client was closed.
        """
        _check_request(request)
        request_id = f"{self._caller}-call{next(self._numbers)}-{uuid.uuid4().hex[:8]}"
        deadline = Deadline(self._deadline_seconds)
        return RemoteRewardFuture(self, self._submit(self._score(request, deadline, request_id)), deadline, request_id)

    def wait_until_ready(self, deadline_seconds: float | None = None) -> ServerInfo:
        """Ask every server who it is, and wait until one is up, saying what is being waited for.

        Args:
            deadline_seconds: how long; None means the client's own deadline.

        Raises:
            RewardServerError: the deadline passed, another program is on a port, or another model is served.
        """
        deadline = Deadline(self._deadline_seconds if deadline_seconds is None else deadline_seconds)
        request_id = f"{self._caller}-handshake"
        return self._result_of(self._submit(self._bounded(self._replicas.ready, deadline, request_id)))[0]

    def missing(self) -> list[str]:
        """A sentence for each server that is not up while others are, for people."""
        return [f"The reward server at {trouble}." for trouble in self._replicas.troubles()]

    def check_compatible(self, tokenizer_info: TokenizerInfo, vocab_size: int, form: str = AUTO_FORM) -> str:
        """Choose what to send, and make sure that tokens mean the same here and there where they are sent.

        Waits for a server where that was not done yet.

        Args:
            tokenizer_info: of the actor's tokenizer.
            vocab_size: the actor can produce ids 0 .. vocab_size-1.
            form: `tokens`, `text`, or `auto`: tokens where they mean the same, else text where the server reads it.

        Returns:
            the form that will be sent.

        Raises:
            ConfigError: the server does not read this form, or reads other tokens; every difference is named.
        """
        described = self._describe(Deadline(self._deadline_seconds), f"{self._caller}-handshake")
        info, model = self._result_of(self._submit(described))
        self._form = choose_form(info, str(model.place), tokenizer_info, vocab_size, form)
        return self._form

    def close(self) -> None:
        """End what is under way, with an error for whoever waits for it. Safe to call twice."""
        with self._lock:
            closed, self._closed = self._closed, True
            futures = list(self._futures)
        for future in futures:
            future.cancel()
        if not closed:
            submit(self._replicas.close())

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise RewardServerError(f"the client of the {self._replicas.title} is closed")
            future = submit(work)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _result_of(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise RewardServerError(f"the client of the {self._replicas.title} was closed") from None

    async def _score(self, request: RewardRequest, deadline: Deadline, request_id: str) -> Rewards:
        """Cut a request into parts, which share servers and slots, and join their scores."""
        if len(request.lengths) == 0:
            return Rewards(torch.zeros(0), torch.zeros(0, dtype=torch.int32))
        info, _ = await self._describe(deadline, request_id)
        arrays = request_arrays(request, self._form or info.input_forms[0], self._pad_to_length, self._pad_id)
        failed = asyncio.Event()

        async def score(number: int, part: dict[str, np.ndarray]) -> Scores:
            async with self._slots:
                if failed.is_set():
                    raise asyncio.CancelledError
                id = f"{request_id}-{number}"
                try:
                    return await self._bounded(partial(self._attempt, part, len(info.attributes), id), deadline, id)
                except Exception:
                    failed.set()  # before the next part gets this slot
                    raise

        tasks = [asyncio.create_task(score(number, part)) for number, part in enumerate(split(arrays, info))]
        try:
            return _rewards_of(Scores(*map(np.concatenate, zip(*await asyncio.gather(*tasks), strict=True))), info)
        finally:
            for task in tasks:
                task.cancel()

    async def _attempt(
        self,
        arrays: dict[str, np.ndarray],
        attributes: int,
        request_id: str,
        deadline: Deadline,
        waiting: Callable[[], None],
    ) -> Scores:
        """Ask one server after another until one has scored this part."""
        count = len(next(iter(arrays.values())))
        timeout = self._attempt_timeout_seconds
        bad_answers = 0
        while True:
            async with self._replicas.lease(count, deadline, waiting) as lease:
                try:
                    seconds = max(min(timeout, deadline.remaining), 0.001)
                    scores = await infer(lease.model, arrays, attributes, seconds, request_id)
                    self._replicas.succeeded(lease)
                    return scores
                except FailedAttempt as failure:
                    self._replicas.failed(lease, failure)
                    bad_answers += failure.bad_answer
                    if bad_answers >= BAD_ANSWERS_ALLOWED:
                        raise RewardServerError(
                            f"{bad_answers} wrong answers: the reward server at {lease.model.place} {failure}"
                        ) from failure
                    if failure.timed_out:
                        timeout *= 2
            waiting()

    async def _describe(self, deadline: Deadline, request_id: str) -> tuple[ServerInfo, ModelAddress]:
        return await self._bounded(self._replicas.describe, deadline, request_id)

    async def _bounded(
        self, ask: Callable[[Deadline, Callable[[], None]], Awaitable[T]], deadline: Deadline, request_id: str
    ) -> T:
        """What `ask` returns, with reports meanwhile, and an error that says what to check at the deadline."""
        try:
            return await ask(deadline, partial(self._report, deadline, request_id))
        except NoServerInTime:
            raise self._past_deadline(deadline, request_id) from None

    def _report(self, deadline: Deadline, request_id: str, *, without_trouble: bool = False) -> None:
        """Tell people what is wrong, at most every `wait_report_seconds` over all threads.

        Args:
            deadline: of what waits.
            request_id: its name.
            without_trouble: where nothing is wrong, say that it takes long; else say nothing.
        """
        troubles = self._replicas.troubles()
        if not troubles and not without_trouble:
            return
        several = self._replicas.several
        text = "; ".join(troubles)
        if self._replicas.all_in_trouble():
            text += "; retrying"
        else:
            text += f"{'; the rest ' if troubles else ''}{'have' if several else 'has'} not answered yet; waiting"
        logger.debug("event=reward_retry id=%s %s", request_id, text)
        with self._lock:
            if time.monotonic() < self._next_report:
                return
            self._next_report = time.monotonic() + self.wait_report_seconds
        title = "reward servers:" if several and troubles else self._replicas.title
        sentence = f"{title} {text}, {deadline.elapsed:.0f} s of {deadline.seconds:.0f} s"
        level = logging.WARNING if troubles else logging.INFO
        if self._on_wait is not None:
            self._on_wait(sentence)
            level = logging.INFO  # people have been told; a warning would tell them twice
        logger.log(level, "%s (request %s)", sentence, request_id)

    def _past_deadline(self, deadline: Deadline, request_id: str) -> RewardServerError:
        last = "; ".join(self._replicas.troubles()) or "it has not answered"
        servers = "reward servers" if self._replicas.several else "reward server"
        return RewardServerError(
            f"no answer of the {servers} at {self._replicas.places} (model '{self.name}') within "
            f"{deadline.seconds:.0f} s; the last error: {last}. Check that it runs "
            f"(curl http://{self._first_place}/v2/health/ready), that its log shows no error, and that this "
            "machine can reach that host and port; the request's id there and here is "
            f"{request_id}. Start it again on the same port and continue the run."
        )


def _rewards_of(scores: Scores, info: ServerInfo) -> Rewards:
    by_name = torch.from_numpy(scores.attributes).t()
    return Rewards(
        torch.from_numpy(scores.values),
        torch.from_numpy(scores.status),
        {name: column.contiguous() for name, column in zip(info.attributes, by_name, strict=True)},
    )


def _check_request(request: RewardRequest) -> None:
    if request.tokens.ndim != 2 or request.lengths.shape != request.tokens.shape[:1]:
        raise ValueError(
            f"tokens are {list(request.tokens.shape)} and lengths {list(request.lengths.shape)}; "
            "expected [N, S] and [N]"
        )
