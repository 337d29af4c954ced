"""Checks a checkpoint's description before megatron and torch read it: torch unpickles it.

A checkpoint may be untrusted. So its description may only use the classes of torch's metadata, name
files of its own folder, and describe no more data than these files hold.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from reinforce_rl.errors import CheckpointError, ReinforceError
from reinforce_rl.megatron.pickle_size import check_pickle_size
from reinforce_rl.megatron.torch_archive import (
    check_torch_archive,
    check_torch_file,
    check_weights_only,
)
from reinforce_rl.utils.untrusted_files import UnreadableFileError, check_folder, open_regular

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
FORMAT_FILE = "metadata.json"
# Format of the checkpoints of this program and of megatron's converter. Other formats have other
# readers.
FORMAT = {"sharded_backend": "torch_dist", "common_backend": "torch"}
MAX_METADATA_BYTES = 1 << 30
MAX_FORMAT_BYTES = 1 << 16
_MAX_DIMENSIONS = 16
_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_INDEX = f"{_METADATA} MetadataIndex"
# BytesStorageMetadata is not allowed, as torch unpickles its entries too.
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
}


class _Index(MetadataIndex):
    """Replaces torch's class, whose instances are keys, while the description is checked."""

    def __hash__(self) -> int:
        # The hash of a text differs in each process, so equal hashes cannot be prepared.
        if type(self.fqn) is not str:
            raise CheckpointError(
                f"the name of a tensor is a {type(self.fqn).__name__}; expected a string",
                key="checkpoint.description.name_no_text",
            )
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        raise CheckpointError(
            "two of its keys have the same hash",
            key="checkpoint.description.same_hash",
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module} {name}" == _INDEX:
            return _Index
        if (module, name) in _ALLOWED or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise CheckpointError(
            f"it names {module}.{name}, which does not belong in a checkpoint's description",
            key="checkpoint.description.other_class",
        )


def check_stored_metadata(folder: Path) -> None:
    """Raise CheckpointError if reading a `dist_checkpointing` folder could execute code from it."""
    check_weights_only()
    try:
        check_folder(folder)
        _check_format(folder / FORMAT_FILE)
        metadata = _read(folder / METADATA_FILE)
        _check_files(folder, metadata)
        _check_archives(folder, metadata)
    except (CheckpointError, UnreadableFileError, AttributeError, TypeError, ValueError) as error:
        advice = "It is damaged, was changed, or was not made by this program; do not use it"
        sentence = f"checkpoint {folder} is not read: {error}. {advice}"
        if isinstance(error, ReinforceError):
            raise CheckpointError(sentence, key=error.key) from error
        raise CheckpointError(sentence, key="checkpoint.description.not_readable") from error


def _check_format(path: Path) -> None:
    try:
        form = json.loads(_bytes_of(path, MAX_FORMAT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read ({error})",
            key="checkpoint.format.not_readable",
        ) from error
    if not isinstance(form, dict):
        raise CheckpointError(
            f"{path.name} is a JSON {type(form).__name__}; expected an object",
            key="checkpoint.format.no_object",
        )
    for key, expected in FORMAT.items():
        if form.get(key) != expected:
            given = str(form.get(key))[:100]
            raise CheckpointError(
                f"{path.name} has {key} {given!r}; expected {expected!r}",
                key="checkpoint.format.another",
            )


def _read(path: Path) -> Metadata:
    try:
        data = _bytes_of(path, MAX_METADATA_BYTES)
        check_pickle_size(data, key_classes=(_INDEX,))
        metadata = _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any type
        raise CheckpointError(
            f"{path.name} cannot be read ({error})",
            key="checkpoint.description.not_readable",
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise CheckpointError(
            f"{path.name} is not a description of tensors",
            key="checkpoint.description.another_object",
        )
    return metadata


def _check_files(folder: Path, metadata: Metadata) -> None:
    names: set[str] = set()
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        # Values of other types could have equal hashes.
        if not isinstance(name, str):
            raise CheckpointError(
                f"it names a file by {str(name)[:100]!r}; expected a string",
                key="checkpoint.description.file_no_text",
            )
        names.add(name)
    available = 0
    for name in names:
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            shown = name[:100]
            raise CheckpointError(
                f"it names the file {shown!r}; expected a regular file of its own folder",
                key="checkpoint.description.file_elsewhere",
            )
        available += path.stat().st_size
    described = 0
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise CheckpointError(
                f"{str(name)[:100]!r} is not described as a tensor; expected tensors only",
                key="checkpoint.description.no_tensor",
            )
        dtype = tensor.properties.dtype
        if type(tensor.size) is not torch.Size or not isinstance(dtype, torch.dtype):
            raise CheckpointError(
                f"{str(name)[:100]!r} has another shape or type than torch writes",
                key="checkpoint.description.tensor_no_type",
            )
        if len(tensor.size) > _MAX_DIMENSIONS or min(tensor.size, default=0) < 0:
            shape = tuple(tensor.size[:_MAX_DIMENSIONS])
            raise CheckpointError(
                f"{str(name)[:100]!r} has {len(tensor.size)} dimensions, which begin with {shape}; "
                f"expected at most {_MAX_DIMENSIONS}, none below 0",
                key="checkpoint.description.tensor_shape",
            )
        described += math.prod(tensor.size) * dtype.itemsize
    if described > available:
        raise CheckpointError(
            f"it describes tensors of {described} bytes, but its files have {available}",
            key="checkpoint.description.too_large",
        )


def _check_archives(folder: Path, metadata: Metadata) -> None:
    """Check the files that torch reads with `torch.load`: common.pt, and each part of a tensor."""
    common = folder / COMMON_FILE
    if common.exists() or common.is_symlink():
        check_torch_file(common, within=folder)
    parts = sorted(
        (metadata.storage_data or {}).values(), key=lambda part: (part.relative_path, part.offset)
    )
    for name, parts_of_file in itertools.groupby(parts, key=lambda part: part.relative_path):
        end = 0
        with open_regular(folder / name, within=folder) as file:
            for part in parts_of_file:
                if getattr(part, "transform_descriptors", None):
                    raise CheckpointError(
                        f"{name!r} is compressed; expected uncompressed tensors",
                        key="checkpoint.part.compressed",
                    )
                if part.offset < end:
                    raise CheckpointError(
                        f"two parts of {name!r} overlap at byte {part.offset}",
                        key="checkpoint.part.overlaps",
                    )
                end = part.offset + part.length
                try:
                    check_torch_archive(file, part.offset, part.length)
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{name!r}, from byte {part.offset} on: {error}",
                        key=error.key,
                    ) from error


def _bytes_of(path: Path, limit: int) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{path.name} is not a regular file",
            key="checkpoint.file.not_regular",
        )
    if path.stat().st_size > limit:
        raise CheckpointError(
            f"{path.name} has {path.stat().st_size} bytes; expected at most {limit}",
            key="checkpoint.file.too_large",
        )
    return path.read_bytes()
