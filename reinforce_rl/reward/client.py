"""The trainer's side of the reward server: scores over HTTP as futures, through restarts and network faults.

A failed call never becomes a reward. It is tried again until the request's deadline, and then it is an error.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from reinforce_rl.errors import RewardServerError
from reinforce_rl.reward import access, protocol
from reinforce_rl.reward.base import RewardRequest, Rewards
from reinforce_rl.reward.handshake import AUTO_FORM, choose_form
from reinforce_rl.reward.health import NotReadyYet, check_once, text_of, token_refused
from reinforce_rl.reward.http_call import HttpAnswer, call, reason_of
from reinforce_rl.reward.protocol import ServerInfo
from reinforce_rl.reward.text_form import text_arrays
from reinforce_rl.tokenizer import TokenizerInfo

logger = logging.getLogger(__name__)

PROBE_SECONDS = 10.0  # for one question about health
UNKNOWN_MODEL_SECONDS = 30.0  # a starting server may lack its models for so long
BAD_ANSWERS_ALLOWED = 3  # a proxy may cut one answer short; a server that always does so is broken
DEADLINE_SLACK_SECONDS = 1.0
RETRIED_CODES = (408, 425, 429)  # besides every 5xx

T = TypeVar("T")


class _Transient(Exception):
    """An attempt failed in a way that another attempt may mend."""

    def __init__(
        self, text: str, *, timed_out: bool = False, bad_answer: bool = False, retry_after: float | None = None
    ):
        super().__init__(text)
        self.timed_out = timed_out
        self.bad_answer = bad_answer
        self.retry_after = retry_after


class _Deadline:
    """How long something has been going on, and how long it still may."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        return self.seconds - self.elapsed


@dataclass(frozen=True)
class _Job:
    request: RewardRequest
    deadline: _Deadline
    future: Future[Rewards]
    id: str  # of the call, in this side's log and in the server's


class RemoteRewardFuture:
    """Scores that a reward server is computing."""

    def __init__(self, client: RemoteGPTRMClient, future: Future[Rewards], deadline: _Deadline, request_id: str):
        self._client = client
        self._future = future
        self._deadline = deadline
        self._request_id = request_id

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()

    def result(self) -> Rewards:
        """Wait for the scores; calls the client's `on_wait` now and then.

        Raises:
            RewardServerError: no answer within the request's deadline, or a wrong one.
        """
        client = self._client
        while True:
            # An attempt ends by itself at the deadline; the slack is for one that does not.
            left = max(self._deadline.remaining + DEADLINE_SLACK_SECONDS, 0.0)
            try:
                return self._future.result(min(left, client.wait_report_seconds))
            except FutureTimeoutError:
                if self._future.done():
                    continue
                if self._deadline.remaining + DEADLINE_SLACK_SECONDS <= 0:
                    raise client._past_deadline(self._deadline, "it has not answered", self._request_id) from None
                state = f"{client._trouble}; retrying" if client._trouble else "has not answered yet; waiting"
                client._report(state, self._deadline, self._request_id, warn=False)


