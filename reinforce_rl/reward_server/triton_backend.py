"""PyTriton behind the front door: its models, and how it is stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from reinforce_rl.errors import ConfigError
from reinforce_rl.reward_server.private_triton import PrivateTriton
from reinforce_rl.reward_server.scoring import RequestScorer
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.wire import ServerInfo

logger = logging.getLogger(__name__)

HOME_PREFIX = "reward-server-"
WORKSPACE = "workspace"
TRITON_SOCKET = "triton.sock"
SOCKET_PATH_LIMIT = 107  # bytes that Linux allows for a Unix socket's path
QUIET_SECONDS = 6.0  # idle time while stopping after which the last answer has left; a plain stop takes about 4 s


def build_triton(
    info: ServerInfo,
    requests: RequestScorer,
    *,
    home: Path,
    max_queue_delay: float,
    preferred_batch_sizes: Sequence[int],
    stop_timeout: float,
) -> PrivateTriton:
    """Return a Triton, not yet running, with the reward model and the server's description.

    Args:
        home: private folder of this user; holds Triton's Unix socket, TRITON_SOCKET.
        max_queue_delay: seconds that a request may wait to be merged with others.
        stop_timeout: seconds for calls in flight at the end.
        preferred_batch_sizes: samples that merged requests should add up to; empty: any number.

    Raises:
        ConfigError: PyTriton is not installed.
    """
    # The Python backend finds only the system's libpython, not pyenv's or conda's.
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    os.environ["PYTRITON_HOME"] = str(home)
    try:
        from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

        triton = PrivateTriton(home / TRITON_SOCKET, home / WORKSPACE, max(1, round(stop_timeout)))
    except ImportError as error:
        raise ConfigError(
            [f"the reward server needs PyTriton ({error}); install it with: pip install 'reinforce-rl[server]'"]
        ) from error

    names = info.attributes
    attributes = [Tensor(name=wire.ATTRIBUTES, dtype=np.float32, shape=(len(names),))] if names else []
    triton.bind(
        info.name,
        requests.__call__,
        inputs=[
            Tensor(name=name, dtype=np.int64 if datatype == "INT64" else np.bytes_, shape=(width,), optional=True)
            for name, (datatype, width) in wire.INPUTS.items()
        ],
        outputs=[
            Tensor(name=wire.REWARDS, dtype=np.float32, shape=(1,)),
            Tensor(name=wire.STATUS, dtype=np.int32, shape=(1,)),
            *attributes,
        ],
        config=ModelConfig(
            max_batch_size=info.max_batch_size,
            batcher=DynamicBatcher(
                max_queue_delay_microseconds=round(max_queue_delay * 1e6),
                preferred_batch_size=list(preferred_batch_sizes) or None,
            ),
        ),
        strict=True,
    )
    description = np.array([info.to_json().encode()])

    def describe(requests: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        return [{wire.INFO_OUTPUT: description} for _ in requests]

    triton.bind(
        wire.INFO_MODEL,
        describe,
        # Triton requires an input; this one is never read.
        inputs=[Tensor(name="unused", dtype=np.bytes_, shape=(1,), optional=True)],
        outputs=[Tensor(name=wire.INFO_OUTPUT, dtype=np.bytes_, shape=(1,))],
        config=ModelConfig(batching=False),
        strict=True,
    )
    return triton


def stop_triton(triton: PrivateTriton, requests: RequestScorer, timeout: float) -> None:
    """Let calls in flight finish, then end tritonserver; the server's guard removes what is left."""
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
        # Triton waits its whole limit for a client that merely keeps its connection open.
        scored = requests.progress.read()
        quiet = not scored.busy and min(elapsed, scored.quiet_seconds) > QUIET_SECONDS
        if quiet or elapsed > timeout + QUIET_SECONDS:
            for process in children:
                with contextlib.suppress(psutil.Error):
                    if process.name() == "tritonserver":
                        process.kill()
            stopper.join(QUIET_SECONDS)
            break


def make_home(name: str) -> Path:
    """Create a folder for PyTriton's files, with a path short enough for the Unix sockets in it.

    Falls back to /tmp, since a batch system's TMPDIR is often too long; raises ConfigError if `name` is too long.
    """
    longest = max(name, wire.INFO_MODEL, key=len) + "_0_0-server.sock"
    for parent in (tempfile.gettempdir(), "/tmp"):
        room = SOCKET_PATH_LIMIT - len(f"{parent}/{HOME_PREFIX}12345678/{WORKSPACE}/{longest}".encode())
        if room >= 0:
            return Path(tempfile.mkdtemp(prefix=HOME_PREFIX, dir=parent)).resolve()
    raise ConfigError([f"the model's name '{name}' is too long for a socket's path; shorten it by {-room} letters"])
