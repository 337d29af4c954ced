"""Which files `model.data.data_prefix` names. Apart from `prompts.py`, so that a check of it need not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.data.blending import weight_faults
from reinforce_rl.data.jsonl import describe_type, file_fault
from reinforce_rl.errors import ConfigError

SPLITS = ("train", "validation", "test")


def resolve_data_prefix(data_prefix: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files of each split, all of them seen to exist; cheap, so a run can check it before it loads a model.

    Raises:
        ConfigError: an unknown key, no train file, a value that is neither path nor weight, missing files; all
            together.
    """
    return _resolve(data_prefix)[0]


def blending_weights(data_prefix: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The weight of each train file; None where the files are given without weights.

    Raises:
        ConfigError: as `resolve_data_prefix`.
    """
    return _resolve(data_prefix)[1]


def _resolve(data_prefix: Mapping[str, Any]) -> tuple[dict[str, list[Path]], tuple[float, ...] | None]:
    if not isinstance(data_prefix, Mapping):
        raise ConfigError(
            [f"model.data.data_prefix is {describe_type(data_prefix)}; expected keys train, validation and test"]
        )
    faults = [
        f"model.data.data_prefix.{key} is not known; expected one of {', '.join(SPLITS)}"
        for key in data_prefix
        if key not in SPLITS
    ]
    files: dict[str, list[Path]] = {}
    weights: tuple[float, ...] | None = None
    for split in SPLITS:
        value = data_prefix.get(split)
        entries = [] if value is None else [value] if isinstance(value, (str, Path)) else value
        if not isinstance(entries, Sequence):
            faults.append(f"model.data.data_prefix.{split} is {value!r}; expected a path or a list of paths")
            continue
        files[split] = []
        if split == "train" and any(_is_weight(entry) for entry in entries):
            weights, entries = _split_weights(entries, faults)
        for entry in entries:
            if not isinstance(entry, (str, Path)) or not str(entry):
                hint = " (only train can be blended by weights)" if _is_weight(entry) else ""
                faults.append(f"model.data.data_prefix.{split} holds {entry!r}; expected a path{hint}")
                continue
            path = Path(entry).expanduser()
            files[split].append(path)
            if fault := file_fault(path):
                faults.append(f"model.data.data_prefix.{split}: file {path} {fault}; expected a JSONL file of prompts")
        if split == "train" and not entries:
            faults.append("model.data.data_prefix.train is empty; expected one or more JSONL files of prompts")
    if faults:
        raise ConfigError(faults)
    return files, weights


def _is_weight(entry: object) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool)


def _split_weights(entries: Sequence[Any], faults: list[str]) -> tuple[tuple[float, ...], list[Any]]:
    """Weights and paths of `[0.3, a.jsonl, 0.7, b.jsonl]`."""
    weights, paths = list(entries[::2]), list(entries[1::2])
    if len(weights) != len(paths) or not all(map(_is_weight, weights)) or any(map(_is_weight, paths)):
        faults.append(
            f"model.data.data_prefix.train is {list(entries)}; expected paths alone, each of whose prompts comes once "
            "an epoch, or a weight before every path: [0.3, a.jsonl, 0.7, b.jsonl]"
        )
        return (), [entry for entry in entries if not _is_weight(entry)]
    faults += weight_faults(weights)
    faults += [
        f"model.data.data_prefix.train gives {path} two weights; expected each file once"
        for path in dict.fromkeys(paths)
        if paths.count(path) > 1
    ]
    return tuple(map(float, weights)), paths
