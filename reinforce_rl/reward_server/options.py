"""Options of a reward server, access control and limits, and their validation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from reinforce_rl.errors import ConfigError
from reinforce_rl.rewards import wire
from reinforce_rl.rewards.wire import ServerInfo
from reinforce_rl.utils.net import is_loopback

WIDER_THAN_CONTEXT = 4  # how much wider than the model's context a padded request may be


@dataclass(frozen=True)
class FrontOptions:
    """Access control and limits of a server."""

    token: str | None = None  # required of every client; None: no token, and only the loopback is listened on ...
    allow_no_token: bool = False  # ... unless this is true
    max_request_bytes: int | None = None  # per request body; None: a full batch of the widest rows
    max_sequence_length: int | None = None  # tokens per row, padding included; None: four times the context
    max_in_flight: int = 64  # concurrent requests at Triton
    max_queue: int = 256  # requests that wait for Triton; more are answered 503
    request_seconds: float = 600.0  # for Triton's answer to one request
    stuck_seconds: float = 300.0  # if one call of the model lasts longer, health turns red and the server ends
    canary_seconds: float = 10.0  # for health's own sample while the scorer is idle
    idle_seconds: float = 60.0  # until a complete header, or between two pieces of a body; then the connection closes

    def for_model(self, max_samples: int, max_length: int) -> FrontLimits:
        """Return the limits for a model of this batch size and context length."""
        width = self.max_sequence_length or WIDER_THAN_CONTEXT * max_length
        # A full batch of int64 tokens, plus 1 MiB of overhead.
        own = {
            "max_request_bytes": self.max_request_bytes or 8 * max_samples * width + (1 << 20),
            "max_sequence_length": width,
            "canary_seconds": min(self.canary_seconds, self.stuck_seconds),
        }
        return FrontLimits(**{**asdict(self), **own}, max_samples=max_samples)


@dataclass(frozen=True)
class FrontLimits(FrontOptions):
    """The options with all defaults that follow from the model filled in."""

    max_request_bytes: int = 0
    max_sequence_length: int = 0
    max_samples: int = 0  # per request


def check_options(
    info: ServerInfo,
    host: str,
    port: int,
    max_queue_delay: float,
    options: FrontOptions,
    preferred: Sequence[int] = (),
) -> None:
    """Raise ConfigError naming every option that cannot work."""
    faults = access_faults(host, options.token, options.allow_no_token)
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
    least = {"max_request_bytes": 1024, "max_sequence_length": 1, "max_in_flight": 1, "max_queue": 0}
    for key, bound in least.items():
        value = getattr(options, key)
        if value is not None and value < bound:
            faults.append(f"inference.{key} is {value}; expected at least {bound}")
    for key in ("request_seconds", "stuck_seconds", "canary_seconds"):
        if not getattr(options, key) > 0:
            faults.append(f"inference.{key} is {getattr(options, key)}; expected a number above 0")
    if not info.name or not all(c.isascii() and (c.isalnum() or c in "._-") for c in info.name):
        faults.append(f"the model's name is '{info.name}'; expected letters, digits, '.', '_' and '-'")
    if info.name == wire.INFO_MODEL:
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


def access_faults(host: str, token: str | None, allow_no_token: bool) -> list[str]:
    """Return an error if other machines could use the server without a token and that was not allowed."""
    if token is not None or allow_no_token or is_loopback(host):
        return []
    return [
        f"inference.host is {host}, so other machines can reach the server, and it has no access token. Give it one "
        f"with inference.token_file=FILE or the environment variable {wire.TOKEN_VARIABLE}, or say "
        "inference.allow_no_token=true where everyone who can reach the port may use it"
    ]
