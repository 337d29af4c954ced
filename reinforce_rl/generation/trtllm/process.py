"""Trainer side of `host.py`: an engine in its own process, with a timeout on each call."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforce_rl.config.actor import TensorRTLLMConfig
from reinforce_rl.errors import EngineLostError, GenerationError
from reinforce_rl.generation.trtllm import engine
from reinforce_rl.generation.trtllm.engine import Answer, EngineArguments, Request, Started
from reinforce_rl.megatron.architecture import with_old_rope_keys
from reinforce_rl.megatron.hf_weights import carry_over
from reinforce_rl.utils.process import PACKAGE_PARENT, ModuleChild

KEY = "tensorrt_llm"
STOP_SECONDS = 30.0
STUCK_SECONDS = 5.0  # grace after a call's deadline
ABORT_SECONDS = 60.0  # for the engine to abort late requests
# Unix socket paths have at most 107 characters; Ray adds about 65 to its folder.
MAX_FOLDER_CHARACTERS = 40
# Launcher variables, which would make the engine join the training job as a rank.
_OF_THE_LAUNCHER = ("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "SLURM_", "ROLE_", "GROUP_", "LOCAL_", "MASTER_")
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "RAY_ADDRESS", "CUDA_DEVICE_MAX_CONNECTIONS")


class EngineProcess:
    """Start, call and stop an engine process. May be restarted after an `EngineLostError`.

    Args:
        log: appended with the engine's output.
        dp_rank: data-parallel rank of the block.
        devices: GPU numbers on this machine; None without GPUs.
    """

    def __init__(
        self,
        arguments: EngineArguments,
        config: TensorRTLLMConfig,
        log: Path,
        dp_rank: int,
        devices: Sequence[str] | None,
    ):
        self._arguments = arguments
        self._config = config
        self._log = log
        self._folder = private_folder(os.environ, os.getpid(), dp_rank)
        self._devices = devices
        self._child: ModuleChild | None = None

    def start(self) -> Started:
        """Start the engine and wait until it is ready.

        Raises:
            GenerationError: it did not start; a retry is not expected to help.
        """
        self.kill()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        model = write_engine_model(Path(self._arguments.model), self._folder / "model")
        arguments = replace(self._arguments, model=str(model))
        with self._log.open("ab") as log:
            self._child = ModuleChild(
                "reinforce_rl.generation.trtllm.host",
                stdout=log,
                stderr=subprocess.STDOUT,
                env=engine_environment(os.environ, self._folder, self._devices),
            )
        try:
            return self._call(engine.START, (arguments,), self._config.start_timeout_seconds, "start_timeout_seconds")
        except EngineLostError as error:
            advice = "see its log"
            if "out of memory" in str(error).lower():
                advice = f"lower {KEY}.free_gpu_memory_fraction, now {self._arguments.free_gpu_memory_fraction}"
            raise GenerationError(f"TensorRT-LLM did not start: {error}; {advice}") from error

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Return answers in the order of the requests; lost ones have a `fault`."""
        seconds = self._config.request_timeout_seconds
        arguments = (tuple(requests), seconds)
        answers = self._call(engine.GENERATE, arguments, seconds + ABORT_SECONDS, "request_timeout_seconds")
        if len(answers) != len(requests):
            self.kill()
            raise EngineLostError(f"the engine gave {len(answers)} answers to {len(requests)} requests")
        return answers

    def update(self, handles: Mapping[str, str] | None) -> None:
        """Load one bucket of weights; None after the last."""
        given = None if handles is None else dict(handles)
        self._call(engine.UPDATE, (given,), self._config.update_timeout_seconds, "update_timeout_seconds")

    def release(self, tags: Sequence[str]) -> None:
        self._call(engine.RELEASE, (tuple(tags),), self._config.update_timeout_seconds, "update_timeout_seconds")

    def resume(self, tags: Sequence[str]) -> None:
        self._call(engine.RESUME, (tuple(tags),), self._config.update_timeout_seconds, "update_timeout_seconds")

    def stop(self) -> None:
        """Stop the engine gracefully, or kill it."""
        if self._child is not None:
            with contextlib.suppress(EngineLostError):
                self._call(engine.STOP, (), STOP_SECONDS, "stop")
        self.kill()

    def kill(self) -> None:
        """Kill the process and its session, and remove its files."""
        if self._child is not None:
            self._child.connection.close()
            self._child.kill()
            self._child = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, command: str, arguments: tuple[Any, ...], seconds: float, key: str) -> Any:
        """Send a command and wait for the reply.

        Raises:
            EngineLostError: the engine died, timed out or failed; it is killed first.
        """
        assert self._child is not None
        child, connection = self._child, self._child.connection
        late = EngineLostError(f"no answer to {command} within {seconds:g} s ({KEY}.{key}); log: {self._log}")
        # A process stopped in mid-message would block send or recv.
        stuck = threading.Timer(seconds + STUCK_SECONDS, child.kill)
        stuck.daemon = True
        stuck.start()
        begin = time.monotonic()
        try:
            connection.send((command, arguments))
            if not connection.poll(seconds):
                raise late
            kind, value = connection.recv()
            if kind == engine.FAULT:
                raise EngineLostError(f"the engine's {command} failed: {value}; log: {self._log}")
            return value
        except (EOFError, OSError) as error:
            status = child.wait(1.0)
            self.kill()
            if time.monotonic() - begin > seconds:
                raise late from error
            raise EngineLostError(f"the engine ended in {command} (status {status}); log: {self._log}") from error
        except EngineLostError:
            self.kill()
            raise
        finally:
            stuck.cancel()


def private_folder(environment: Mapping[str, str], pid: int, dp_rank: int) -> Path:
    """Return a folder for one engine's sockets and files, unique per job and per rank of a node."""
    job = environment.get("SLURM_JOB_ID")
    restart = environment.get("SLURM_RESTART_COUNT", "0")
    name = f"rrl-{pid}-{dp_rank}" if job is None else f"rrl-{job}.{restart}-{pid}-{dp_rank}"
    folder = Path(tempfile.gettempdir()) / name
    return folder if len(str(folder)) <= MAX_FOLDER_CHARACTERS else Path("/tmp") / name


def engine_environment(environment: Mapping[str, str], folder: Path, devices: Sequence[str] | None) -> dict[str, str]:
    """Return the engine's environment: without the launcher's variables, with its own Ray on the given GPUs."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(_OF_THE_LAUNCHER) and name not in _OF_THE_RANK
    }
    places = [PACKAGE_PARENT, *sys.path]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "TLLM_DISABLE_MPI": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # do not join another Ray on this machine
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # as NeMo-RL and verl do: copies stay on one stream
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(folder),
    }
    return {**kept, **own, **({} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)})}


def write_engine_model(source: Path, out: Path) -> Path:
    """Copy all but the weights; make config.json readable by transformers 4, which TensorRT-LLM 1.2 uses."""
    out.mkdir(parents=True, exist_ok=True)
    carry_over(source, out)
    config = out / "config.json"
    values = with_old_rope_keys(json.loads(config.read_text(encoding="utf-8")))
    if "dtype" in values:
        values.setdefault("torch_dtype", values["dtype"])
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return out
