"""Files of a checkpoint: megatron's, written in steps, and a manifest of sizes and checksums.

`dist_checkpointing.save` lets the other ranks hang if one cannot write, and forks writers that
outlive a killed run. Here each step reports its failure per rank, and this process writes, possibly
in the background. The manifest detects truncated or altered files.

manifest.json      {"files": {"model/__0_0.distcp": {"bytes": 1234, "crc32": "0badcafe"}, ...}}
"""

from __future__ import annotations

import json
import os
import queue
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import multiprocessing

from reinforce_rl.errors import CheckpointError, key_of
from reinforce_rl.megatron.lora import adapter_rows
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import PREFIX
from reinforce_rl.megatron.stored_metadata import check_stored_metadata
from reinforce_rl.megatron.weight_map import Split, weight_map
from reinforce_rl.utils.files import write_atomically
from reinforce_rl.utils.untrusted_files import open_regular, read_json

MANIFEST_FILE = "manifest.json"
_CHUNK_BYTES = 1 << 24
# By path relative to the checkpoint: {"bytes": size, "crc32": eight hexadecimal digits}.
Records = dict[str, dict[str, Any]]


def record_files(folder: Path, paths: Iterable[Path]) -> Records:
    """Sync files below `folder` to disk and return their records."""
    records = {}
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        records[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "crc32": _crc32(path),
        }
    return records


def write_manifest(folder: Path, records: Records) -> None:
    """Write the manifest of a folder whose files are complete."""
    write_atomically(
        folder / MANIFEST_FILE, json.dumps({"files": dict(sorted(records.items()))}, indent=1)
    )


