"""The reward server: a reward model behind PyTriton, over HTTP, as a program of its own.

PyTriton runs NVIDIA's tritonserver as a child, and calls the model back in this process. What is added here: a check
of the port, a description for the client's handshake, samples that fail one by one, a stop that is bounded and leaves
nothing behind, and an exit code that tells a crash from a stop. `docs/reward-server.md` describes it for users.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from reinforce_rl.errors import ConfigError, RewardServerError
from reinforce_rl.guard import Guard
from reinforce_rl.reward import base, health, protocol
from reinforce_rl.reward.function_scoring import FunctionRequestScorer, FunctionScorer
from reinforce_rl.reward.protocol import ServerInfo
from reinforce_rl.reward.scoring import RequestScorer
from reinforce_rl.tokenizer import TokenizerInfo

if TYPE_CHECKING:
    from pytriton.triton import Triton
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.5  # between two looks at tritonserver's processes
SUMMARY_SECONDS = 60.0  # between two lines of totals in the log
CANARY_SECONDS = 300.0  # the first forward pass of a large model may compile for minutes
HOME_PREFIX = "reward-server-"
WORKSPACE = "workspace"
SOCKET_PATH_LIMIT = 107  # bytes that Linux allows for a Unix socket's path
PORT_WAIT_SECONDS = 3.0  # a server that was just killed frees its port within a moment
QUIET_SECONDS = 6.0  # once stopping: idle so long means that the last answer has left; a plain stop takes about 4 s


class RewardServer:
    """Serves a scorer as a KServe v2 model over HTTP.

    Args:
        scorer: the reward model. It is called on one thread, never the main one, so a CUDA device must be set inside.
            Or a reward function.
        tokenizer: the one whose ids the scorer reads. It also reads `sentences`, without any chat template, and
            prompts with responses, with its own. None for a reward function.
        name: the model's name in URLs.
        host: the address to listen on. Anyone who can reach it can use it: there is no access control.
        port: the TCP port to listen on.
        max_batch_size: samples in one request; also the most that Triton merges.
        max_queue_delay: seconds that a request may wait for others to be merged with.
        deterministic: see `RequestScorer`.
        add_special_tokens: see `RequestScorer`.
        details: what else tells this reward model from another; part of the handshake.
        ready_file: a JSON file {host, port, pid}, written once the server is ready and removed at its end.
        stop_timeout: seconds that calls in flight get to finish after SIGTERM or SIGINT.
        preferred_batch_sizes: numbers of samples that Triton would rather merge to; a request is never cut for it.
        check: called every now and then; it raises a `ReinforceError` once the scorer cannot score any more.
    """

    def __init__(
        self,
        scorer: base.Scorer | FunctionScorer,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str = protocol.DEFAULT_NAME,
        host: str = "127.0.0.1",
        port: int = protocol.DEFAULT_PORT,
        max_batch_size: int = 256,
        max_queue_delay: float = 0.0,
        deterministic: bool = True,
        add_special_tokens: bool = False,
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
        self._max_queue_delay = max_queue_delay
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
            tokenizer=None if tokenizer is None else TokenizerInfo.of(tokenizer),
            input_forms=self._requests.input_forms,
            deterministic=deterministic,
            add_special_tokens=add_special_tokens,
            details=dict(details or {}),
            attributes=list(base.attributes_of(scorer)),
        )

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop and return. To be called from the main thread.

        Raises:
            ConfigError: the port is busy, or the options cannot work. Nothing was started.
            RewardServerError: the server did not become ready, or tritonserver died while serving.
        """
        check_options(self.info, self._port, self._max_queue_delay, self._preferred_batch_sizes)
        check_port(self._host, self._port)
        with self._signals_raise():
            guard = Guard()
            try:
                self._serve(guard)
            except _StopRequested as request:
                logger.info("event=stopped signal=%s", request.name)
            finally:
                self._stopping = True
                guard.close()

    def _serve(self, guard: Guard) -> None:
        home = make_home(self.info.name)
        guard.remove_folder(home)
        guard.watch_process(os.getpid())
        # PyTriton's segments bear this process's id. Those of an earlier process of the same id are gone by then.
        guard.remove_shared_memory(f"pytrtion{os.getpid()}-")
        if self._ready_file is not None:
            guard.remove_file(self._ready_file)
        triton = self._build(home)
        try:
            triton.run()
            processes = psutil.Process().children(recursive=True)
            tritonserver = next((p for p in processes if p.name() == "tritonserver"), None)
            if tritonserver is None:
                raise RewardServerError("tritonserver ended while it started; its last lines are above")
            guard.watch_process(tritonserver.pid)
            watched = [tritonserver, *tritonserver.children(recursive=True)]
            self._check_by_canary()
            self._announce()
            self._watch(triton, watched)
        finally:
            self._stopping = True
            self._stop(triton)

    def _build(self, home: Path) -> Triton:
        # The Python backend looks for libpython in the system's path alone; pyenv's and conda's are elsewhere.
        libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        os.environ["PYTRITON_HOME"] = str(home)
        try:
            from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
            from pytriton.triton import Triton, TritonConfig
        except ImportError as error:
            raise ConfigError(
                [f"the reward server needs PyTriton ({error}); install it with: pip install 'reinforce-rl[server]'"]
            ) from error

        config = TritonConfig.from_dict(
            {
                "http_address": self._host,
                "http_port": self._port,
                "allow_grpc": False,
                "allow_metrics": False,
                "exit_timeout_secs": max(1, round(self._stop_timeout)),
            }
        )
        triton = Triton(config=config, workspace=home / WORKSPACE)
        triton.bind(
            self.info.name,
            self._requests.__call__,
            inputs=[
                Tensor(name=protocol.SENTENCES, dtype=np.bytes_, shape=(1,), optional=True),
                Tensor(name=protocol.TOKENS, dtype=np.int64, shape=(-1,), optional=True),
                Tensor(name=protocol.SEQUENCE_LENGTHS, dtype=np.int64, shape=(1,), optional=True),
                Tensor(name=protocol.PROMPTS, dtype=np.bytes_, shape=(1,), optional=True),
                Tensor(name=protocol.RESPONSES, dtype=np.bytes_, shape=(1,), optional=True),
                Tensor(name=protocol.MESSAGES, dtype=np.bytes_, shape=(1,), optional=True),
                Tensor(name=protocol.METADATA, dtype=np.bytes_, shape=(1,), optional=True),
                Tensor(name=protocol.FINISHED, dtype=np.int64, shape=(1,), optional=True),
            ],
            outputs=[
                Tensor(name=protocol.REWARDS, dtype=np.float32, shape=(1,)),
                Tensor(name=protocol.STATUS, dtype=np.int32, shape=(1,)),
                *self._attribute_outputs(),
            ],
            config=ModelConfig(
                max_batch_size=self.info.max_batch_size,
                batcher=DynamicBatcher(
                    max_queue_delay_microseconds=round(self._max_queue_delay * 1e6),
                    preferred_batch_size=self._preferred_batch_sizes or None,
                ),
            ),
            strict=True,
        )
        description = np.array([self.info.to_json().encode()])

        def describe(requests: Sequence[Any]) -> list[dict[str, np.ndarray]]:
            return [{protocol.INFO_OUTPUT: description} for _ in requests]

        triton.bind(
            protocol.INFO_MODEL,
            describe,
            # Triton wants a model to have an input; this one is never read.
            inputs=[Tensor(name="unused", dtype=np.bytes_, shape=(1,), optional=True)],
            outputs=[Tensor(name=protocol.INFO_OUTPUT, dtype=np.bytes_, shape=(1,))],
            config=ModelConfig(batching=False),
            strict=True,
        )
        return triton

    def _attribute_outputs(self) -> list[Any]:
        from pytriton.model_config import Tensor

        names = self.info.attributes
        return [Tensor(name=protocol.ATTRIBUTES, dtype=np.float32, shape=(len(names),))] if names else []

    @property
    def _local_host(self) -> str:
        return "127.0.0.1" if self._host == "0.0.0.0" else self._host

    def _check_by_canary(self) -> None:
        """Health can be green with a dead back end, so a sample must have gone all the way."""
        try:
            health.check_once(self._local_host, self._port, self.info.name, timeout=10.0)
        except health.NotReadyYet as error:
            raise RewardServerError(f"the server at {self._host}:{self._port} started, but {error}") from error
        inputs = self._requests.canary_inputs
        answer = health.infer_json(self._local_host, self._port, self.info.name, inputs, CANARY_SECONDS)
        status = answer[protocol.STATUS][0]
        if status != base.STATUS_OK:
            raise RewardServerError(
                f"the reward model cannot score a sample of one token (id 0): {base.STATUS_TEXT.get(status, status)}. "
                "See the log above; nothing is served."
            )

    def _announce(self) -> None:
        url = f"http://{self._host}:{self._port}"
        if self._ready_file is not None:
            self._ready_file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._ready_file.with_name(self._ready_file.name + ".tmp")
            temporary.write_text(json.dumps({"host": self._local_host, "port": self._port, "pid": os.getpid()}))
            os.replace(temporary, self._ready_file)
        logger.info("event=ready url=%s info=%s", url, self.info.to_json())
        print(f"ready at {url}", flush=True)

    def _watch(self, triton: Triton, processes: list[psutil.Process]) -> None:
        next_summary = time.monotonic() + SUMMARY_SECONDS
        last = self._requests.totals
        while True:
            if self._stop_signal is not None:  # it came at the start, and a library swallowed the exception
                raise _StopRequested(self._stop_signal)
            time.sleep(WATCH_SECONDS)
            self._check()
            dead = [p.pid for p in processes if not p.is_running() or p.status() == psutil.STATUS_ZOMBIE]
            if dead or not triton.is_alive():
                raise RewardServerError(
                    f"tritonserver on {self._host}:{self._port} died (process {dead or 'unknown'}); its last lines "
                    "are above. Clients wait and retry, so start the server again on the same port."
                )
            if time.monotonic() >= next_summary:
                totals = self._requests.totals
                if totals != last:
                    logger.info("event=totals %s", totals)
                last = totals
                next_summary = time.monotonic() + SUMMARY_SECONDS

    def _stop(self, triton: Triton) -> None:
        """Let calls in flight finish, then end tritonserver; the guard removes whatever is left after it."""
        logger.info("event=stopping timeout_seconds=%g", self._stop_timeout)
        started = time.monotonic()
        children = psutil.Process().children(recursive=True)

        def stop() -> None:
            try:
                triton.stop()
            except Exception:  # it is ending either way, and the guard cleans up
                logger.exception("event=stop_failed")

        stopper = threading.Thread(target=stop, daemon=True, name="stop-triton")
        stopper.start()
        while stopper.is_alive():
            stopper.join(0.1)
            elapsed = time.monotonic() - started
            # Triton waits out its whole limit for a client that only keeps its connection open.
            quiet = min(elapsed, self._requests.idle_seconds()) > QUIET_SECONDS
            if quiet or elapsed > self._stop_timeout + QUIET_SECONDS:
                for process in children:
                    with contextlib.suppress(psutil.Error):
                        if process.name() == "tritonserver":
                            process.kill()
                stopper.join(QUIET_SECONDS)
                break

    @contextlib.contextmanager
    def _signals_raise(self) -> Iterator[None]:
        """SIGTERM and SIGINT raise `_StopRequested` in the main thread; while stopping they change nothing."""

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
    """A signal asked for the end. As a SystemExit it passes through libraries, gevent's event loop among them."""

    def __init__(self, name: str):
        super().__init__(0)
        self.name = name


