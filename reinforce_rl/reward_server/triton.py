"""PyTriton behind the front door: on a Unix socket in a private folder, without model control.

By default PyTriton listens on TCP and loads models over HTTP, with a token on tritonserver's command line, which every
local user can read; whoever has it can load a model, that is, run Python code.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import stat
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from reinforce_rl.config.rewards import InferenceConfig
from reinforce_rl.errors import ConfigError, Fault, RewardServerError
from reinforce_rl.reward_server.scoring import RequestScorer
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.process import without_secrets

logger = logging.getLogger(__name__)

HOME_PREFIX = "reward-server-"
WORKSPACE = "workspace"
TRITON_SOCKET = "triton.sock"
SOCKET_PATH_LIMIT = 107  # bytes that Linux allows for a Unix socket's path
START_SECONDS = 120.0
ASK_SECONDS = 5.0
POLL_SECONDS = 0.1
STOP_SECONDS = 6.0  # after which it is killed; a plain stop takes about 4 s
# Logged by a healthy Triton on a machine without a GPU, and for each connection over a Unix socket.
NOISE = (b"CudaDriverHelper has not been initialized", b"NODELAY NOT SUPPORTED")


class PrivateTriton:
    """PyTriton's `Triton`, reachable by this user's processes only, with the reward model and its description.

    Its Unix socket TRITON_SOCKET is in `home`, a folder from `make_home`. Raises ConfigError without PyTriton.
    """

    def __init__(
        self, home: Path, info: ServerInfo, requests: RequestScorer, inference: InferenceConfig
    ):
        # The Python backend finds only the system's libpython, not pyenv's or conda's.
        libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        os.environ["PYTRITON_HOME"] = str(home)
        try:
            from pytriton.triton import (
                Triton,
                TritonConfig,
                TritonLifecyclePolicy,
                TritonSecurityConfig,
            )
        except ImportError as error:
            sentence = (
                f"the reward server needs PyTriton ({error}), which runs on Linux only; install it "
                "with: pip install 'reinforce-rl[server]'"
            )
            raise ConfigError([Fault(sentence, key="serve.package.missing")]) from error
        self._socket_path = home / TRITON_SOCKET
        self._output = b""
        # A dead address: PyTriton's own client, which cannot use Unix sockets, still asks here
        # after Triton's end.
        config = {
            "http_address": "127.0.0.1",
            "http_port": 1,
            "allow_grpc": False,
            "allow_metrics": False,
        }
        config["exit_timeout_secs"] = max(1, round(inference.stop_timeout_seconds))
        self._triton = Triton(
            config=TritonConfig.from_dict(config),
            workspace=home / WORKSPACE,
            triton_lifecycle_policy=TritonLifecyclePolicy(
                launch_triton_on_startup=True, local_model_store=True
            ),
            security_config=TritonSecurityConfig(restricted_endpoints=[]),
        )
        options: dict[str, Any] = {
            "model-control-mode": "none",
            "load-model": None,
            "log-info": False,
        }
        options["pinned-memory-pool-byte-size"] = 0  # the model is in another process
        # As of 0.7 PyTriton takes neither these options nor a Unix socket, and asks over TCP
        # whether Triton is ready.
        self._triton._triton_server_config.update_config(
            {"http-address": f"unix:{self._socket_path}", **options}
        )
        self._triton._wait_for_server = self._wait_until_ready
        self._triton._wait_for_models = lambda: None  # Triton is ready once they are
        self.is_alive = self._triton.is_alive
        self._bind(info, requests, inference)

    def _bind(self, info: ServerInfo, requests: RequestScorer, inference: InferenceConfig) -> None:
        from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

        inputs = [
            Tensor(
                name=name,
                dtype=np.int64 if datatype == "INT64" else np.bytes_,
                shape=(width,),
                optional=True,
            )
            for name, (datatype, width) in wire.INPUTS.items()
        ]
        outputs = [Tensor(name=wire.REWARDS, dtype=np.float32, shape=(1,))]
        outputs.append(Tensor(name=wire.STATUS, dtype=np.int32, shape=(1,)))
        if info.attributes:
            outputs.append(
                Tensor(name=wire.ATTRIBUTES, dtype=np.float32, shape=(len(info.attributes),))
            )
        batcher = DynamicBatcher(
            max_queue_delay_microseconds=round(inference.max_queue_delay_ms * 1000),
            preferred_batch_size=inference.preferred_batch_sizes or None,
        )
        config = ModelConfig(max_batch_size=info.max_batch_size, batcher=batcher)
        self._triton.bind(info.name, requests.__call__, inputs, outputs, config=config, strict=True)
        description = np.array([info.to_json().encode()])

        def describe(requests: Sequence[Any]) -> list[dict[str, np.ndarray]]:
            return [{wire.INFO_OUTPUT: description} for _ in requests]

        # Triton requires an input; this one is never read.
        inputs = [Tensor(name="unused", dtype=np.bytes_, shape=(1,), optional=True)]
        outputs = [Tensor(name=wire.INFO_OUTPUT, dtype=np.bytes_, shape=(1,))]
        config = ModelConfig(batching=False)
        self._triton.bind(wire.INFO_MODEL, describe, inputs, outputs, config=config, strict=True)

    def run(self) -> list[psutil.Process]:
        """Start tritonserver; return it and its children. Raises RewardServerError if it does not become ready."""
        # As of 0.7 only PyTriton's own object decides about the program's output and environment.
        self._triton._initialize_server()
        assert self._triton._triton_server is not None
        server = self._triton._triton_server
        server._record_logs = self._print_output
        original_env = server._get_env
        # PyTriton logs the whole environment at log_level=debug.
        server._get_env = lambda: without_secrets(original_env())
        self._triton.run()
        for process in _tritonservers():
            return [process, *process.children(recursive=True)]
        raise RewardServerError(
            "tritonserver ended while it started; its last lines are above",
            key="serve.triton.ended_at_start",
        )

    def ask(self, path: str, seconds: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a GET, or a POST of `body`; return the answer's code and body. RewardServerError if none is in time."""
        try:
            with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(seconds)
                connection.sock.connect(str(self._socket_path))
                connection.request("GET" if body is None else "POST", path, body)
                answer = connection.getresponse()
                return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise RewardServerError(
                f"tritonserver gave no answer to {path} ({why})",
                key="serve.triton.no_answer",
            ) from error

    def stop(self, in_order: bool) -> None:
        """End tritonserver, at once unless `in_order`; the server's reaper removes what is left."""
        servers = _tritonservers()
        stopper = threading.Thread(target=self._stop, daemon=True, name="stop-triton")
        stopper.start()
        stopper.join(STOP_SECONDS if in_order else 0.0)
        for process in servers if stopper.is_alive() else ():
            with contextlib.suppress(psutil.Error):
                process.kill()
        stopper.join(STOP_SECONDS if in_order else 1.0)  # PyTriton waits for a stuck model

    def _stop(self) -> None:
        try:
            self._triton.stop()
        except Exception:  # it is ending either way, and the reaper cleans up
            logger.exception("event=stop_failed")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        is_ready = False
        while not is_ready:
            time.sleep(POLL_SECONDS)
            with contextlib.suppress(RewardServerError):
                is_ready = self.ask("/v2/health/ready", ASK_SECONDS)[0] == 200
            # soon after creation: a reader that has it open keeps access
            self._hide_shared_memory()
            # PyTriton's `is_alive` asks its models too, which are not there yet, as of 0.7.
            if not self._triton._is_alive_impl():
                raise RewardServerError(
                    "tritonserver ended while it started; its last lines are above",
                    key="serve.triton.ended_at_start",
                )
            if time.monotonic() > deadline:
                raise RewardServerError(
                    f"tritonserver was not ready within {START_SECONDS:.0f} s; its last lines are above",
                    key="serve.triton.not_ready",
                )

    def _hide_shared_memory(self) -> None:
        """Make this user's segments in /dev/shm private; Triton creates them world-readable, whatever the umask."""
        for segment in Path("/dev/shm").glob(f"pytrtion{os.getpid()}-*"):
            with contextlib.suppress(OSError):
                keep_private(segment)

    def _print_output(self, line: str | bytes) -> None:
        # Called per byte: with str if it decodes by itself, else with bytes.
        *lines, self._output = (
            self._output + (line.encode() if isinstance(line, str) else line)
        ).split(b"\n")
        for whole in lines:
            if whole and not any(noise in whole for noise in NOISE):
                print(whole.decode(errors="replace"), flush=True)


def _tritonservers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process.name() == "tritonserver":
                found.append(process)
    return found


def keep_private(path: Path) -> None:
    """Restrict a regular file to its owner; never follows links, which anyone can put into /dev/shm."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and (found.st_uid, found.st_nlink) == (os.geteuid(), 1):
            os.fchmod(file.fileno(), 0o600)


def make_home(name: str) -> Path:
    """Create a folder for PyTriton's files, with a path short enough for the Unix sockets in it.

    Falls back to /tmp, since a batch system's TMPDIR is often too long; raises ConfigError if `name` is too long.
    """
    longest = max(name, wire.INFO_MODEL, key=len) + "_0_0-server.sock"
    for parent in (tempfile.gettempdir(), "/tmp"):
        room = SOCKET_PATH_LIMIT - len(
            f"{parent}/{HOME_PREFIX}12345678/{WORKSPACE}/{longest}".encode()
        )
        if room >= 0:
            return Path(tempfile.mkdtemp(prefix=HOME_PREFIX, dir=parent)).resolve()
    sentence = (
        f"the model's name '{name}' is too long for a socket's path; shorten it by {-room} letters"
    )
    raise ConfigError([Fault(sentence, key="serve.name.too_long")])
