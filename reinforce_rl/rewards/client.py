"""Client of the reward server: scores over HTTP as futures, with retries until a deadline.

The public calls are synchronous; the work runs on the event loop of `transport.py`. A failure never becomes a reward.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards import transport, wire
from reinforce_rl.rewards.base import RewardRequest, Rewards
from reinforce_rl.rewards.replicas import Replicas
from reinforce_rl.rewards.transport import Call, FailedAttempt, ModelAddress
from reinforce_rl.rewards.wire import Scores, ServerInfo
from reinforce_rl.utils.net import Address

BAD_ANSWERS_ALLOWED = 3  # a proxy may mix up one answer; one that always does so is broken
DEADLINE_SLACK_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteRewardFuture:
    """Scores that reward servers are computing."""

    _client: RemoteGPTRMClient
    _future: Future[Rewards]
    _call: Call

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Rewards:
        """Wait for the scores, calling the client's `on_wait` now and then.

        Raises RewardServerError if no answer came within the request's deadline, or a wrong one.
        """
        client = self._client
        call = self._call
        while True:
            # An attempt ends by itself at the deadline; the slack is for one that does not.
            left = call.remaining + DEADLINE_SLACK_SECONDS
            if wait([self._future], max(0.0, min(left, client.wait_report_seconds))).done:
                return client._result_of(self._future)
            if left <= 0:
                raise client._replicas.past_deadline(call)
            client._replicas.report(call, without_trouble=True)


class RemoteGPTRMClient:
    """A reward source that asks one `RewardServer`, or several replicas, in the background.

    Args:
        host, port, name: the server's address, and the reward model's name there.
        replicas: further servers of the same model. Each part of a request goes to the one with the fewest outstanding
            samples; one that fails is set aside until it answers again.
        token: the access token, if the servers require one.
        caller: prefix of request ids, such as a run's name and a rank; letters, digits, '.', '_' and '-'.
        deadline_seconds: for a whole request, from `infer_rm` on, including all attempts.
        attempt_timeout_seconds: for one attempt, up to the answer's last byte. Doubles after each one that times out.
        pad_to_length, pad_id: pad rows to this many tokens, since Triton merges only requests of equal width.
        on_wait: called with a sentence on a wait, from any thread, every `wait_report_seconds` or later.
        max_in_flight: parts of requests in flight per server; more are queued.
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
        self.wait_report_seconds = wait_report_seconds
        models = [ModelAddress(place, name, token) for place in (Address(host, port), *replicas)]
        self._replicas = Replicas(
            models, first_backoff_seconds, max_backoff_seconds, on_wait, wait_report_seconds
        )
        self._caller = caller
        self._numbers = itertools.count()
        self._deadline_seconds = deadline_seconds
        self._attempt_timeout_seconds = attempt_timeout_seconds
        self._pad_to_length = pad_to_length
        self._pad_id = pad_id
        self._slots = asyncio.Semaphore(max_in_flight * len(models))
        self._form: str | None = None  # what is sent; None: what the server prefers
        self._sends_chats_as_texts = False  # where the form is tokens
        self._lock = threading.Lock()
        self._closed = False
        self._futures: set[Future[Any]] = set()

    def infer_rm(self, request: RewardRequest) -> RemoteRewardFuture:
        """Start scoring and return at once.

        Raises ValueError if the request's shapes do not match, RewardServerError if the client was closed.
        """
        tokens = request.tokens.shape
        lengths = request.lengths.shape
        if len(tokens) != 2 or lengths != tokens[:1]:
            raise ValueError(
                f"tokens are {list(tokens)} and lengths {list(lengths)}; expected [N, S] and [N]"
            )
        call = Call(
            f"{self._caller}-call{next(self._numbers)}-{uuid.uuid4().hex[:8]}",
            self._deadline_seconds,
        )
        return RemoteRewardFuture(self, self._submit(self._score(request, call)), call)

    def wait_until_ready(self, deadline_seconds: float | None = None) -> ServerInfo:
        """Probe every server, wait for one to be up (default: the client's own deadline), return its description.

        Raises RewardServerError if the deadline passed, another program is on a port, or another model is served.
        """
        return self._describe(deadline_seconds, all_probed=True)[0]

    @property
    def identity(self) -> dict[str, Any]:
        """The server's description of its model; waits for a server if none was up yet, and raises as it does."""
        info = self._describe()[0]
        return {"name": info.name, "attributes": info.attributes, **info.details}

    def missing(self) -> list[str]:
        """Return a sentence for each server that is not up."""
        return [f"The reward server at {trouble}." for trouble in self._replicas.troubles()]

    def check_compatible(
        self, tokenizer_info: TokenizerInfo, vocab_size: int, form: str = wire.AUTO_FORM
    ) -> str:
        """Choose and return the form to send, `tokens` or `text`, as `wire.choose_form` does for the server's info.

        With `form=auto`, samples with messages go as texts even so, if the server reads them: a reward model reads its
        own template's rendering, of which the policy's tokens are only the beginning. Waits for a server if necessary.
        """
        info, model = self._describe()
        self._form = wire.choose_form(info, str(model.place), tokenizer_info, vocab_size, form)
        self._sends_chats_as_texts = form == wire.AUTO_FORM and wire.TEXT_FORM in info.input_forms
        return self._form

    def check_lengths(self, *, shortest: int, longest: int) -> str | None:
        """See `wire.check_lengths`; after `check_compatible`, which chooses the form."""
        info, model = self._describe()
        form = wire.TEXT_FORM if self._sends_chats_as_texts else self._form or info.input_forms[0]
        return wire.check_lengths(info, str(model.place), form, shortest=shortest, longest=longest)

    def close(self) -> None:
        """Cancel what is in flight; its waiters get an error. Safe to call twice."""
        with self._lock:
            self._closed = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()
        transport.submit(self._replicas.close())

    def _describe(
        self, seconds: float | None = None, *, all_probed: bool = False
    ) -> tuple[ServerInfo, ModelAddress]:
        call = Call(
            f"{self._caller}-handshake", self._deadline_seconds if seconds is None else seconds
        )
        return self._result_of(self._submit(self._replicas.describe(call, all_probed=all_probed)))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise RewardServerError(
                    f"the client of the {self._replicas.title} is closed",
                    key="reward_server.client.closed",
                )
            future = transport.submit(work)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _result_of(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise RewardServerError(
                f"the client of the {self._replicas.title} was closed",
                key="reward_server.client.closed",
            ) from None

    async def _score(self, request: RewardRequest, call: Call) -> Rewards:
        """Split a request into parts, score them concurrently, and join the scores."""
        if len(request.lengths) == 0:
            return Rewards(torch.zeros(0), torch.zeros(0, dtype=torch.int32))
        info, _ = await self._replicas.describe(call)
        form = self._form or info.input_forms[0]
        groups = self._rows_by_form(request, form)
        split = []
        for form_of_rows, rows in groups.items():
            part = request if len(groups) == 1 else request.select(rows)
            arrays = wire.request_arrays(part, form_of_rows, self._pad_to_length, self._pad_id)
            split += wire.split(arrays, info)
        failed = asyncio.Event()

        async def score(number: int, part: dict[str, np.ndarray]) -> Scores:
            async with self._slots:
                if failed.is_set():
                    raise asyncio.CancelledError
                try:
                    return await self._attempts(
                        part, len(info.attributes), replace(call, id=f"{call.id}-{number}")
                    )
                except Exception:
                    failed.set()  # before the next part gets this slot
                    raise

        tasks = [asyncio.create_task(score(number, part)) for number, part in enumerate(split)]
        try:
            parts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        in_order = np.argsort([row for rows in groups.values() for row in rows])
        values, status, attributes = (
            torch.from_numpy(np.concatenate(column)[in_order])
            for column in zip(*parts, strict=True)
        )
        columns = {name: attributes[:, k].contiguous() for k, name in enumerate(info.attributes)}
        return Rewards(values, status, columns)

    def _rows_by_form(self, request: RewardRequest, form: str) -> dict[str, list[int]]:
        """Return the rows of a request, which is not empty, by the form in which they are sent."""
        messages = request.messages or ((),) * len(request.lengths)
        groups: dict[str, list[int]] = {}
        for row, conversation in enumerate(messages):
            as_text = self._sends_chats_as_texts and bool(conversation)
            groups.setdefault(wire.TEXT_FORM if as_text else form, []).append(row)
        return groups

    async def _attempts(self, arrays: dict[str, np.ndarray], attributes: int, call: Call) -> Scores:
        """Ask one server after another until one has scored this part."""
        count = len(next(iter(arrays.values())))
        timeout = self._attempt_timeout_seconds
        bad_answers = 0
        place = None
        while True:
            try:
                async with self._replicas.lease(count, call) as model:
                    place = model.place
                    seconds = max(min(timeout, call.remaining), 0.001)
                    return await transport.infer(model, arrays, attributes, seconds, call.id)
            except FailedAttempt as failure:
                bad_answers += failure.bad_answer
                if bad_answers >= BAD_ANSWERS_ALLOWED:
                    raise RewardServerError(
                        f"{bad_answers} wrong answers: the reward server at {place} {failure}",
                        key="reward_server.answer.wrong",
                    ) from failure
                if failure.timed_out:
                    timeout *= 2
            self._replicas.report(call)
