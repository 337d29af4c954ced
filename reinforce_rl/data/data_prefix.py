"""Which files `model.data.data_prefix` names. Apart from `prompts.py`, so that a check of it need not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforce_rl.data.jsonl import describe_type
from reinforce_rl.errors import ConfigError

SPLITS = ("train", "validation", "test")


def resolve_data_prefix(data_prefix: Mapping[str, Any]) -> dict[str, list[Path]]:
    """The files of each split, all of them seen to exist; cheap, so a run can check it before it loads a model.

    Raises:
        ConfigError: an unknown key, no train file, a value that is no path, missing files; all together.
    """
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
    for split in SPLITS:
        value = data_prefix.get(split)
        entries = [] if value is None else [value] if isinstance(value, (str, Path)) else value
        if not isinstance(entries, Sequence):
            faults.append(f"model.data.data_prefix.{split} is {value!r}; expected a path or a list of paths")
            continue
        files[split] = []
        for entry in entries:
            if not isinstance(entry, (str, Path)) or not str(entry):
                faults.append(
                    f"model.data.data_prefix.{split} holds {entry!r}; expected a path "
                    "(weights for blending files are not known)"
                )
                continue
            path = Path(entry).expanduser()
            files[split].append(path)
            if not path.is_file():
                found = "is not a file" if path.exists() else "does not exist"
                faults.append(f"model.data.data_prefix.{split}: file {path} {found}; expected a JSONL file of prompts")
        if split == "train" and not entries:
            faults.append("model.data.data_prefix.train is empty; expected one or more JSONL files of prompts")
    if faults:
        raise ConfigError(faults)
    return files
