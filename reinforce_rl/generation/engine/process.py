"""Trainer side of `host.py`: an engine in its own process, with a timeout on each call."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from reinforce_rl.config.engines import EngineConfig
from reinforce_rl.errors import ConfigError, EngineLostError, Fault, GenerationError
from reinforce_rl.generation.engine import Answer, EngineArguments, Request
from reinforce_rl.generation.engine.buckets import Offer
from reinforce_rl.megatron.hf_weights import carry_over
from reinforce_rl.utils.process import PACKAGE_PARENT, ModuleChild, import_path, without_secrets

PROBE_SECONDS = 60.0  # to look for the engine's package in its Python
STOP_SECONDS = 60.0  # TensorRT-LLM alone waits 30 s for its workers
STUCK_SECONDS = 5.0  # grace after a call's deadline
ABORT_SECONDS = 60.0  # for the engine to abort late requests
# Unix socket paths have at most 107 characters; Ray adds about 65 to its folder.
MAX_FOLDER_CHARACTERS = 40
RANDOM_CHARACTERS = 8  # added to a name by mkdtemp
# Launcher variables, which would make the engine join the training job as a rank.
_OF_THE_LAUNCHER = (
    "TORCHELASTIC_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "SLURM_",
    "ROLE_",
    "GROUP_",
    "LOCAL_",
    "MASTER_",
)
# Messages about memory from engines that do not start.
_TOO_LITTLE = re.compile(
    "no available memory for the cache blocks|larger than the available KV cache memory", re.I
)
_TOO_MUCH = re.compile(
    "out of memory|can't allocate memory|free memory on device|available memory on node", re.I
)
# Variables of torch's allocator; the second is the newer name.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTION = re.compile(r"(?:\[[^\]]*\]|[^,\[])+")  # commas within brackets separate values
# Our defaults, which have no configuration key: the user's environment overrides them.
_LEFT_TO_THE_USER = (
    "VLLM_NO_USAGE_STATS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "RAY_USAGE_STATS_ENABLED",
)
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "RAY_ADDRESS", "CUDA_DEVICE_MAX_CONNECTIONS")

logger = logging.getLogger(__name__)


class EngineAdapter(Protocol):
    """The trainer's half of an engine's specifics; `host.EngineHost` is the engine's half."""

    name: str  # value of `generation`, and name of its section of the configuration
    title: str  # name in messages
    package: str  # required in the engine's Python
    host: str  # module that runs the engine
    memory_key: str  # key to lower if the engine lacks memory
    shows_layers: bool  # the host has the command layer_outputs
    loads_adapters: bool  # the host has the command load_adapter, for LoRA updates alone

    @property
    def options(self) -> dict[str, Any]:
        """`EngineArguments.options`."""
        ...

    def device_id(self, device: torch.device) -> str:
        """Return the name of a rank's device, comparable with those of `EngineHost.start`.

        Raises:
            ConfigError: the engine cannot run on this device.
        """
        ...

    def environment(self, folder: Path) -> dict[str, str]:
        """Return environment variables for the engine's process; `folder` is for its files."""
        ...

    def write_config(self, folder: Path) -> None:
        """Adapt `folder`, a copy of the model folder without weights, to the engine."""
        ...

    def make_buffer(
        self, elements: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Offer]:
        """See `send_weights`."""
        ...

    def bucket_of(self, offers: Sequence[Any]) -> Any:
        """Join the offers of ranks into a bucket for `EngineHost.update_weights`."""
        ...


