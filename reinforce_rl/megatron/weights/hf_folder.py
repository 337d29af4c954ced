"""Reads and checks the safetensors of a Hugging Face folder, slice by slice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: str


class HFFolder:
    """Weights of a Hugging Face folder; the constructor reads only the files' headers.

    Raises:
        CheckpointError: no safetensors, or a file is damaged or missing.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        self._listing = index if index.is_file() else single
        self._file_of = _file_names(index) if index.is_file() else {}
        if not self._listing.is_file():
            raise CheckpointError(f"{self.folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; {self._advice()}")
        self._entries: dict[str, _Entry] = {}
        for path in sorted(set(self._file_of.values())) or [single]:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (a file is no dict)
                    if self._file_of.get(name, path) == path:
                        header = file.get_slice(name)
                        self._entries[name] = _Entry(path, tuple(header.get_shape()), header.get_dtype())

    def _advice(self) -> str:
        pickled = sorted(file.name for file in self.folder.glob("*.bin"))
        if not pickled:
            return "expected a Hugging Face folder with safetensors"
        return (
            f"{', '.join(pickled)} is pickled, which is not read, because unpickling can run any code. "
            "Where you trust it, load the folder with transformers and write it again with save_pretrained"
        )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def dtype_of(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name].dtype]

    def read(self, name: str, axis: int = 0, part: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or the range `part` of `axis`; the rest stays on disk.

        Raises:
            CheckpointError: the file can no longer be read.
        """
        with _opened(self._entries[name].file) as file:
            start, end = part or (None, None)
            return file.get_slice(name)[(slice(None),) * axis + (slice(start, end),)]

    def fingerprint(self) -> str:
        """Return a digest of every tensor's name, shape, dtype and first row, to tell two folders' weights apart.

        Training changes every row of a matrix, except embeddings of tokens that never occur.
        """
        digest = hashlib.sha256()
        for name in sorted(self._entries):
            entry = self._entries[name]
            digest.update(f"{name} {entry.shape} {entry.dtype} ".encode())
            digest.update(self.read(name, 0, (0, 1)).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None:
        """Compare the headers with `expected`, the shape of each of the model's tensors.

        Args:
            ignored: names of additional tensors to allow.

        Raises:
            CheckpointError: lists all missing, unknown, misshapen or mistyped tensors.
        """
        # Merge layers with the same fault, or a wrong config.json would fill the screen.
        faults: dict[tuple[str, str], list[int]] = {}

        def add(name: str, text: str) -> None:
            layer = _LAYER.search(name)
            faults.setdefault((_LAYER.sub("N", name), text), []).extend([int(layer.group())] if layer else [])

        for name, shape in expected.items():
            entry = self._entries.get(name)
            if entry is None:
                add(name, f"missing in {self._file_of.get(name, self._listing).name}; expected shape {shape}")
            elif entry.shape != shape:
                add(name, f"shape {entry.shape} in {entry.file.name}; by config.json it should be {shape}")
            elif entry.dtype not in DTYPES:
                add(name, f"{entry.dtype} in {entry.file.name}; expected one of {', '.join(DTYPES)}")
        for name in sorted(self.names - expected.keys()):
            if not ignored.search(name):
                entry = self._entries[name]
                add(name, f"shape {entry.shape} in {entry.file.name}; a model of this config.json has no such tensor")
        if faults:
            lines = [f"  {_with_layers(name, layers)}: {text}" for (name, text), layers in faults.items()]
            raise CheckpointError("\n".join([f"{self.folder} does not hold what its config.json says:", *lines]))


def _file_names(index: Path) -> dict[str, Path]:
    try:
        names = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = {name: index.parent / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}; expected a JSON object weight_map") from error
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
    return files


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # safetensors raises an undocumented type for a damaged file
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _with_layers(name: str, layers: list[int]) -> str:
    """Format `model.layers.N.a`: the name itself for one layer, or with N = 0-3, 5 for several."""
    if len(layers) < 2:
        return name.replace(".N.", f".{layers[0]}.") if layers else name
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return f"{name}, N = {', '.join(f'{a}' if a == b else f'{a}-{b}' for a, b in runs)}"
