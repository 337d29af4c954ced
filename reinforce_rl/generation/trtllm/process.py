"""Trainer side of `host.py`: an engine in its own process, with a timeout on each call, and the weights it is sent.

Weights are whole tensors under Hugging Face names, in bounded buckets. Each bucket is gathered over tensor-parallel
ranks and stages on the block's leader, copied to every GPU of the block and offered as CUDA IPC handles, so the engine
needs no pipeline stages.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from reinforce_rl.config.actor import TensorRTLLMConfig
from reinforce_rl.errors import ConfigError, EngineLostError, GenerationError
from reinforce_rl.generation.trtllm import Answer, EngineArguments, Request
from reinforce_rl.megatron.architecture import with_old_rope_keys
from reinforce_rl.megatron.hf_weights import carry_over, hf_tensors
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_map import Row, weight_map
from reinforce_rl.utils.process import PACKAGE_PARENT, ModuleChild

KEY = "tensorrt_llm"
STOP_SECONDS = 30.0
STUCK_SECONDS = 5.0  # grace after a call's deadline
ABORT_SECONDS = 60.0  # for the engine to abort late requests
# Unix socket paths have at most 107 characters; Ray adds about 65 to its folder.
MAX_FOLDER_CHARACTERS = 40
# Launcher variables, which would make the engine join the training job as a rank.
_OF_THE_LAUNCHER = ("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "SLURM_", "ROLE_", "GROUP_", "LOCAL_", "MASTER_")
_ALIGNED = 64  # elements; a tensor in a bucket begins at a multiple of them
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
        self._arguments, self._config, self._log, self._devices = arguments, config, log, devices
        self._folder = private_folder(os.environ, os.getpid(), dp_rank)
        self._child: ModuleChild | None = None

    def start(self) -> list[str]:
        """Start the engine, wait until it is ready, and return the device of each worker.

        Raises:
            GenerationError: it did not start; a retry is not expected to help.
        """
        self.kill()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        model = write_engine_model(Path(self._arguments.model), self._folder / "model")
        arguments = replace(self._arguments, model=str(model))
        with self._log.open("ab") as log:
            environment = engine_environment(os.environ, self._folder, self._devices)
            module = "reinforce_rl.generation.trtllm.host"
            self._child = ModuleChild(module, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            return self.call("start", arguments, limit="start_timeout_seconds")
        except EngineLostError as error:
            advice = "see its log"
            if "out of memory" in str(error).lower():
                advice = f"lower {KEY}.free_gpu_memory_fraction, now {self._arguments.free_gpu_memory_fraction}"
            raise GenerationError(f"TensorRT-LLM did not start: {error}; {advice}") from error

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Return answers in the order of the requests; lost ones have a `fault`."""
        key, seconds = "request_timeout_seconds", self._config.request_timeout_seconds
        return self.call("generate", tuple(requests), seconds, limit=key, grace=ABORT_SECONDS)

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
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, command: str, *arguments: Any, limit: str = "update_timeout_seconds", grace: float = 0.0) -> Any:
        """Return what the method `command` of `EngineHost` returns, within `limit` of the configuration plus `grace`.

        Raises:
            EngineLostError: the engine died, timed out or failed; it is killed first.
        """
        seconds = STOP_SECONDS if command == "stop" else getattr(self._config, limit) + grace
        assert self._child is not None
        child, connection = self._child, self._child.connection
        late = EngineLostError(f"no answer to {command} within {seconds:g} s ({KEY}.{limit}); log: {self._log}")
        # A process stopped in mid-message would block send or recv.
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
                raise EngineLostError(f"the engine's {command} failed: {fault}; log: {self._log}")
            return result
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
    foreign = {name for name in environment if name.startswith(_OF_THE_LAUNCHER) or name in _OF_THE_RANK}
    kept = {name: value for name, value in environment.items() if name not in foreign}
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_PARENT, *sys.path])),
        "TLLM_DISABLE_MPI": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",  # do not join another Ray on this machine
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",  # as NeMo-RL and verl do: copies stay on one stream
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(folder),
    }
    if devices is not None:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return {**kept, **own}


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


def send_weights(
    lm: CausalLM,
    deliver: Callable[[dict[str, str]], None],
    *,
    max_bytes: int,
    hosts_worker: bool,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Send all weights bucket by bucket; a collective call of the block.

    Args:
        deliver: passes a bucket's handles, by device, to the engine. Called on all ranks; the leader gets the block's
            handles, the others an empty dict. The bucket's memory is reused after it returns.
        max_bytes: bucket size, exceeded only by a single larger parameter.
        hosts_worker: whether the engine has a worker on this rank's device.
        values: tensors to send instead of the weights, by the names of `parameters_of`.
    """
    mesh, dtype = lm.mesh, lm.config.params_dtype
    buckets = plan_buckets(weight_map(lm.architecture, mesh.tp_size), max_bytes // dtype.itemsize)
    buffer = torch.empty(max(map(_elements, buckets)), dtype=dtype, device=mesh.device)
    # The other context-parallel ranks hold the same weights.
    tensors = hf_tensors(lm, values, dtype=dtype, device=mesh.device) if mesh.cp_rank == 0 else iter(())
    for rows in buckets:
        views = _views(buffer, rows)
        for name, tensor in itertools.islice(tensors, len(rows)):
            if tensor is not None:
                views[name].copy_(tensor)
        mesh.copy_from_block_leader(buffer[: _elements(rows)])
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        own = {device_uuid(mesh.device): packed_handles(views)} if hosts_worker else {}
        parts = mesh.gather_on_block_leader(own)
        deliver({device: handles for part in parts for device, handles in part.items()})
    next(tensors, None)


def plan_buckets(rows: Sequence[Row], max_elements: int) -> list[list[Row]]:
    """Pack rows into buckets in order. Rows that share a parameter stay together, as an engine fuses them."""
    buckets: list[list[Row]] = []
    for _, group in itertools.groupby(rows, lambda row: row.megatron):
        together = list(group)
        if buckets and _elements([*buckets[-1], *together]) <= max_elements:
            buckets[-1] += together
        else:
            buckets.append(together)
    return buckets


def _room(row: Row) -> int:
    return -(-math.prod(row.shape) // _ALIGNED) * _ALIGNED


def _elements(rows: Sequence[Row]) -> int:
    return sum(map(_room, rows))


def _views(buffer: Tensor, rows: Sequence[Row]) -> dict[str, Tensor]:
    starts = itertools.accumulate(map(_room, rows), initial=0)
    whole = {row.hf: (start, row.shape) for row, start in zip(rows, starts, strict=False)}
    return {name: buffer[start : start + math.prod(shape)].view(shape) for name, (start, shape) in whole.items()}


def packed_handles(tensors: Mapping[str, Tensor]) -> str:
    """Pickle the (name, handle) pairs in the base64 form that the engine's workers read."""
    handles = [(name, handle_of(tensor)) for name, tensor in tensors.items()]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


handle_of = reduce_tensor  # a function and its arguments, which rebuild the tensor in another process on its device


def device_uuid(device: torch.device) -> str:
    """Return the GPU's NVML id, by which the engine's workers look up weights.

    Raises:
        ConfigError: the device is no GPU.
    """
    if device.type != "cuda":
        found = f"generation is tensorrt_llm, but the ranks compute on {device}; it needs CUDA: use native"
        raise ConfigError([found])
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
