"""Client of the reward server: scores over HTTP as futures, with retries until a deadline.

`RemoteGPTRMClient` splits a request into parts and joins their scores. `Replicas` chooses the
server of each attempt. The public calls are synchronous; the work runs on the event loop of
`transport.py`. A failure never becomes a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import ConfigError, Fault, RewardServerError
from reinforce_rl.rewards import transport, wire
from reinforce_rl.rewards.base import RewardRequest, Rewards
from reinforce_rl.rewards.transport import Backoff, Call, FailedAttempt, ModelAddress
from reinforce_rl.rewards.wire import Scores, ServerInfo
from reinforce_rl.utils.net import Address

logger = logging.getLogger(__name__)

BAD_ANSWERS_ALLOWED = 3  # a proxy may mix up one answer; one that always does so is broken
DEADLINE_SLACK_SECONDS = 1.0
REPORT_CHECK_SECONDS = 1.0  # how often a waiter checks whether a report is due
QUIET_REPORTS = 6  # of a call that nothing is wrong with

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteRewardFuture:
    """Scores that reward servers are computing."""

    _future: Future[Rewards]
    _call: Call
    _replicas: Replicas
    _report_seconds: float

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Rewards:
        """Wait for the scores, calling the client's `on_wait` now and then.

        Raises RewardServerError if no answer came within the request's deadline, or a wrong one.
        """
        while True:
            # An attempt ends by itself at the deadline; the slack is for one that does not.
            left = self._call.remaining + DEADLINE_SLACK_SECONDS
            if wait([self._future], max(0.0, min(left, self._report_seconds))).done:
                return self._replicas.result_of(self._future)
            if left <= 0:
                raise self._replicas.past_deadline(self._call)
            self._replicas.report(self._call, without_trouble=True)


class RemoteGPTRMClient:
    """A reward source that asks one `RewardServer`, or several replicas, in the background.

    Args:
        host, port, name: the server's address, and the reward model's name there.
        replicas: further servers of the same model. Each part of a request goes to the one with the
            fewest outstanding samples; one that fails is set aside until it answers again.
        token: the access token, if the servers require one.
        caller: prefix of request ids, such as a run's name and a rank; letters, digits, '.', '_'
            and '-'.
        deadline_seconds: for a whole request, from `infer_rm` on, including all attempts.
        attempt_timeout_seconds: for one attempt, up to the answer's last byte. Doubles after each
            one that times out.
        pad_to_length, pad_id: pad rows to this many tokens, since Triton merges only requests of
            equal width.
        on_wait: called with a sentence on a wait, from any thread, every `wait_report_seconds` or
            later.
        max_in_flight: parts of requests in flight per server; more are queued.
        first_backoff_seconds, max_backoff_seconds: the pause between attempts grows from one to the
            other.
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
        self._report_seconds = wait_report_seconds
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

        Raises ValueError if the request's shapes do not match, RewardServerError if the client was
        closed.
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
        future = self._submit(self._score(request, call))
        return RemoteRewardFuture(future, call, self._replicas, self._report_seconds)

    def wait_until_ready(self, deadline_seconds: float | None = None) -> ServerInfo:
        """Probe every server, wait for one to be up (default: the client's own deadline), return
        its description.

        Raises RewardServerError if the deadline passed, another program is on a port, or another
        model is served.
        """
        return self._describe(deadline_seconds, all_probed=True)[0]

    @property
    def identity(self) -> dict[str, Any]:
        """The server's description of its model; waits for a server if none was up yet, and raises
        as it does.
        """
        info = self._describe()[0]
        return {"name": info.name, "attributes": info.attributes, **info.details}

    def missing(self) -> list[str]:
        """Return a sentence for each server that is not up."""
        return [f"The reward server at {trouble}." for trouble in self._replicas.troubles()]

    def check_compatible(
        self, tokenizer_info: TokenizerInfo, vocab_size: int, form: str = wire.AUTO_FORM
    ) -> str:
        """Choose and return the form to send, `tokens` or `text`, as `choose_form` does for the
        server's info.

        With `form=auto`, samples with messages go as texts even so, if the server reads them: a
        reward model reads its own template's rendering, of which the policy's tokens are only the
        beginning. Waits for a server if necessary.
        """
        info, model = self._describe()
        self._form = choose_form(info, str(model.place), tokenizer_info, vocab_size, form)
        self._sends_chats_as_texts = form == wire.AUTO_FORM and wire.TEXT_FORM in info.input_forms
        return self._form

    def check_lengths(self, *, shortest: int, longest: int) -> str | None:
        """See the function `check_lengths`; after `check_compatible`, which chooses the form."""
        info, model = self._describe()
        form = wire.TEXT_FORM if self._sends_chats_as_texts else self._form or info.input_forms[0]
        return check_lengths(info, str(model.place), form, shortest=shortest, longest=longest)

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
        future = self._submit(self._replicas.describe(call, all_probed=all_probed))
        return self._replicas.result_of(future)

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


