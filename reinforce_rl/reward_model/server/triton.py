"""PyTriton behind the front door: on a Unix socket in a private folder, without model control.

By default PyTriton listens on TCP and loads models over HTTP, with a token on tritonserver's
command line, which every local user can read; whoever has it can load a model, that is, run Python
code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from reinforce_rl.config.rewards import MODEL_NAME, InferenceConfig
from reinforce_rl.errors import ConfigError, Fault, RewardServerError
from reinforce_rl.reward_model.server.scoring import RequestScorer
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.transport import FailedAttempt, exchange, url_of, wait_for
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.net import Address
from reinforce_rl.utils.process import Child, without_secrets

if TYPE_CHECKING:
    from pytriton.models.model import Model

logger = logging.getLogger(__name__)

HOME_PREFIX = "reward-server-"
WORKSPACE = "workspace"
TRITON_SOCKET = "triton.sock"
SOCKET_PATH_LIMIT = 107  # bytes that Linux allows for a Unix socket's path
START_SECONDS = 120.0
ASK_SECONDS = 5.0
POLL_SECONDS = 0.1
STOP_SECONDS = 6.0  # after which it is killed; a plain stop takes about 4 s
PRINT_SECONDS = 2.0  # for the last lines of a tritonserver that has ended
# Its segments in /dev/shm are called this and the process id.
SHARED_MEMORY_PREFIX = "reinforce-rl-"
# At the start, and what is added at a time. As PyTriton's own; Triton's are 64 MB.
SHARED_MEMORY_BYTES = 2**22
SHARED_MEMORY_GROWTH_BYTES = 2**20
# Logged by a healthy Triton on a machine without a GPU, and for each connection over a Unix socket.
NOISE = (b"CudaDriverHelper has not been initialized", b"NODELAY NOT SUPPORTED")


class PrivateTriton:
    """tritonserver with the reward model, as PyTriton starts it.

    Only processes of this user reach it: its Unix socket TRITON_SOCKET is in `home`, a folder from
    `make_home`. Raises ConfigError without PyTriton.
    """

    def __init__(
        self, home: Path, info: ServerInfo, requests: RequestScorer, inference: InferenceConfig
    ):
        try:
            from pytriton.utils.workspace import Workspace
        except ImportError as error:
            sentence = (
                f"the reward server needs PyTriton ({error}), which runs on Linux only; install it "
                "with: pip install 'reinforce-rl[server]'"
            )
            raise ConfigError([Fault(sentence, key="serve.package.missing")]) from error
        self._socket_path = home / TRITON_SOCKET
        self._exit_seconds = max(1, round(inference.stop_timeout_seconds))
        self._workspace = Workspace(home / WORKSPACE)
        self._model = self._reward_model(info, requests, inference)
        self._server: Child | None = None
        self._printer = threading.Thread(
            target=self._print_output, daemon=True, name="tritonserver's output"
        )

    def _reward_model(
        self, info: ServerInfo, requests: RequestScorer, inference: InferenceConfig
    ) -> Model:
        from pytriton.decorators import TritonContext
        from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
        from pytriton.models.model import Model

        inputs = [
            Tensor(
                name=name,
                dtype=np.int64 if datatype == "INT64" else np.bytes_,
                shape=(width,),
                optional=True,
            )
            for name, (datatype, width) in wire.INPUTS.items()
        ]
        outputs = [
            Tensor(name=wire.REWARDS, dtype=np.float32, shape=(1,)),
            Tensor(name=wire.STATUS, dtype=np.int32, shape=(1,)),
        ]
        if info.attributes:
            outputs.append(
                Tensor(name=wire.ATTRIBUTES, dtype=np.float32, shape=(len(info.attributes),))
            )
        batcher = DynamicBatcher(
            max_queue_delay_microseconds=round(inference.max_queue_delay_ms * 1000),
            preferred_batch_size=inference.preferred_batch_sizes or None,
        )
        config = ModelConfig(max_batch_size=info.max_batch_size, batcher=batcher)
        model = Model(
            model_name=info.name,
            model_version=1,
            inference_fn=requests.__call__,
            inputs=inputs,
            outputs=outputs,
            config=config,
            workspace=self._workspace,
            triton_context=TritonContext(),
            strict=True,
        )
        model.generate_model(self._workspace.model_store_path)
        return model

    def run(self) -> list[psutil.Process]:
        """Start tritonserver; return it and its children.

        Raises RewardServerError if it does not become ready.
        """
        # PyTriton's own `Triton` listens on TCP, and asks there whether it is ready. Its output is
        # not to be filtered, nor its environment: it logs the whole of it at log_level=debug.
        self._server = Child(
            self._command(),
            death_signal=signal.SIGTERM,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._printer.start()
        self._wait_until_ready(self._server)
        self._model.setup()
        process = psutil.Process(self._server.pid)
        return [process, *process.children(recursive=True)]

    def _command(self) -> list[str]:
        from pytriton.utils.distribution import get_root_module_path, get_stub_path

        programs = get_root_module_path() / "tritonserver"
        # The stub, which belongs to a version of Python, is looked for among the backends.
        backends = self._workspace.path / "backends"
        shutil.copytree(programs / "backends", backends)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy(get_stub_path(python), backends / "python" / "triton_python_backend_stub")
        options = {
            "model-repository": self._workspace.model_store_path,
            "model-control-mode": "none",
            "backend-directory": backends,
            "cache-directory": programs / "caches",
            "http-address": f"unix:{self._socket_path}",
            "allow-grpc": False,
            "allow-metrics": False,
            "log-info": False,
            "exit-timeout-secs": self._exit_seconds,
            "pinned-memory-pool-byte-size": 0,  # the model is in another process
        }
        python_options = {
            "shm-region-prefix-name": f"{SHARED_MEMORY_PREFIX}{os.getpid()}-{secrets.token_hex(4)}",
            "shm-default-byte-size": SHARED_MEMORY_BYTES,
            "shm-growth-byte-size": SHARED_MEMORY_GROWTH_BYTES,
        }
        command = [str(programs / "bin" / "tritonserver")]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [
            f"--backend-config=python,{name}={value}" for name, value in python_options.items()
        ]
        return command

    def _environment(self) -> dict[str, str]:
        from pytriton.utils.distribution import get_libs_path

        environment = without_secrets(os.environ)
        libraries = [
            # The Python backend finds only the system's libpython, not pyenv's or conda's.
            sysconfig.get_config_var("LIBDIR"),
            environment.get("LD_LIBRARY_PATH"),
            str(get_libs_path()),
        ]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        # The backend runs the first python3 there.
        environment["PATH"] = f"{sys.exec_prefix}/bin:{environment['PATH']}"
        return environment

    def is_alive(self) -> bool:
        """Return False once tritonserver, or the thread that calls the model, has ended."""
        if self._server is None or self._server.exit_code is not None:
            return False
        return self._model.is_alive()

    def ask(self, path: str, seconds: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a GET, or a POST of `body`; return the answer's code and body.

        RewardServerError if none is in time.
        """
        url = url_of(Address("localhost", 80), path)
        work = exchange(url, seconds, body=body, socket_path=self._socket_path)
        try:
            answer = wait_for(work)
        except FailedAttempt as error:
            raise RewardServerError(
                f"tritonserver, asked for {path}, {error}",
                key="serve.triton.no_answer",
            ) from error
        return answer.code, answer.body

    def stop(self, in_order: bool) -> None:
        """End tritonserver, at once unless `in_order`; the server's reaper removes what is left."""
        if self._server is not None:
            if in_order:
                self._server.send_signal(signal.SIGINT)
                self._server.wait(STOP_SECONDS)
            self._server.kill()
            self._printer.join(PRINT_SECONDS)
        # It waits for a stuck model.
        cleaner = threading.Thread(target=self._clean_model, daemon=True, name="clean-model")
        cleaner.start()
        cleaner.join(STOP_SECONDS if in_order else 1.0)

    def _clean_model(self) -> None:
        try:
            self._model.clean()
        except Exception:  # it is ending either way, and the reaper cleans up
            logger.exception("event=stop_failed")

    def _wait_until_ready(self, server: Child) -> None:
        deadline = time.monotonic() + START_SECONDS
        is_ready = False
        while not is_ready:
            time.sleep(POLL_SECONDS)
            with contextlib.suppress(RewardServerError):
                is_ready = self.ask("/v2/health/ready", ASK_SECONDS)[0] == 200
            # soon after creation: a reader that has it open keeps access
            self._hide_shared_memory()
            if server.exit_code is not None:
                self._printer.join(PRINT_SECONDS)
                raise RewardServerError(
                    "tritonserver ended while it started; its last lines are above",
                    key="serve.triton.ended_at_start",
                )
            if time.monotonic() > deadline:
                raise RewardServerError(
                    f"tritonserver was not ready within {START_SECONDS:.0f} s; its last lines are "
                    "above",
                    key="serve.triton.not_ready",
                )

    def _hide_shared_memory(self) -> None:
        """Make this user's segments in /dev/shm private; Triton creates them world-readable,
        whatever the umask.
        """
        for segment in Path("/dev/shm").glob(f"{SHARED_MEMORY_PREFIX}{os.getpid()}-*"):
            with contextlib.suppress(OSError):
                keep_private(segment)

    def _print_output(self) -> None:
        assert self._server is not None and self._server.process.stdout is not None
        with self._server.process.stdout as output:
            for line in output:
                if line.strip() and not any(noise in line for noise in NOISE):
                    print(line.decode(errors="replace").rstrip("\n"), flush=True)


def keep_private(path: Path) -> None:
    """Restrict a regular file to its owner; never follows links, which anyone can put into
    /dev/shm.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and (status.st_uid, status.st_nlink) == (os.geteuid(), 1):
            os.fchmod(file.fileno(), 0o600)


def make_home(name: str) -> Path:
    """Create a folder for PyTriton's files, with a path short enough for the Unix sockets in it.

    Falls back to /tmp, since a batch system's TMPDIR is often too long; raises ConfigError if
    `name` is too long, or cannot be a file's.
    """
    if not MODEL_NAME.fullmatch(name):
        sentence = (
            f"the model's name is {name!r}; expected letters, digits, dots, underscores and hyphens"
        )
        raise ConfigError([Fault(sentence, key="serve.name.characters")])
    longest = f"{name}_0_0-server.sock"
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