def make_home(name: str) -> Path:
    """A fresh folder for PyTriton's files, with a path short enough for the Unix sockets in it.

    A batch system's TMPDIR is often too long; then the folder is made in /tmp.

    Raises:
        ConfigError: the model's name alone is too long.
    """
    longest = max(name, protocol.INFO_MODEL, key=len) + "_0_0-server.sock"
    for parent in (tempfile.gettempdir(), "/tmp"):
        room = SOCKET_PATH_LIMIT - len(f"{parent}/{HOME_PREFIX}12345678/{WORKSPACE}/{longest}".encode())
        if room >= 0:
            return Path(tempfile.mkdtemp(prefix=HOME_PREFIX, dir=parent)).resolve()
    raise ConfigError([f"the model's name '{name}' is too long for a socket's path; shorten it by {-room} letters"])


def check_options(info: ServerInfo, port: int, max_queue_delay: float, preferred: Sequence[int] = ()) -> None:
    """Raises ConfigError naming every option that cannot work."""
    faults = []
    if not 1 <= port <= 65535:
        faults.append(f"inference.port is {port}; expected 1 to 65535")
    if info.max_batch_size < 1:
        faults.append(f"inference.max_batch_size is {info.max_batch_size}; expected at least 1")
    if max_queue_delay < 0:
        faults.append(f"the queue delay is {max_queue_delay} s; expected 0 or more")
    if not all(1 <= size <= info.max_batch_size for size in preferred):
        faults.append(
            f"inference.preferred_batch_sizes is {list(preferred)}; expected numbers from 1 to "
            f"inference.max_batch_size, which is {info.max_batch_size}"
        )
    if not info.name or not all(c.isascii() and (c.isalnum() or c in "._-") for c in info.name):
        faults.append(f"the model's name is '{info.name}'; expected letters, digits, '.', '_' and '-'")
    if info.name == protocol.INFO_MODEL:
        faults.append(f"the model's name '{info.name}' is taken by the server's own description")
    if info.tokenizer is not None and info.vocab_size is not None and info.vocab_size < info.tokenizer.vocab_size:
        faults.append(
            f"the reward model knows {info.vocab_size} token ids, its tokenizer {info.tokenizer.vocab_size}; "
            "expected the tokenizer that the model was trained with"
        )
    if sys.platform != "linux":
        faults.append(f"PyTriton runs on Linux only, and this is {sys.platform}")
    if int(np.__version__.split(".")[0]) >= 2:
        faults.append(
            f"PyTriton 0.7 breaks with numpy {np.__version__}; install numpy below 2 in the server's environment"
        )
    if faults:
        raise ConfigError(faults)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError where the port cannot be listened on.

    It comes before Triton and before the model: with a foreign program on the port Triton waits for over a minute.
    """
    deadline = time.monotonic() + PORT_WAIT_SECONDS
    while True:
        try:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
                return
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise ConfigError([_port_fault(host, port, error)]) from error


def _port_fault(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program. Choose another with inference.port=N, here and for "
            f"the actor, or end that program (ss -ltnp 'sport = :{port}' names it)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} of {host} may not be used by this user; choose one above 1023 with inference.port=N"
    return (
        f"cannot listen on {host}:{port} ({health.reason_of(error)}); set inference.host to an address of this machine"
    )