class EngineProcess:
    """Start, call and stop an engine process. May be restarted after an `EngineLostError`.

    Args:
        log: file for the engine's output, which is appended.
        dp_rank: data-parallel rank of the block.
        devices: GPU numbers on this machine; None without GPUs.

    Raises:
        ConfigError: the engine's Python lacks its package.
    """

    def __init__(
        self,
        adapter: EngineAdapter,
        arguments: EngineArguments,
        config: EngineConfig,
        log: Path,
        dp_rank: int,
        devices: Sequence[str] | None,
    ):
        self._arguments = arguments
        self._config = config
        self._log = log
        self._devices = devices
        self._adapter = adapter
        self._dp_rank = dp_rank
        self._folder: Path | None = None  # the running engine's files and sockets
        self._child: ModuleChild | None = None
        self._python = config.python or sys.executable
        self._check_package()

    def _check_package(self) -> None:
        package = self._adapter.package
        config = self._config
        # `python -c` looks in the current folder first.
        probe = (
            "import sys; sys.path[:] = filter(None, sys.path); import importlib.util as u; "
            f"sys.exit(u.find_spec({package!r}) is None)"
        )
        path = "" if config.python is not None else import_path()
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            done = subprocess.run(
                [self._python, "-c", probe], env=environment, timeout=PROBE_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            sentence = f"engine.python is {config.python}, which does not run: {error}"
            raise ConfigError([Fault(sentence, key="generation.python.does_not_run")]) from error
        if done.returncode != 0:
            sentence = (
                f"generation is {self._adapter.name}, but {self._python} has no package {package}; "
                "set engine.python to the interpreter of the engine's environment "
                "(docs/generation.md)"
            )
            raise ConfigError([Fault(sentence, key="generation.package.missing")])

    def start(self) -> list[str]:
        """Start the engine, wait until it is ready, and return the device of each worker.

        Raises:
            GenerationError: the engine did not start; a retry is not expected to help.
        """
        self.kill()
        folder = private_folder(os.environ, self._dp_rank)
        self._folder = folder
        self._log.parent.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        model.mkdir()
        carry_over(Path(self._arguments.model), model)
        self._adapter.write_config(model)
        path = import_path()
        if self._config.python is not None:
            # The launcher's path has packages of other versions than the engine's environment.
            package = folder / "package"
            package.mkdir()
            (package / "reinforce_rl").symlink_to(Path(PACKAGE_PARENT) / "reinforce_rl")
            path = str(package)
        arguments = replace(self._arguments, model=str(model))
        variables = self._adapter.environment(folder)
        for name in _LEFT_TO_THE_USER:
            if name in variables and os.environ.get(name):
                variables[name] = os.environ[name]
        environment = engine_environment(os.environ, folder, self._devices, path) | variables
        for name in (*_ALLOCATOR, *variables):
            if name in os.environ and environment.get(name) != os.environ[name]:
                logger.warning(
                    "event=engine_variable variable=%s given=%s engine=%s",
                    name,
                    os.environ[name],
                    environment.get(name),
                )
        with self._log.open("ab") as log:
            begin = log.tell()
            self._child = ModuleChild(
                self._adapter.host,
                python=self._python,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            return self.call("start", arguments, limit="start_timeout_seconds")
        except EngineLostError as error:
            with self._log.open("rb") as log:
                log.seek(begin)
                output = f"{error}\n{log.read().decode(errors='replace')}"
            advice = "see its log"
            if _TOO_LITTLE.search(output):
                advice = f"raise {self._adapter.memory_key}; see its log"
            elif _TOO_MUCH.search(output):
                advice = f"lower {self._adapter.memory_key}; see its log"
            raise GenerationError(
                f"{self._adapter.title} did not start: {error}; {advice}",
                key="generation.engine.not_started",
            ) from error

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Return answers in the order of the requests; lost ones have a `fault`."""
        key = "request_timeout_seconds"
        seconds = self._config.request_timeout_seconds
        return self.call("generate", tuple(requests), seconds, limit=key, grace=ABORT_SECONDS)

    def advance(
        self, requests: Mapping[int, Request], wait: float
    ) -> tuple[int, dict[int, Answer]]:
        """See `RequestsUnderway.advance`."""
        key = "request_timeout_seconds"
        return self.call("advance", requests, wait, self._config.request_timeout_seconds, limit=key)

    def load_adapter(self, write: Callable[[Path], None], sums: dict[str, int]) -> None:
        """Write LoRA updates into a folder, and load them into the engine; see `EngineHost`."""
        assert self._folder is not None  # the engine runs
        folder = self._folder / "adapter"
        shutil.rmtree(folder, ignore_errors=True)
        write(folder)
        self.call("load_adapter", str(folder), sums)

    def stop(self) -> None:
        """Stop the engine gracefully, or kill it."""
        if self._child is not None:
            with contextlib.suppress(EngineLostError):
                self.call("stop")
        self.kill()

    def kill(self) -> None:
        """Kill the process and its session, and remove its files."""
        if self._child is not None:
            self._child.connection.close()
            self._child.kill()
            self._child = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def call(
        self,
        command: str,
        *arguments: Any,
        limit: str = "update_timeout_seconds",
        grace: float = 0.0,
    ) -> Any:
        """Run the method `command` of `EngineHost` and return its result.

        The time limit is the key `limit` of the section `engine`, plus `grace` seconds.

        Raises:
            EngineLostError: the engine died, timed out or failed. It has been killed.
        """
        seconds = STOP_SECONDS if command == "stop" else getattr(self._config, limit) + grace
        assert self._child is not None
        child = self._child
        connection = self._child.connection
        late = EngineLostError(
            f"no answer to {command} within {seconds:g} s (engine.{limit}); log: {self._log}",
            key="generation.engine.no_answer",
        )
        # A process that stops in mid-message would block send or recv.
        stuck = threading.Timer(seconds + STUCK_SECONDS, child.kill)
        stuck.daemon = True
        stuck.start()
        begin = time.monotonic()
        try:
            connection.send((command, arguments))
            if not connection.poll(seconds):
                raise late
            fault, result = connection.recv()
            if fault is not None:
                raise EngineLostError(
                    f"the engine's {command} failed: {fault}; log: {self._log}",
                    key="generation.engine.call_failed",
                )
            return result
        except (EOFError, OSError) as error:
            status = child.wait(1.0)
            self.kill()
            if time.monotonic() - begin > seconds:
                raise late from error
            raise EngineLostError(
                f"the engine ended in {command} (status {status}); log: {self._log}",
                key="generation.engine.ended",
            ) from error
        except EngineLostError:
            self.kill()
            raise
        finally:
            stuck.cancel()


def private_folder(environment: Mapping[str, str], dp_rank: int) -> Path:
    """Make a new folder, mode 0700, for one engine's sockets and files."""
    job = environment.get("SLURM_JOB_ID")
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    prefix = f"rrl-{dp_rank}-" if job is None else f"rrl-{job}.{restart}-{dp_rank}-"
    parent = Path(tempfile.gettempdir())
    if len(str(parent / prefix)) + RANDOM_CHARACTERS > MAX_FOLDER_CHARACTERS:
        parent = Path("/tmp")
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def engine_environment(
    environment: Mapping[str, str], folder: Path, devices: Sequence[str] | None, path: str
) -> dict[str, str]:
    """Return the engine's environment, without launcher variables and secrets.

    `devices` are its GPUs, None without GPUs; `path` is its PYTHONPATH.
    """
    foreign = {
        name for name in environment if name.startswith(_OF_THE_LAUNCHER) or name in _OF_THE_RANK
    }
    kept = {
        name: value for name, value in without_secrets(environment).items() if name not in foreign
    }
    for name in _ALLOCATOR:
        options = without_expandable_segments(kept.pop(name, ""))
        if options:
            kept[name] = options
    overrides = {"PYTHONPATH": path, "TMPDIR": str(folder)}
    if devices is not None:
        overrides["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {**kept, **overrides}


def without_expandable_segments(options: str) -> str:
    """Remove `expandable_segments` from options of torch's allocator.

    It is incompatible with memory pools, which sleeping engines use.
    """
    kept = []
    for option in _OPTION.findall(options):
        name, _, value = option.strip().partition(":")
        if name and (name != "expandable_segments" or value.strip().lower() == "false"):
            kept.append(option.strip())
    return ",".join(kept)
