"""Reads a Hugging Face folder's tensors by name. At first only the files' headers are read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.architecture import UNQUANTISED
from reinforce_rl.megatron.weight_files import find_weight_files
from reinforce_rl.megatron.weight_map import EMBEDDING

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# Tensors of AWQ, GPTQ, FP8, compressed-tensors, bitsandbytes and MLX.
_OF_QUANTISED = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|weight_scale(_inv|_2)?|weight_packed|input_scale|SCB)$"
    r"|\.weight\.(absmax|quant_map|quant_state\..*)$"
)
_DECODER = "model."  # prefix of the decoder's tensors
_PARTS_OF_DECODER = ("embed_tokens.", "layers.", "norm.")
_LFS_POINTER = b"version https://git-lfs"
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


class _Entry(NamedTuple):
    file: Path
    stored_name: str
    shape: tuple[int, ...]
    dtype: str


class HFFolder:
    """Weights of a Hugging Face folder.

    The constructor reads only the files' headers. Faults are CheckpointErrors.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = find_weight_files(self.folder)
        self._entries: dict[str, _Entry] = {}
        self._stored_again: list[tuple[str, Path]] = []  # tensors that another shard holds too
        for path in self.files.paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (a file is not a dict)
                    if self.files.file_of.get(name, path) != path:
                        self._stored_again.append((name, path))
                        continue
                    if name in self._entries:  # not in the index, and two shards hold it
                        self._stored_again.append((name, path))
                        continue
                    header = file.get_slice(name)
                    self._entries[name] = _Entry(
                        path, name, tuple(header.get_shape()), header.get_dtype()
                    )
        if EMBEDDING.removeprefix(_DECODER) in self._entries:
            # The folder was saved from transformers' bare decoder, such as LlamaModel. transformers
            # loads it by these names too.
            self._entries = {_with_prefix(name): entry for name, entry in self._entries.items()}
            self._stored_again = [(_with_prefix(name), path) for name, path in self._stored_again]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def common_dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return a dtype that can hold the values of all these tensors."""
        dtypes = {self._entries[name].dtype for name in names if name in self._entries}
        return functools.reduce(torch.promote_types, (DTYPES[dtype] for dtype in sorted(dtypes)))

    def read(self, name: str, axis: int = 0, part: tuple[int, int] | None = None) -> Tensor:
        """Read a tensor, or the range `part` of `axis`; the rest stays on disk."""
        entry = self._entries[name]
        with _opened(entry.file) as file:
            start, end = part or (None, None)
            return file.get_slice(entry.stored_name)[(slice(None),) * axis + (slice(start, end),)]

    def fingerprint(self) -> str:
        """Return a digest that distinguishes the weights of two folders.

        It is of every tensor's name, shape, dtype and first row.

        Training changes every row of a matrix, except embeddings of tokens that never occur.
        """
        digest = hashlib.sha256()
        for name in sorted(self._entries):
            entry = self._entries[name]
            digest.update(f"{name} {entry.shape} {entry.dtype} ".encode())
            digest.update(
                self.read(name, 0, (0, 1)).contiguous().view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()[:16]

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None:
        """Compare the headers with the model's shapes.

        Raises CheckpointError, which lists all faults except in `ignored` names.
        """
        quantised = [
            name for name in self._entries.keys() - expected.keys() if _OF_QUANTISED.search(name)
        ]
        if quantised:
            raise CheckpointError(
                f"the weights in {self.folder} are quantised (it holds {min(quantised)}), "
                f"and training needs them unquantised; {UNQUANTISED}",
                key="model.weights.quantised",
            )
        self._refuse_wrapped(expected)
        # Merge layers with the same fault, or a wrong config.json would fill the screen.
        faults: dict[tuple[str, str], list[str]] = {}

        def add(name: str, text: str) -> None:
            faults.setdefault((_LAYER.sub("N", name), text), []).extend(_LAYER.findall(name))

        for name, shape in expected.items():
            entry = self._entries.get(name)
            if entry is None:
                expected_in = self.files.file_of.get(name, self.files.listing)
                add(name, f"missing in {expected_in.name}; expected shape {shape}")
            elif entry.shape != shape:
                add(
                    name,
                    f"shape {entry.shape} in {entry.file.name}; "
                    f"by config.json it should be {shape}",
                )
            elif entry.dtype not in DTYPES:
                add(
                    name, f"{entry.dtype} in {entry.file.name}; expected one of {', '.join(DTYPES)}"
                )
        for name, other in self._stored_again:
            entry = self._entries.get(name)
            if name in expected and entry is not None and not self._is_equal_in(name, other):
                add(
                    name,
                    f"stored in {entry.file.name} and, with other values, in {other.name}; "
                    "keep one of them",
                )
        for name in sorted(self._entries.keys() - expected.keys()):
            if not ignored.search(name):
                entry = self._entries[name]
                add(
                    name,
                    f"shape {entry.shape} in {entry.file.name}; "
                    "a model of this config.json has no such tensor",
                )
        lines: list[str] = []
        for (name, text), layers in faults.items():
            several = f", N = {', '.join(sorted(layers, key=int))}" if len(layers) > 1 else ""
            listed_name = name if several else name.replace(".N.", ".".join(["", *layers, ""]))
            lines.append(f"  {listed_name}{several}: {text}")
        if faults:
            listed = "\n".join(lines)
            raise CheckpointError(
                f"{self.folder} does not hold what its config.json says:\n{listed}",
                key="model.weights.not_of_config",
            )

    def _refuse_wrapped(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError if tensor names have the prefix of a wrapper, for example DDP."""
        ending = "." + EMBEDDING.removeprefix(_DECODER)
        others = [name for name in self.names if name.endswith(ending)]
        if EMBEDDING not in expected or EMBEDDING in self._entries or not others:
            return
        raise CheckpointError(
            f"{self.folder} holds {others[0]} where its config.json expects {EMBEDDING}: "
            "the model was saved inside a wrapper. Call save_pretrained on the model itself: "
            "`.module` for DDP, `._orig_mod` for torch.compile, the result of merge_and_unload() "
            "for PEFT, the language model for a model with images",
            key="model.weights.wrapped",
        )

    def _is_equal_in(self, name: str, other: Path) -> bool:
        with _opened(other) as file:
            return torch.equal(self.read(name), file.get_tensor(self._entries[name].stored_name))


def _with_prefix(name: str) -> str:
    return _DECODER + name if name.startswith(_PARTS_OF_DECODER) else name


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # safetensors raises an undocumented type for a damaged file
        if path.is_file():
            with path.open("rb") as content:
                if content.read(len(_LFS_POINTER)) == _LFS_POINTER:
                    raise CheckpointError(
                        f"{path} is a pointer of Git LFS, not the file; fetch it: git lfs pull",
                        key="model.weights.lfs_pointer",
                    ) from error
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}",
            key="model.weights.not_readable",
        ) from error