class RemoteGPTRMClient:
    """A reward source that asks a `RewardServer`, from threads of its own.

    Args:
        host, port: where the server listens.
        name: the reward model's name there.
        token: the access token, where the server asks for one.
        caller: begins the ids of the requests; letters, digits, '.', '_' and '-', such as a run's name and a rank.
        deadline_seconds: for a whole request, from `infer_rm` on, every attempt included.
        attempt_timeout_seconds: network silence after which one attempt is given up. It doubles after each such
            attempt, so that a slow server gets done in the end.
        pad_to_length: tokens that rows are padded to; Triton merges only requests of equal width. None: not padded.
        pad_id: the token id for it. The server never reads it.
        on_wait: called with a sentence for people while the server does not answer, from any thread.
        wait_report_seconds: the least time between two such calls.
        max_in_flight: requests that are under way at the same time; more are queued.
        first_backoff_seconds, max_backoff_seconds: the pause between attempts grows from one to the other.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = protocol.DEFAULT_PORT,
        name: str = protocol.DEFAULT_NAME,
        *,
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
        self.host = host
        self.port = port
        self.name = name
        self.wait_report_seconds = wait_report_seconds
        self._token = token
        self._caller = caller
        self._calls = itertools.count()
        self._deadline_seconds = deadline_seconds
        self._attempt_timeout_seconds = attempt_timeout_seconds
        self._pad_to_length = pad_to_length
        self._pad_id = pad_id
        self._on_wait = on_wait
        self._max_in_flight = max_in_flight
        self._first_backoff_seconds = first_backoff_seconds
        self._max_backoff_seconds = max_backoff_seconds
        self._random = random.Random()  # its own, so that jitter does not touch the trainer's random state
        self._lock = threading.Lock()
        self._info: ServerInfo | None = None
        self._form: str | None = None  # what is sent; None: what the server prefers
        self._next_report = 0.0
        self._trouble: str | None = None  # why the last attempt failed; None after one that did not
        self._closed = threading.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def infer_rm(self, request: RewardRequest) -> RemoteRewardFuture:
        """Start scoring and return at once.

        Raises:
            ValueError: the request's shapes do not fit each other.
            RewardServerError: the client was closed.
        """
        _check_request(request)
        if self._closed.is_set():
            raise RewardServerError(f"the client of the reward server at {self.host}:{self.port} is closed")
        deadline = _Deadline(self._deadline_seconds)
        job_id = f"{self._caller}-call{next(self._calls)}-{uuid.uuid4().hex[:8]}"
        job = _Job(request, deadline, Future(), job_id)
        if len(self._threads) < self._max_in_flight:
            # Daemons: a trainer that ends with an error must not wait here for a server that hangs.
            thread = threading.Thread(target=self._work, daemon=True, name=f"reward-client-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)
        return RemoteRewardFuture(self, job.future, deadline, job.id)

    def wait_until_ready(self, deadline_seconds: float | None = None) -> ServerInfo:
        """Wait for the server, saying what is being waited for.

        Args:
            deadline_seconds: how long; None means the client's own deadline.

        Raises:
            RewardServerError: the deadline passed, another program is on the port, or another model is served.
        """
        deadline = _Deadline(self._deadline_seconds if deadline_seconds is None else deadline_seconds)
        return self._retry(self._shake_hands, deadline, f"{self._caller}-handshake")

    def check_compatible(self, tokenizer_info: TokenizerInfo, vocab_size: int, form: str = AUTO_FORM) -> str:
        """Choose what to send, and make sure that tokens mean the same here and there where they are sent.

        Waits for the server where that was not done yet.

        Args:
            tokenizer_info: of the actor's tokenizer.
            vocab_size: the actor can produce ids 0 .. vocab_size-1.
            form: `tokens`, `text`, or `auto`: tokens where they mean the same, else text where the server reads it.

        Returns:
            the form that will be sent.

        Raises:
            ConfigError: the server does not read this form, or reads other tokens; every difference is named.
        """
        self._form = choose_form(
            self._info or self.wait_until_ready(), f"{self.host}:{self.port}", tokenizer_info, vocab_size, form
        )
        return self._form

    def close(self) -> None:
        """End the threads. Requests under way fail. Safe to call twice."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(0.2)  # one that waits for the network is a daemon and ends with the process

    def _arrays_of(self, request: RewardRequest, info: ServerInfo) -> dict[str, np.ndarray]:
        if (self._form or info.input_forms[0]) == protocol.TEXT_FORM:
            return text_arrays(request.samples)
        tokens = request.tokens.detach().cpu().numpy().astype(np.int64, copy=True)
        lengths = request.lengths.detach().cpu().numpy().astype(np.int64, copy=True)
        width = max(self._pad_to_length or 0, tokens.shape[1], 1)  # Triton cannot carry a width of 0
        if width > tokens.shape[1]:
            padding = ((0, 0), (0, width - tokens.shape[1]))
            tokens = np.pad(tokens, padding, constant_values=self._pad_id)
        return {protocol.TOKENS: tokens, protocol.SEQUENCE_LENGTHS: lengths[:, None]}

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                job.future.set_result(self._score(job))
            except BaseException as error:  # whoever asked for the result gets it, also for a bug in here
                job.future.set_exception(error)

    def _score(self, job: _Job) -> Rewards:
        count = len(job.request.lengths)
        if count == 0:
            return Rewards(torch.zeros(0), torch.zeros(0, dtype=torch.int32))
        info = self._info or self._retry(self._shake_hands, job.deadline, job.id)
        arrays = self._arrays_of(job.request, info)
        values, status, attributes = [], [], []
        for number, start in enumerate(range(0, count, info.max_batch_size)):
            part = {name: array[start : start + info.max_batch_size] for name, array in arrays.items()}
            part_id = f"{job.id}-{number}"
            one_values, one_status, one_attributes = self._retry(
                lambda timeout, part=part, part_id=part_id: self._infer(part, timeout, part_id), job.deadline, part_id
            )
            values.append(one_values)
            status.append(one_status)
            attributes.append(one_attributes)
        by_name = torch.from_numpy(np.concatenate(attributes)).t()
        return Rewards(
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(np.concatenate(status)),
            {name: column.contiguous() for name, column in zip(info.attributes, by_name, strict=True)},
        )

    def _retry(self, attempt: Callable[[float], T], deadline: _Deadline, request_id: str) -> T:
        """Call `attempt(timeout)` until it succeeds. After a failure the server must first introduce itself again."""
        timeout = self._attempt_timeout_seconds
        backoff = self._first_backoff_seconds
        last = "it was not reached"
        bad_answers = 0
        unknown_since: float | None = None
        failed = False
        while True:
            if self._closed.is_set():
                raise RewardServerError(f"the client of the reward server at {self.host}:{self.port} was closed")
            if deadline.remaining <= 0:
                raise self._past_deadline(deadline, last, request_id)
            retry_after = None
            try:
                if failed:
                    self._shake_hands(deadline.remaining)
                answer = attempt(min(timeout, deadline.remaining))
                self._trouble = None
                return answer
            except NotReadyYet as error:
                last, retry_after = str(error), error.retry_after
                unknown_since = (unknown_since or time.monotonic()) if error.unknown else None
                if unknown_since is not None and time.monotonic() - unknown_since > UNKNOWN_MODEL_SECONDS:
                    raise RewardServerError(
                        f"the server at {self.host}:{self.port} {last}, and that for {UNKNOWN_MODEL_SECONDS:.0f} s: "
                        "it is no reward server of this project. Check host and port."
                    ) from error
            except _Transient as error:
                last, retry_after = str(error), error.retry_after
                bad_answers += error.bad_answer
                if bad_answers >= BAD_ANSWERS_ALLOWED:
                    raise RewardServerError(
                        f"{bad_answers} wrong answers: the reward server at {self.host}:{self.port} {last}"
                    ) from error
                if error.timed_out:
                    timeout *= 2
            failed = True
            self._trouble = last
            self._report(f"{last}; retrying", deadline, request_id, warn=True)
            pause = min(backoff * self._random.uniform(0.5, 1.5), self._max_backoff_seconds)
            if retry_after is not None:
                # The server knows when it will have time. Later, never sooner: all of its clients got such an answer.
                pause = retry_after * self._random.uniform(1.0, 1.5)
            self._closed.wait(max(0.0, min(pause, deadline.remaining)))
            backoff *= 2

    def _shake_hands(self, timeout: float) -> ServerInfo:
        """Ask who the server is. After a restart it must be the one that it was."""
        info = check_once(self.host, self.port, self.name, min(timeout, PROBE_SECONDS), token=self._token)
        with self._lock:
            if self._info is None:
                self._info = info
        differences = self._info.differences(info)
        if differences:
            raise RewardServerError(
                f"the reward server at {self.host}:{self.port} was replaced by another one during the run "
                f"({'; '.join(differences)}). Start the one from before, or start the run again."
            )
        return info

    def _infer(
        self, arrays: dict[str, np.ndarray], timeout: float, request_id: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards float32 [N], statuses int32 [N] and attributes float32 [N, K], where K may be 0."""
        # tritonclient writes and reads the bodies. It hides the headers of an answer, so the sending is done here.
        import tritonclient.http as triton
        from tritonclient.utils import np_to_triton_dtype

        inputs = []
        for name, array in arrays.items():
            inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        count = len(next(iter(arrays.values())))
        names = self._info.attributes if self._info else []
        keys = [protocol.REWARDS, protocol.STATUS, *([protocol.ATTRIBUTES] if names else [])]
        outputs = [triton.InferRequestedOutput(key) for key in keys]
        body, json_size = triton.InferenceServerClient.generate_request_body(inputs, outputs=outputs)
        headers = {
            "Content-Type": "application/octet-stream",
            protocol.HEADER_LENGTH: str(json_size),
            protocol.REQUEST_ID: request_id,
            **access.bearer(self._token),
        }
        path = f"/v2/models/{self.name}/infer"
        try:
            answer = call(self.host, self.port, path, timeout, body=body, headers=headers)
        except Exception as error:
            text = reason_of(error)
            raise _Transient(f"does not answer ({text})", timed_out=isinstance(error, TimeoutError)) from error
        if answer.code != 200:
            raise self._judge(answer, request_id)
        try:
            json_length = answer.headers.get(protocol.HEADER_LENGTH.lower())
            found = triton.InferenceServerClient.parse_response_body(
                answer.body, header_length=int(json_length) if json_length else None
            )
            values, codes = protocol.check_answer(
                found.as_numpy(protocol.REWARDS), found.as_numpy(protocol.STATUS), count
            )
            scores = found.as_numpy(protocol.ATTRIBUTES) if names else np.zeros((count, 0), np.float32)
            return values, codes, protocol.check_attributes(scores, codes, len(names))
        except Exception as error:  # whatever tritonclient makes of bytes that are no such answer
            raise _Transient(f"gave a wrong answer: {error}", bad_answer=True) from error

    def _judge(self, answer: HttpAnswer, request_id: str) -> Exception:
        """What an HTTP error of the server means: worth another attempt, or not."""
        code, text = answer.code, text_of(answer)
        if code in (401, 403):
            return token_refused(self.host, self.port, self._token)
        if code >= 500 or code in RETRIED_CODES:
            return _Transient(f"answers HTTP {code}{text}", retry_after=answer.retry_after)
        try:
            check_once(
                self.host, self.port, self.name, PROBE_SECONDS, token=self._token
            )  # while starting, Triton calls its models unknown
        except NotReadyYet as error:
            return _Transient(str(error), retry_after=error.retry_after)
        except RewardServerError as error:
            return error
        if "unknown model" in text or "not ready" in text:  # it has become ready since
            return _Transient(f"answers HTTP {code}{text}")
        return RewardServerError(
            f"the reward server at {self.host}:{self.port} refused a request (id {request_id}): HTTP {code}{text}"
        )

    def _report(self, text: str, deadline: _Deadline, request_id: str, *, warn: bool) -> None:
        """Tell people, at most every `wait_report_seconds` over all threads."""
        logger.debug("event=reward_retry id=%s %s", request_id, text)
        with self._lock:
            if time.monotonic() < self._next_report:
                return
            self._next_report = time.monotonic() + self.wait_report_seconds
        sentence = (
            f"reward server {self.host}:{self.port} {text}, {deadline.elapsed:.0f} s of {deadline.seconds:.0f} s"
        )
        if self._on_wait is not None:
            self._on_wait(sentence)
            warn = False  # people have been told; a warning would tell them twice
        logger.log(logging.WARNING if warn else logging.INFO, "%s (request %s)", sentence, request_id)

    def _past_deadline(self, deadline: _Deadline, last: str, request_id: str) -> RewardServerError:
        return RewardServerError(
            f"no answer of the reward server at {self.host}:{self.port} (model '{self.name}') within "
            f"{deadline.seconds:.0f} s; the last error: {last}. Check that it runs "
            f"(curl http://{self.host}:{self.port}/v2/health/ready), that its log shows no error, and that this "
            "machine can reach that host and port; the request's id there and here is "
            f"{request_id}. Start it again on the same port and continue the run."
        )


def _check_request(request: RewardRequest) -> None:
    if request.tokens.ndim != 2 or request.lengths.shape != request.tokens.shape[:1]:
        raise ValueError(
            f"tokens are {list(request.tokens.shape)} and lengths {list(request.lengths.shape)}; "
            "expected [N, S] and [N]"
        )
