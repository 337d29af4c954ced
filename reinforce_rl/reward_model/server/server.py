"""The reward server: a reward model behind PyTriton, with a front door before it, as a program of
its own.

PyTriton runs tritonserver as a child on a Unix socket and calls the model back in this process;
clients talk to the front door, another child (`front.py`). This file orders start and stop. See
`docs/reward-models.md`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.data.rendering import DEFAULT_OPTIONS, TemplateOptions
from reinforce_rl.data.tokenizer import TokenizerInfo
from reinforce_rl.errors import ConfigError, Fault, ModelStuckError, RewardServerError
from reinforce_rl.reward_model.server.admission import FrontSettings
from reinforce_rl.reward_model.server.front import FAILED, READY
from reinforce_rl.reward_model.server.front_process import FrontProcess
from reinforce_rl.reward_model.server.health import fault_of
from reinforce_rl.reward_model.server.scoring import (
    FunctionRequestScorer,
    FunctionScorer,
    RequestScorer,
)
from reinforce_rl.reward_model.server.triton import (
    SHARED_MEMORY_PREFIX,
    TRITON_SOCKET,
    PrivateTriton,
    make_home,
)
from reinforce_rl.rewards import base, transport, wire
from reinforce_rl.rewards.transport import FailedAttempt, ModelAddress
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.job_rank import host_of_meeting
from reinforce_rl.utils.net import Address, is_loopback, open_port, published_address
from reinforce_rl.utils.process_reaper import ProcessReaper, name_stopped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5  # between two checks of the processes
SUMMARY_SECONDS = 60.0  # between two lines of totals in the log
# a scorer on several ranks has the same limit, and can name the stuck rank
STUCK_GRACE_SECONDS = 2.0
STOP_SECONDS = 60.0  # beyond the calls in flight; after that a stopping server counts as hung
CANARY_SECONDS = 300.0  # the first forward pass of a large model may compile for minutes
WIDTH_OF_TEXTS = 2048  # context assumed for a reward function: 64 KiB of text per sample
WIDER_THAN_CONTEXT = 4  # how much wider than the model's context a padded request may be


class RewardServer:
    """Serves a scorer as a KServe v2 model over HTTP.

    Args:
        scorer: called on one thread, never the main one, so it must set its CUDA device itself.
        tokenizer: the scorer's; None for a reward function.
        details: what else identifies the reward model; part of the handshake.
        check: called periodically; raises a `ReinforceError` once the scorer cannot score any more.
        template: options of the tokenizer's chat template.

    Raises ConfigError if the settings cannot work with this scorer, or a token is needed.
    """

    def __init__(
        self,
        scorer: base.Scorer | FunctionScorer,
        tokenizer: PreTrainedTokenizerBase | None,
        inference: InferenceConfig,
        *,
        details: Mapping[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
        template: TemplateOptions = DEFAULT_OPTIONS,
    ):
        self._inference = inference
        self._check = check
        self._address = Address(inference.host, inference.port)
        self._ready_file = Path(inference.ready_file) if inference.ready_file is not None else None
        self._stopping = False
        self._stop_signal: str | None = None
        kind = {
            "deterministic": inference.deterministic,
            "add_special_tokens": inference.add_special_tokens,
        }
        if isinstance(scorer, FunctionScorer):
            if scorer.model is None:
                kind = {"deterministic": True, "add_special_tokens": False}
            self._requests = FunctionRequestScorer(scorer, tokenizer, template=template, **kind)
            tokenizer = None  # clients send no tokens
        else:
            self._requests = RequestScorer(scorer, tokenizer, template=template, **kind)
        width = inference.max_sequence_length or WIDER_THAN_CONTEXT * (
            scorer.max_length or WIDTH_OF_TEXTS
        )
        self._settings = FrontSettings(
            inference=inference,
            # A full batch of int64 tokens, plus 1 MiB of overhead.
            max_request_bytes=inference.max_request_bytes
            or 8 * inference.max_batch_size * width + (1 << 20),
            max_sequence_length=width,
            token=token_of(inference),
            canary=json.dumps({"inputs": self._requests.canary_inputs()}),
            input_forms=self._requests.input_forms,
        )
        self.info = ServerInfo(
            name=inference.name,
            max_batch_size=inference.max_batch_size,
            max_length=scorer.max_length,
            vocab_size=scorer.vocab_size,
            tokenizer=None if tokenizer is None else TokenizerInfo.from_tokenizer(tokenizer),
            input_forms=self._requests.input_forms,
            details=dict(details or {}),
            attributes=list(self._requests.attributes),
            max_request_bytes=self._settings.max_request_bytes,
            **kind,
        )
        self._settings.description = self.info.to_json()
        if faults := _faults(self.info):
            raise ConfigError(faults)

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop and return. Call it from the main thread.

        Raises ConfigError if the port is busy, RewardServerError if the server did not become ready
        or lost a process, ModelStuckError if the model was in one call for too long; its thread
        still exists.
        """
        listener = open_port(self._inference.host, self._inference.port)
        port = listener.getsockname()[1]  # which the kernel has chosen if the configured one is 0
        self._address = Address(self._inference.host, port)
        with self._signals_raise(), listener:
            reaper = ProcessReaper()
            try:
                self._serve(reaper, listener)
            except _StopRequested:
                logger.info("event=stopped signal=%s", self._stop_signal)
            finally:
                self._stopping = True
                reaper.close()

    def _serve(self, reaper: ProcessReaper, listener: socket.socket) -> None:
        home = make_home(self.info.name)
        for path in filter(None, (home, self._ready_file)):
            reaper.remove(path)
        reaper.watch_process(os.getpid())
        reaper.remove_shared_memory(f"{SHARED_MEMORY_PREFIX}{os.getpid()}-")
        self._settings.backend = str(home / TRITON_SOCKET)
        front = FrontProcess(listener, self._settings, self._requests.progress)
        try:
            reaper.watch_process(front.pid)
            self._serve_behind(
                front, reaper, PrivateTriton(home, self.info, self._requests, self._inference)
            )
        finally:
            self._stopping = True
            front.close()

    def _serve_behind(
        self, front: FrontProcess, reaper: ProcessReaper, triton: PrivateTriton
    ) -> None:
        in_order = False
        try:
            watched = triton.run()
            reaper.watch_process(watched[0].pid)
            self._warm_up(triton)
            front.wait_until_up()
            front.set_state(READY)
            self._announce()
            self._watch(triton, watched, front, reaper)
        except _StopRequested:
            try:
                self._check()
                in_order = True
            except RewardServerError as lost:
                front.set_state(FAILED, str(lost))
            raise
        except RewardServerError as error:
            front.set_state(FAILED, str(error))
            raise
        finally:
            self._stopping = True
            reaper.expect(self._inference.stop_timeout_seconds + STOP_SECONDS, "it was stopping")
            # After a failure no call in flight can succeed; clients retry at the next server.
            timeout = self._inference.stop_timeout_seconds if in_order else 0.0
            logger.info("event=stopping timeout_seconds=%g", timeout)
            if in_order and not front.drain(timeout):
                logger.warning(
                    "event=drain_incomplete: calls were still in flight after %g s", timeout
                )
            triton.stop(in_order)

    def _warm_up(self, triton: PrivateTriton) -> None:
        """Send samples end to end before clients do: a model's first passes are its slowest."""
        longest = self.info.max_length
        wanted = self._inference.warm_up_lengths
        lengths = sorted({1, *(min(length, longest) for length in wanted)}) if longest else [1]
        started = time.monotonic()
        for length in lengths:
            body = json.dumps({"inputs": self._requests.canary_inputs(length)}).encode()
            answer = triton.ask(f"/v2/models/{self.info.name}/infer", CANARY_SECONDS, body)
            if (fault := fault_of(*answer, f"a sample of {length} tokens (id 0)")) is not None:
                raise RewardServerError(
                    f"{fault}. See the log above; nothing is served.",
                    key="serve.warm_up.failed",
                )
        logger.info("event=warmed_up lengths=%s seconds=%.1f", lengths, time.monotonic() - started)

    def _announce(self) -> None:
        """Ask the server as a client would, then say that it is ready."""
        address = self._address
        local = address.local
        try:
            model = ModelAddress(local, self.info.name, self._settings.token)
            transport.wait_for(transport.ask_description(model, 10.0))
        except FailedAttempt as error:
            raise RewardServerError(
                f"the server at {address} started, but {error}",
                key="serve.server.not_answering",
            ) from error
        if self._ready_file is not None:
            published = published_address(address, host_of_meeting())
            content = {"host": published.host, "port": published.port, "pid": os.getpid()}
            write_atomically(self._ready_file, json.dumps(content))
        logger.info("event=ready url=%s info=%s", address.url, self.info.to_json())
        everywhere = "" if local == address else f", and at every address of {socket.gethostname()}"
        print(f"ready at {local.url}{everywhere}", flush=True)

    def _watch(
        self,
        triton: PrivateTriton,
        processes: list[psutil.Process],
        front: FrontProcess,
        reaper: ProcessReaper,
    ) -> None:
        model_timeout_seconds = self._inference.model_timeout_seconds
        patience = model_timeout_seconds + STUCK_GRACE_SECONDS
        setting = f"inference.model_timeout_seconds is {model_timeout_seconds:g}"
        here = self._address
        again = "Clients wait and retry, so start the server again"
        next_sign = 0.0
        next_summary = time.monotonic() + SUMMARY_SECONDS
        last_requests = 0
        while True:
            if time.monotonic() >= next_sign:
                # not more often, since a hung reaper does not read them
                reaper.expect(patience, setting)
                next_sign = time.monotonic() + model_timeout_seconds / 10
            reaper.check(model_timeout_seconds)
            if self._stop_signal is not None:  # a library swallowed the exception during the start
                raise _StopRequested
            time.sleep(WATCH_SECONDS)
            self._check()
            now = self._requests.progress.read()
            if (
                now.quiet_seconds > patience
                and (why := now.why_stuck(model_timeout_seconds)) is not None
            ):
                raise ModelStuckError(
                    f"{why}{name_stopped()}. The reward server ends. {again}",
                    key="serve.model.stuck",
                )
            dead = [
                p.pid for p in processes if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE
            ]
            if dead or not triton.is_alive():
                raise RewardServerError(
                    f"tritonserver on {here} died (process {dead or 'unknown'}); its last lines "
                    f"are above. {again} on the same port",
                    key="serve.triton.died",
                )
            if (fault := front.fault(patience)) is not None:
                raise RewardServerError(
                    f"on {here} {fault}{name_stopped()} ({setting}). {again} on the same port",
                    key=fault.key,
                )
            if time.monotonic() >= next_summary:
                if now.requests != last_requests:
                    counts = (now.requests, now.samples, now.failed, now.tokens, now.seconds)
                    logger.info(
                        "event=totals requests=%d samples=%d failed=%d tokens=%d seconds=%.3f",
                        *counts,
                    )
                last_requests = now.requests
                next_summary = time.monotonic() + SUMMARY_SECONDS

    @contextlib.contextmanager
    def _signals_raise(self) -> Iterator[None]:
        """Raise `_StopRequested` in the main thread on SIGTERM and SIGINT; ignore them while
        stopping.
        """

        def request_stop(number: int, frame: FrameType | None) -> None:
            if self._stop_signal is None and not self._stopping:
                self._stop_signal = signal.Signals(number).name
                raise _StopRequested

        previous = {
            number: signal.signal(number, request_stop)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _StopRequested(SystemExit):
    """A signal asked for the end.

    A SystemExit, so that it passes through libraries such as gevent's event loop.
    """


def token_of(inference: InferenceConfig) -> str | None:
    """Return the access token, None if there is none.

    Raises ConfigError if it cannot be read, or other machines could use the server without one.
    """
    token = wire.read_token(inference.token_file, "inference.token_file")
    if token is not None or inference.allow_no_token or is_loopback(inference.host):
        return token
    sentence = (
        f"inference.host is {inference.host}, so other machines can reach the server, and it has "
        "no access token. Give it one with inference.token_file=FILE or the environment variable "
        f"{wire.TOKEN_VARIABLE}, or set inference.allow_no_token=true if everyone who can reach "
        "the port may use it"
    )
    raise ConfigError([Fault(sentence, key="serve.token.not_given")])


def _faults(info: ServerInfo) -> list[Fault]:
    """Return what the schema cannot know to be wrong."""
    faults: list[Fault] = []
    tokens = info.tokenizer.vocab_size if info.tokenizer is not None else 0
    if info.name == wire.INFO_MODEL:
        faults.append(
            Fault(
                f"inference.name is '{info.name}', which is the server's own description; choose "
                "another",
                key="serve.name.reserved",
            )
        )
    if info.vocab_size is not None and info.vocab_size < tokens:
        faults.append(
            Fault(
                f"the reward model knows {info.vocab_size} token ids, its tokenizer {tokens}; "
                "expected the tokenizer that the model was trained with",
                key="serve.tokenizer.too_large",
            )
        )
    if int(np.__version__.split(".")[0]) >= 2:
        faults.append(
            Fault(
                f"PyTriton 0.7 breaks with numpy {np.__version__}; install numpy below 2 in its "
                "environment",
                key="serve.numpy.too_new",
            )
        )
    return faults
