"""PyTriton's server on a Unix socket in a private folder, without model control.

By default PyTriton listens on TCP and loads models over HTTP, with a token on tritonserver's command line, which every
local user can read; whoever has it can load a model, that is, run Python code.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import stat
import time
from pathlib import Path

from reinforce_rl.errors import RewardServerError

START_SECONDS = 120.0
ASK_SECONDS = 5.0
POLL_SECONDS = 0.1
# Logged by a healthy Triton on a machine without a GPU, and for each connection over a Unix socket.
NOISE = (b"CudaDriverHelper has not been initialized", b"NODELAY NOT SUPPORTED")


class PrivateTriton:
    """PyTriton's `Triton`, reachable by this user's processes only.

    Args:
        socket_path: Unix socket to listen on, in a folder that only this user may enter.
        workspace: folder for PyTriton's files; it is created.
        exit_timeout: seconds for calls in flight at the end.

    Raises:
        ImportError: PyTriton is not installed.
    """

    def __init__(self, socket_path: Path, workspace: Path, exit_timeout: int):
        from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy, TritonSecurityConfig

        self._socket_path = socket_path
        self._output = b""
        # A dead address: PyTriton's own client, which cannot use Unix sockets, still asks here after Triton's end.
        config = {
            "http_address": "127.0.0.1",
            "http_port": 1,
            "allow_grpc": False,
            "allow_metrics": False,
            "exit_timeout_secs": exit_timeout,
        }
        self._triton = Triton(
            config=TritonConfig.from_dict(config),
            workspace=workspace,
            triton_lifecycle_policy=TritonLifecyclePolicy(launch_triton_on_startup=True, local_model_store=True),
            security_config=TritonSecurityConfig(restricted_endpoints=[]),
        )
        self._triton._triton_server_config.update_config(
            {
                "http-address": f"unix:{socket_path}",
                "model-control-mode": "none",
                "load-model": None,
                "log-info": False,
                "pinned-memory-pool-byte-size": 0,  # the model is in another process
            }
        )
        self._triton._wait_for_server = self._wait_until_ready
        self._triton._wait_for_models = lambda: None  # Triton is ready once they are
        self.bind, self.stop, self.is_alive = self._triton.bind, self._triton.stop, self._triton.is_alive

    def run(self) -> None:
        """Start tritonserver and wait; raise RewardServerError if it does not become ready."""
        self._triton._initialize_server()
        assert self._triton._triton_server is not None
        self._triton._triton_server._record_logs = self._print_output
        self._triton.run()

    def ask(self, path: str, seconds: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a GET, or a POST if there is a body, and return the answer's code and body.

        Raises RewardServerError if there is no answer in time.
        """
        connection = http.client.HTTPConnection("localhost")
        try:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(seconds)
            connection.sock.connect(str(self._socket_path))
            connection.request("GET" if body is None else "POST", path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise RewardServerError(
                f"tritonserver gave no answer to {path} ({str(error) or type(error).__name__})"
            ) from error
        finally:
            connection.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            self._hide_shared_memory()  # soon after creation: a reader that has it open keeps access
            if not self._triton._is_alive_impl():
                raise RewardServerError("tritonserver ended while it started; its last lines are above")
            if time.monotonic() > deadline:
                raise RewardServerError(
                    f"tritonserver was not ready within {START_SECONDS:.0f} s; its last lines are above"
                )
            time.sleep(POLL_SECONDS)
        self._hide_shared_memory()

    def _hide_shared_memory(self) -> None:
        """Make this user's segments in /dev/shm private; Triton creates them world-readable, whatever the umask."""
        for segment in Path("/dev/shm").glob(f"pytrtion{os.getpid()}-*"):
            with contextlib.suppress(OSError):
                keep_private(segment)

    def _is_ready(self) -> bool:
        try:
            return self.ask("/v2/health/ready", ASK_SECONDS)[0] == 200
        except RewardServerError:
            return False

    def _print_output(self, line: str | bytes) -> None:
        # Called per byte: with str if it decodes by itself, else with bytes.
        *lines, self._output = (self._output + (line.encode() if isinstance(line, str) else line)).split(b"\n")
        for whole in lines:
            if whole and not any(noise in whole for noise in NOISE):
                print(whole.decode(errors="replace"), flush=True)


def keep_private(path: Path) -> None:
    """Restrict a regular file to its owner; never follows links, which anyone can put into /dev/shm."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and (found.st_uid, found.st_nlink) == (os.geteuid(), 1):
            os.fchmod(file.fileno(), 0o600)