@dataclass
class _Replica:
    model: ModelAddress
    backoff: Backoff  # between two probes
    turn: int  # when it last got a request; breaks ties
    info: ServerInfo | None = None  # once it was up
    up: bool = False  # may be asked for scores
    probes: int = 0  # how often it was found up
    outstanding: int = 0  # samples
    trouble: str | None = None  # last problem; once it was up, None only after scores
    fatal: RewardServerError | None = None  # why the last probe found that it cannot be used at all


class Replicas:
    """Probes each server until it is up, and routes requests to the servers that are up.

    A request goes to the server with the fewest outstanding samples. One that fails is set aside
    for a growing pause and probed again; its description must equal its former one and the
    descriptions of the others.

    Coroutines and state changes belong to one event loop; the arguments are those of
    `RemoteGPTRMClient`.
    """

    def __init__(
        self,
        models: Sequence[ModelAddress],
        first_backoff_seconds: float,
        max_backoff_seconds: float,
        on_wait: Callable[[str], None] | None,
        wait_report_seconds: float,
    ):
        self._on_wait = on_wait
        self._report_seconds = wait_report_seconds
        # Random first turns, so that the first requests of all ranks do not go to the same server.
        # Not of the global generator, which is the trainer's.
        turns = random.Random().sample(range(-len(models), 0), len(models))
        self._replicas: list[_Replica] = []
        for model, turn in zip(models, turns, strict=True):
            backoff = Backoff(first_backoff_seconds, max_backoff_seconds)
            self._replicas.append(_Replica(model, backoff, turn))
        self._turns = itertools.count()
        self._described: tuple[ServerInfo, ModelAddress] | None = None
        self._difference: Fault | None = None  # two servers of different models: nothing can go on
        # done at the next change, and then replaced
        self._changed: asyncio.Future[None] | None = None
        self._probing: set[asyncio.Task[None]] = set()
        self._next_report = 0.0
        self._report_lock = threading.Lock()
        self._several = len(models) > 1
        self._kind = "reward servers" if self._several else "reward server"
        self._places = ", ".join(str(model.place) for model in models)
        self.title = f"{self._kind} {self._places}"  # for messages

    def troubles(self) -> list[str]:
        """Return what is wrong with each failing server, prefixed by its address if there are
        several.
        """
        failing = [
            (replica.model.place, replica.trouble)
            for replica in self._replicas
            if replica.trouble is not None
        ]
        return [f"{place} {trouble}" if self._several else trouble for place, trouble in failing]

    def report(self, call: Call, *, without_trouble: bool = False) -> None:
        """Report what is wrong, or after a while also that nothing is, at most every
        `wait_report_seconds`.
        """
        troubles = self.troubles()
        if not troubles and (
            not without_trouble or call.elapsed < QUIET_REPORTS * self._report_seconds
        ):
            return
        text = "; ".join(troubles)
        if len(troubles) == len(self._replicas):
            text += "; retrying"
        else:
            samples = sum(replica.outstanding for replica in self._replicas)
            now = f"{'are' if self._several else 'is'} scoring {samples} samples"
            silent = f"{'have' if self._several else 'has'} not answered yet; waiting"
            text += f"{'; the rest ' if troubles else ''}{now if samples else silent}"
        logger.debug("event=reward_retry id=%s %s", call.id, text)
        with self._report_lock:
            if time.monotonic() < self._next_report:
                return
            self._next_report = time.monotonic() + self._report_seconds
        title = "reward servers:" if self._several and troubles else self.title
        sentence = f"{title} {text}, {call.elapsed:.0f} s of {call.seconds:.0f} s"
        if self._on_wait is not None:
            self._on_wait(sentence)
        is_warning = troubles and self._on_wait is None  # else it would be shown twice
        logger.log(
            logging.WARNING if is_warning else logging.INFO, "%s (request %s)", sentence, call.id
        )

    def result_of(self, future: Future[T]) -> T:
        """Return a future's result; RewardServerError if the client was closed meanwhile."""
        try:
            return future.result()
        except CancelledError:
            raise RewardServerError(
                f"the client of the {self.title} was closed",
                key="reward_server.client.closed",
            ) from None

    def past_deadline(self, call: Call) -> RewardServerError:
        """Return the error for a call whose deadline passed, with what to check."""
        model = self._replicas[0].model
        last = "; ".join(self.troubles()) or "it has not answered"
        return RewardServerError(
            f"no answer of the {self._kind} at {self._places} (model '{model.name}') within "
            f"{call.seconds:.0f} s; the last error: {last}. Check that it runs (curl "
            f"http://{model.place}/v2/health/ready), that its log shows no error, and that this "
            f"machine can reach that host and port; the request's id there and here is {call.id}. "
            "Start it again on the same port and continue the run.",
            key="reward_server.server.no_answer",
        )

    async def describe(
        self, call: Call, *, all_probed: bool = False
    ) -> tuple[ServerInfo, ModelAddress]:
        """Wait until one server is up; return its description and address.

        `all_probed` probes every server first, and raises if any cannot be used at all. Raises
        RewardServerError if the deadline passed, no server can be used, or two serve different
        models.
        """

        def inspect() -> tuple[ServerInfo, ModelAddress] | None:
            if not all_probed:
                return self._described
            for replica in self._replicas:
                if replica.fatal is not None:
                    raise RewardServerError(str(replica.fatal), key=replica.fatal.key)
            probed = all(
                replica.info is not None or replica.trouble is not None
                for replica in self._replicas
            )
            any_up = any(replica.up for replica in self._replicas)
            return self._described if any_up and (probed or call.remaining <= 0) else None

        return await self._wait(inspect, call)

    @contextlib.asynccontextmanager
    async def lease(self, samples: int, call: Call) -> AsyncIterator[ModelAddress]:
        """Wait for and lend the least busy server; raises as `describe` does.

        A FailedAttempt that leaves the block sets the server aside; a normal exit marks it as
        healthy.
        """

        def choose() -> _Replica | None:
            up = [replica for replica in self._replicas if replica.up and call.remaining > 0]
            return min(up, key=lambda replica: (replica.outstanding, replica.turn), default=None)

        replica = await self._wait(choose, call)
        replica.turn = next(self._turns)
        probes = replica.probes
        replica.outstanding += samples
        try:
            yield replica.model
            if replica.trouble is not None and self._several:
                logger.info("event=reward_server_recovered place=%s", replica.model.place)
            replica.trouble = None
            replica.backoff.reset()
        except FailedAttempt as failure:
            if replica.up and replica.probes == probes:  # else another request has reported it
                if replica.trouble is None and self._several:
                    logger.warning(
                        "event=reward_server_suspended place=%s reason=%s",
                        replica.model.place,
                        failure,
                    )
                replica.up = False
                replica.trouble = str(failure)
                replica.fatal = failure.fatal
                self._wake()
                pause = replica.backoff.next_pause(failure.retry_after)
                self._probe_in_background(replica, pause)
            raise
        finally:
            replica.outstanding -= samples

    async def close(self) -> None:
        """Cancel the background probes."""
        for task in self._probing:
            task.cancel()

    async def _wait(self, inspect: Callable[[], T | None], call: Call) -> T:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
            for replica in self._replicas:
                self._probe_in_background(replica, 0.0)
        while True:
            if self._difference is not None:
                raise RewardServerError(self._difference, key=self._difference.key)
            result = inspect()
            if result is not None:
                return result
            fatal = [replica.fatal for replica in self._replicas if replica.fatal is not None]
            if len(fatal) == len(self._replicas):
                raise RewardServerError(str(fatal[0]), key=fatal[0].key)
            if call.remaining <= 0:
                raise self.past_deadline(call)
            self.report(call)
            # Not wait_for, which before Python 3.12 drops a cancellation that comes with the
            # change.
            await asyncio.wait(
                {self._changed}, timeout=max(0.0, min(call.remaining, REPORT_CHECK_SECONDS))
            )

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    def _probe_in_background(self, replica: _Replica, pause: float) -> None:
        task = asyncio.create_task(self._probe(replica, pause))
        self._probing.add(task)  # the loop itself holds tasks by weak references
        task.add_done_callback(self._probing.discard)

    async def _probe(self, replica: _Replica, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            retry_after = None
            fatal = None
            try:
                self._accept(
                    replica, await transport.ask_description(replica.model, transport.PROBE_SECONDS)
                )
                return
            except FailedAttempt as error:
                trouble = str(error)
                retry_after = error.retry_after
            except Exception as error:  # a bug too: it must not end the task unnoticed
                if isinstance(error, RewardServerError):
                    fatal = error
                else:
                    fatal = RewardServerError(
                        repr(error), key="reward_server.client.unexpected_error"
                    )
                trouble = f"cannot be used: {fatal}"
            if replica.trouble != trouble and replica.info is None and self._several:
                logger.warning(
                    "event=reward_server_unreachable place=%s reason=%s",
                    replica.model.place,
                    trouble,
                )
            replica.trouble = trouble
            replica.fatal = fatal
            self._wake()
            pause = replica.backoff.next_pause(retry_after)

    def _accept(self, replica: _Replica, info: ServerInfo) -> None:
        """Mark a server as up if its description is the expected one."""
        self._described = self._described or (info, replica.model)
        known, by = self._described
        replica.fatal = None
        if replica.info is not None and (
            differences := replica.info.differences(info, "before", "now")
        ):
            self._difference = Fault(
                f"the reward server at {replica.model.place} was replaced by another one during "
                f"the run ({'; '.join(differences)}). Start the previous server, or restart the "
                "run.",
                key="reward_server.server.replaced",
            )
        elif differences := known.differences(info, f"at {by.place}", f"at {replica.model.place}"):
            self._difference = wire.unlike(by.place, replica.model.place, differences)
        else:
            if replica.info is None:
                replica.trouble = None
            replica.info = info
            replica.up = True
            replica.probes += 1
        self._wake()


def choose_form(
    info: ServerInfo, place: str, tokenizer: TokenizerInfo, vocab_size: int, form: str
) -> str:
    """Choose `tokens` or `text` for a server.

    Args:
        place: HOST:PORT, for messages.
        tokenizer: the actor's, which can produce ids 0 .. vocab_size-1.
        form: tokens, text, or auto, which prefers tokens if they mean the same on both sides, else
            texts.

    Raises ConfigError if the server does not read this form, or reads other tokens; names every
    difference.
    """
    reads_text = wire.TEXT_FORM in info.input_forms
    if form != wire.AUTO_FORM and form not in info.input_forms:
        no_text = "its tokenizer has no chat template"
        why = "it serves a reward function" if form == wire.TOKENS_FORM else no_text
        sentence = f"the reward server at {place} does not read {form}, since {why}; set input=auto"
        raise ConfigError([Fault(sentence, key="reward_server.input.not_read")])
    if reads_text and (form == wire.TEXT_FORM or info.tokenizer is None):
        return wire.TEXT_FORM
    errors = [] if info.tokenizer is None else tokenizer.differences(info.tokenizer)
    if info.vocab_size is not None and vocab_size > info.vocab_size:
        errors.append(
            f"the actor can produce {vocab_size} token ids, the reward model knows "
            f"{info.vocab_size}"
        )
    if not errors:
        return wire.TOKENS_FORM
    if form == wire.AUTO_FORM and reads_text:
        return wire.TEXT_FORM
    template = "give the reward model's tokenizer a chat template, so that texts can be sent"
    texts = "set input=auto, so that texts are sent" if reads_text else template
    advice = (
        "Serve a reward model of the actor's tokenizer, load the actor that belongs to it, or "
        f"{texts}"
    )
    head = f"the reward server at {place} reads other tokens than the actor writes"
    faults: list[Fault] = []
    for error in errors:
        faults.append(Fault(f"{head}: {error}. {advice}", key="reward_server.tokens.differ"))
    raise ConfigError(faults)


def check_lengths(
    info: ServerInfo, place: str, form: str, *, shortest: int, longest: int
) -> str | None:
    """Return a warning if a sample can be longer than the server reads, which refuses such samples;
    else None.

    Args:
        place: HOST:PORT, for messages.
        form: in which samples are sent. Texts are counted in the reward model's tokens, so a
            warning is a guess.
        shortest, longest: tokens of a sequence, by the actor's tokenizer.

    Raises ConfigError if no sample can be short enough.
    """
    if info.max_length is None or longest <= info.max_length:
        return None
    limit = (
        f"the reward server at {place} reads at most {info.max_length} tokens "
        "(reward_model.max_length of serve)"
    )
    advice = (
        f"set model.encoder_seq_length to {info.max_length} at most, or serve a reward model that "
        "reads more"
    )
    if form == wire.TOKENS_FORM and shortest > info.max_length:
        least = "model.reinforce.length_params.min_length and a prompt of one token"
        sentence = f"{limit}, but a sequence has at least {shortest} ({least}); {advice}"
        raise ConfigError([Fault(sentence, key="reward_server.length.too_short")])
    counted = "" if form == wire.TOKENS_FORM else ", here in tokens of the policy,"
    return (
        f"{limit}, and prompt and response together{counted} may have {longest} "
        "(model.encoder_seq_length). A sample that is longer is not cut: it has no reward and is "
        "not trained on, and above the share trainer.reinforce.max_failed_fraction the run ends. "
        f"To avoid that, {advice}"
    )