def check_files(folder: Path, rank: int, world_size: int) -> None:
    """Check all sizes, and the contents of this rank's share of files, against the manifest.

    Raises CheckpointError.
    """
    path = folder / MANIFEST_FILE
    try:
        files = read_json(path, within=folder)["files"]
        records = sorted((name, record["bytes"], record["crc32"]) for name, record in files.items())
        for number, (name, size, checksum) in enumerate(records):
            path = folder / name
            if (stored_size := path.stat().st_size) != size:
                raise CheckpointError(
                    f"{path} has {stored_size} bytes; expected the {size} that were written",
                    key="checkpoint.file.other_size",
                )
            if number % world_size != rank:
                continue
            if (stored_checksum := _crc32(path, within=folder)) != checksum:
                raise CheckpointError(
                    f"{path} is damaged: its checksum is {stored_checksum}; expected {checksum}",
                    key="checkpoint.file.damaged",
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sentence = f"{path} cannot be read: {error!r}"
        raise CheckpointError(
            sentence, key=key_of(error, "checkpoint.file.not_readable")
        ) from error


def _crc32(path: Path, *, within: Path | None = None) -> str:
    checksum = 0
    with open_regular(path, within=within) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


# megatron's writer creates a queue of results in a manager process, which outlives a killed run and
# needs an importable main module. No argument of megatron-core 0.16 turns the process off. The
# queue stays empty here, so it can be a queue of this process.
_manager = SimpleNamespace(Queue=queue.Queue)
_context = SimpleNamespace(Manager=lambda: _manager)


def _context_of(method: str) -> Any:
    """Return the context that replaces the manager process, requested by "spawn", or torch's."""
    return _context if method == "spawn" else multiprocessing.get_context(method)


filesystem_async.mp = SimpleNamespace(get_context=_context_of)  # type: ignore[attr-defined]


class _Strategy(TorchDistSaveShardedStrategy):
    """megatron's strategy, which returns the plan instead of functions that execute it."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        return writer, save_state_dict_ret[1]


class ShardedWriter:
    """One save of a sharded state to an empty folder.

    Every rank calls the methods in order, except that only the first rank calls `finish`.
    """

    def __init__(self, state: dict[str, Any], folder: Path):
        self._folder = folder
        self._sharded: Any
        self._common: Any
        self._sharded, self._common = save_preprocess(state)

    def write_common(self) -> None:
        """Write the unsharded entries; only the first rank writes. Raises OSError."""
        try:
            serialization.get_default_save_common_strategy().save_common(
                self._common, str(self._folder)
            )
        except Exception as error:  # torch turns a full disk into a RuntimeError
            raise OSError(f"{self._folder / 'common.pt'}: {error}") from error

    def plan(self, *, copy: bool) -> None:
        """Assign writes to ranks and copy this rank's tensors to host memory; a collective call."""
        plan: Any = _Strategy("torch_dist", 1).async_save(self._sharded, self._folder)
        self._writer, self._metadata = plan
        self._buckets = [
            (path, name, (data, [(item, _on_host(tensor, copy)) for item, tensor in tensors]))
            for path, name, (data, tensors) in self._writer.write_buckets
        ]
        self._sharded = None
        self._common = None

    def write(self) -> tuple[list[Any], list[Path]]:
        """Write this rank's share, on any thread.

        Returns results for `finish`, and the files. Raises OSError, which names the file.
        """
        results: list[Any] = []
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        for number, bucket in enumerate(self._buckets):
            answers: Any = queue.Queue()
            count: Any = queue.Queue()
            count.put(number)
            FileSystemWriterAsync.write_preloaded_data(
                transforms, number, bucket, answers, count, use_fsync=True
            )
            _, answer = answers.get()
            if isinstance(answer, Exception):
                raise OSError(f"{bucket[0]}: {answer}") from answer
            results += answer
        paths = [Path(path) for path, _, _ in self._buckets]
        self._buckets = []
        return results, paths

    def finish(self, results: list[list[Any]]) -> None:
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


def _on_host(tensor: Any, copy: bool) -> Any:
    return tensor.clone() if copy and tensor.device.type == "cpu" else tensor.to("cpu")


def allow_other_padding(
    lm: CausalLM, model: dict[str, Any], folder: Path, optimizer: dict[str, Any] | None = None
) -> None:
    """Let megatron cut or zero-pad tensors that another tensor-parallel size padded differently.

    Adam's moments are 0 in the padding. `model` and `optimizer` are the sharded states about to be
    loaded. Raises CheckpointError: the checkpoint is another model's; all differences are listed.
    """
    stored: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(folder))
    splits = {
        row.megatron: row.split
        for row in (*weight_map(lm.architecture, lm.mesh.tp_size), *adapter_rows(lm))
    }
    faults = []
    padded = {}
    dtypes = {}
    for name, tensor in model.items():
        if not isinstance(tensor, ShardedTensor):
            continue
        # The last stage's copy of tied embeddings uses their key.
        expected = tuple(tensor.global_shape)
        split = splits[name if name in splits else tensor.key]
        if tensor.key not in stored:
            faults.append(f"{tensor.key} is missing; expected shape {expected}")
            continue
        dtypes[stored[tensor.key].dtype] = tensor.dtype
        shape = tuple(stored[tensor.key].global_shape)
        if shape != expected and not _differ_in_padding(shape, expected, split, tensor):
            faults.append(f"{tensor.key} has shape {shape}; expected {expected}")
        padded[tensor.key] = shape != expected
        tensor.allow_shape_mismatch = shape != expected
    if optimizer is not None:  # Adam updates fp32 weights: the model's own or copies of them
        faults += [
            f"its weights are {there}, those of this run {here}; "
            "trainer.precision must be as it was"
            for there, here in dtypes.items()
            if there != here
        ]
    if faults:  # they repeat, as megatron uses one key for all layers
        lines = "\n  ".join(dict.fromkeys(faults))
        raise CheckpointError(
            f"it belongs to another model:\n  {lines}",
            key="checkpoint.weights.another_model",
        )
    for tensor in _sharded_tensors(optimizer):
        _, _, parameter = tensor.key.removeprefix(PREFIX).partition(".")
        tensor.allow_shape_mismatch = padded.get(parameter, False)


def load_sharded(lm: CausalLM, state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill the model, and the optimizer's tensors if `state` has one. Returns the loaded state."""
    check_stored_metadata(folder)
    allow_other_padding(lm, state["model"], folder, state.get("optimizer"))
    loaded: Any = dist_checkpointing.load(state, str(folder))
    lm.load_state_dict(loaded["model"], strict=False)
    return loaded


def _sharded_tensors(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict | list):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _sharded_tensors(item)


def _differ_in_padding(
    shape: tuple[int, ...], expected: tuple[int, ...], split: Split | None, tensor: ShardedTensor
) -> bool:
    if split is None or len(shape) != len(expected):
        return False
    axis = len(expected) - len(tensor.local_shape) + split.axis  # megatron prepends the layer axis
    rest = [size for i, size in enumerate(shape) if i != axis] == [
        s for i, s in enumerate(expected) if i != axis
    ]
    return rest and shape[axis] >= split.units * split.width and shape[axis] % split.width == 0
