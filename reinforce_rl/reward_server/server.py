"""The reward server: a reward model behind PyTriton, with a front door before it, as a program of its own.

PyTriton runs tritonserver as a child on a Unix socket and calls the model back in this process; clients talk to the
front door, another child (`app.py`). This file orders start and stop. See `docs/reward-server.md`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import ModelStuckError, RewardServerError
from reinforce_rl.reward_server.front.app import FAILED, READY, FrontSettings
from reinforce_rl.reward_server.front.health import fault_of
from reinforce_rl.reward_server.front.process import FrontProcess
from reinforce_rl.reward_server.options import FrontLimits, FrontOptions, check_options
from reinforce_rl.reward_server.private_triton import PrivateTriton
from reinforce_rl.reward_server.progress import Progress
from reinforce_rl.reward_server.scoring import FunctionRequestScorer, FunctionScorer, RequestScorer
from reinforce_rl.reward_server.triton_backend import TRITON_SOCKET, build_triton, make_home, stop_triton
from reinforce_rl.rewards import base, transport, wire
from reinforce_rl.rewards.transport import FailedAttempt
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.guard import Guard, name_stopped
from reinforce_rl.utils.net import open_port

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5  # between two checks of the processes
SUMMARY_SECONDS = 60.0  # between two lines of totals in the log
STUCK_GRACE_SECONDS = 2.0  # a scorer on several ranks has the same limit, and can name the stuck rank
STOP_SECONDS = 60.0  # beyond the calls in flight; after that a stopping server counts as hung
CANARY_SECONDS = 300.0  # the first forward pass of a large model may compile for minutes
WIDTH_OF_TEXTS = 2048  # context assumed for a reward function: 64 KiB of text per sample


class RewardServer:
    """Serves a scorer as a KServe v2 model over HTTP.

    Args:
        scorer: the reward model, or a reward function. Called on one thread, never the main one, so it must set its
            CUDA device itself.
        tokenizer: the scorer's. Also reads `sentences`, without a chat template, and prompts with responses, with its
            own. None for a reward function.
        name: the model's name in URLs.
        front: access control and limits.
        max_batch_size: samples per request; also the most that Triton merges.
        max_queue_delay: seconds that a request may wait to be merged with others.
        deterministic, add_special_tokens: see `RequestScorer`.
        warm_up_lengths: tokens of the samples that are scored before the server is ready.
        details: what else identifies the reward model; part of the handshake.
        ready_file: JSON file {host, port, pid}, written once ready and removed at the end.
        stop_timeout: seconds for calls in flight after SIGTERM or SIGINT.
        preferred_batch_sizes: numbers of samples that Triton prefers to merge to; requests are never split.
        check: called periodically; raises a `ReinforceError` once the scorer cannot score any more.
    """

    def __init__(
        self,
        scorer: base.Scorer | FunctionScorer,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str = wire.DEFAULT_NAME,
        host: str = "127.0.0.1",
        port: int = wire.DEFAULT_PORT,
        front: FrontOptions | None = None,
        max_batch_size: int = 256,
        max_queue_delay: float = 0.0,
        deterministic: bool = True,
        add_special_tokens: bool = False,
        warm_up_lengths: Sequence[int] = (64, 512),
        details: Mapping[str, Any] | None = None,
        ready_file: str | Path | None = None,
        stop_timeout: float = 30.0,
        preferred_batch_sizes: Sequence[int] = (),
        check: Callable[[], None] = lambda: None,
    ):
        self._check = check
        self._preferred_batch_sizes = list(preferred_batch_sizes)
        self._host = host
        self._port = port
        self._options = front or FrontOptions()
        self._max_queue_delay = max_queue_delay
        self._warm_up_lengths = warm_up_lengths
        self._ready_file = Path(ready_file) if ready_file is not None else None
        self._stop_timeout = stop_timeout
        self._stopping = False
        self._stop_signal: str | None = None
        if isinstance(scorer, FunctionScorer):
            self._requests = FunctionRequestScorer(scorer)
        else:
            self._requests = RequestScorer(
                scorer, tokenizer, deterministic=deterministic, add_special_tokens=add_special_tokens
            )
        self.info = ServerInfo(
            name=name,
            max_batch_size=max_batch_size,
            max_length=scorer.max_length,
            vocab_size=scorer.vocab_size,
            tokenizer=None if tokenizer is None else TokenizerInfo.from_tokenizer(tokenizer),
            input_forms=self._requests.input_forms,
            deterministic=deterministic,
            add_special_tokens=add_special_tokens,
            details=dict(details or {}),
            attributes=list(base.attributes_of(scorer)),
            max_request_bytes=self._limits(max_batch_size, scorer.max_length).max_request_bytes,
        )

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop and return. Call it from the main thread.

        Raises:
            ConfigError: the port is busy, or the options cannot work. Nothing was started.
            RewardServerError: the server did not become ready, or one of its processes died.
            ModelStuckError: the model was in one call for too long; its thread still exists.
        """
        check_options(
            self.info, self._host, self._port, self._max_queue_delay, self._options, self._preferred_batch_sizes
        )
        listener = open_port(self._host, self._port)
        with self._signals_raise(), listener:
            guard = Guard()
            try:
                self._serve(guard, listener)
            except _StopRequested as request:
                logger.info("event=stopped signal=%s", request.name)
            finally:
                self._stopping = True
                guard.close()

    def _limits(self, max_samples: int, max_length: int | None) -> FrontLimits:
        return self._options.for_model(max_samples, max_length or WIDTH_OF_TEXTS)

    def _serve(self, guard: Guard, listener: socket.socket) -> None:
        home = make_home(self.info.name)
        guard.remove(home)
        guard.watch_process(os.getpid())
        # PyTriton names its shared-memory segments by process id.
        guard.remove_shared_memory(f"pytrtion{os.getpid()}-")
        if self._ready_file is not None:
            guard.remove(self._ready_file)
        progress = self._requests.progress = Progress(home / "progress", create=True)
        settings = FrontSettings(
            model=self.info.name,
            backend=str(home / TRITON_SOCKET),
            limits=self._limits(self.info.max_batch_size, self.info.max_length),
            canary=json.dumps({"inputs": self._requests.canary_inputs()}),
            input_forms=self._requests.input_forms,
        )
        front = FrontProcess(listener, settings, home / "progress")
        try:
            guard.watch_process(front.pid)
            self._serve_behind(front, guard, home, progress)
        finally:
            self._stopping = True
            front.close()

    def _serve_behind(self, front: FrontProcess, guard: Guard, home: Path, progress: Progress) -> None:
        triton = build_triton(
            self.info,
            self._requests,
            home=home,
            max_queue_delay=self._max_queue_delay,
            preferred_batch_sizes=self._preferred_batch_sizes,
            stop_timeout=self._stop_timeout,
        )
        in_order = False
        try:
            triton.run()
            processes = psutil.Process().children(recursive=True)
            tritonserver = next((p for p in processes if p.name() == "tritonserver"), None)
            if tritonserver is None:
                raise RewardServerError("tritonserver ended while it started; its last lines are above")
            guard.watch_process(tritonserver.pid)
            watched = [tritonserver, *tritonserver.children(recursive=True)]
            self._warm_up(triton)
            front.wait_until_up()
            front.set_state(READY)
            self._check_handshake()
            self._announce()
            self._watch(triton, watched, front, progress, guard)
        except _StopRequested:
            in_order = not self._report_loss(front)
            raise
        except RewardServerError as error:
            front.set_state(FAILED, str(error))
            raise
        finally:
            self._stopping = True
            guard.expect(self._stop_timeout + STOP_SECONDS, "it was stopping")
            # After a failure no call in flight can succeed; clients retry at the next server.
            timeout = self._stop_timeout if in_order else 0.0
            logger.info("event=stopping timeout_seconds=%g", timeout)
            started = time.monotonic()
            if in_order:
                if not front.drain(timeout):
                    logger.warning("event=drain_incomplete: calls were still in flight after %g s", timeout)
                self._report_loss(front)
            stop_triton(triton, self._requests, max(0.0, timeout - (time.monotonic() - started)))

    def _report_loss(self, front: FrontProcess) -> bool:
        """Return True if the scorer is gone, for example a lost rank, and mark health as failed."""
        try:
            self._check()
        except RewardServerError as lost:
            front.set_state(FAILED, str(lost))
            return True
        return False

    @property
    def _local_host(self) -> str:
        return "127.0.0.1" if self._host == "0.0.0.0" else self._host

    def _warm_up(self, triton: PrivateTriton) -> None:
        """Send samples end to end before clients do: a model's first passes are its slowest."""
        longest = self.info.max_length
        lengths = sorted({1, *(min(length, longest) for length in self._warm_up_lengths)}) if longest else [1]
        started = time.monotonic()
        for length in lengths:
            body = json.dumps({"inputs": self._requests.canary_inputs(length)}).encode()
            answer = triton.ask(f"/v2/models/{self.info.name}/infer", CANARY_SECONDS, body)
            fault = fault_of(*answer, f"a sample of {length} tokens (id 0)")
            if fault is not None:
                raise RewardServerError(f"{fault}. See the log above; nothing is served.")
        logger.info("event=warmed_up lengths=%s seconds=%.1f", lengths, time.monotonic() - started)

    def _check_handshake(self) -> None:
        try:
            transport.check_once(self._local_host, self._port, self.info.name, timeout=10.0, token=self._options.token)
        except FailedAttempt as error:
            raise RewardServerError(f"the server at {self._host}:{self._port} started, but {error}") from error

    def _announce(self) -> None:
        url = f"http://{self._host}:{self._port}"
        if self._ready_file is not None:
            self._ready_file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._ready_file.with_name(self._ready_file.name + ".tmp")
            temporary.write_text(json.dumps({"host": self._local_host, "port": self._port, "pid": os.getpid()}))
            os.replace(temporary, self._ready_file)
        logger.info("event=ready url=%s info=%s", url, self.info.to_json())
        print(f"ready at {url}", flush=True)

    def _watch(
        self,
        triton: PrivateTriton,
        processes: list[psutil.Process],
        front: FrontProcess,
        progress: Progress,
        guard: Guard,
    ) -> None:
        stuck_seconds = self._options.stuck_seconds
        setting = f"inference.stuck_seconds is {stuck_seconds:g}"
        next_sign = 0.0
        next_summary = time.monotonic() + SUMMARY_SECONDS
        last_requests = 0
        while True:
            if time.monotonic() >= next_sign:  # not more often, since a hung guard does not read them
                guard.expect(stuck_seconds + STUCK_GRACE_SECONDS, setting)
                next_sign = time.monotonic() + stuck_seconds / 10
            guard.check(stuck_seconds)
            if self._stop_signal is not None:  # a library swallowed the exception during the start
                raise _StopRequested(self._stop_signal)
            time.sleep(WATCH_SECONDS)
            self._check()
            now = progress.read()
            if now.quiet_seconds > stuck_seconds + STUCK_GRACE_SECONDS:
                why = now.why_stuck(stuck_seconds)
                if why is not None:
                    raise ModelStuckError(
                        f"{why}{name_stopped()}. The reward server ends; clients wait and retry, so start it again"
                    )
            dead = [p.pid for p in processes if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE]
            if dead or not triton.is_alive():
                raise RewardServerError(
                    f"tritonserver on {self._host}:{self._port} died (process {dead or 'unknown'}); its last lines "
                    "are above. Clients wait and retry, so start the server again on the same port."
                )
            fault = front.fault(stuck_seconds + STUCK_GRACE_SECONDS)
            if fault is not None:
                raise RewardServerError(
                    f"on {self._host}:{self._port} {fault}{name_stopped()} ({setting}). Clients wait and retry, so "
                    "start the server again on the same port."
                )
            if time.monotonic() >= next_summary:
                if now.requests != last_requests:
                    logger.info(
                        "event=totals requests=%d samples=%d failed=%d tokens=%d seconds=%.3f",
                        now.requests,
                        now.samples,
                        now.failed,
                        now.tokens,
                        now.seconds,
                    )
                last_requests = now.requests
                next_summary = time.monotonic() + SUMMARY_SECONDS

    @contextlib.contextmanager
    def _signals_raise(self) -> Iterator[None]:
        """Raise `_StopRequested` in the main thread on SIGTERM and SIGINT; ignore them while stopping."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            if self._stop_signal is None and not self._stopping:
                self._stop_signal = signal.Signals(number).name
                raise _StopRequested(self._stop_signal)

        previous = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _StopRequested(SystemExit):
    """A signal asked for the end. A SystemExit, so that it passes through libraries such as gevent's event loop."""

    def __init__(self, name: str):
        super().__init__(0)
        self.name = name
