"""Reads `model.data.data_prefix`: the files of each split, sets by name, and weights.

Torch-free, to run at config time.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reinforce_rl.data.readers import source_fault
from reinforce_rl.errors import ConfigError, Fault

Sets = dict[str, list[Any]]  # paths by a set's name

SPLITS = ("train", "validation", "test")
EXPECTED = "JSONL, JSON, CSV, TSV or Parquet, a folder of such files, or hf:OWNER/NAME"


def resolve_data_prefix(
    data_prefix: Mapping[str, Any],
) -> tuple[dict[str, Sets], tuple[float, ...] | None]:
    """Return the files of each split, and the weight of each train file if there are weights.

    `sets_of` describes the files. Cheap, so that it can run before a model is loaded. The schema of
    the configuration checks the types.

    Raises:
        ConfigError: no train file, wrong weights, wrong names of sets, or files that cannot be
            read; all faults together.
    """
    key = "model.data.data_prefix"
    sets = data_prefix.get("validation")
    faults: list[Fault] = []
    train, weights = _split_weights(data_prefix.get("train"), faults)
    files = {
        split: sets_of(train if split == "train" else data_prefix.get(split)) for split in SPLITS
    }
    if not any(files["train"].values()):
        sentence = f"{key}.train is empty; expected {EXPECTED}"
        faults.append(Fault(sentence, key="data.train.missing"))
    if isinstance(sets, Mapping):
        faults += _faults_of_names(sets)
    no_path = Fault("'' is not a path", key="data.path.empty")
    for split, sets_of_split in files.items():
        for entry in itertools.chain(*sets_of_split.values()):
            fault = source_fault(entry, split) if str(entry) else no_path
            if fault:
                sentence = f"{key}.{split}: {fault}; expected {EXPECTED}"
                faults.append(Fault(sentence, key=fault.key))
    if faults:
        raise ConfigError(faults)
    return files, weights


def _faults_of_names(sets: Mapping[str, Any]) -> Iterator[Fault]:
    key = "model.data.data_prefix.validation"
    for name in sets:
        if not re.fullmatch(r"[\w.-]+", str(name)):
            yield Fault(
                f"{key} has a set named {name!r}; expected letters, digits, '.', '_', '-'",
                key="data.validation.invalid_name",
            )
    if not sets:
        yield Fault(
            f"{key} is empty; expected {{NAME: path or list, ...}}, or null",
            key="data.validation.empty",
        )


def sets_of(value: Any) -> Sets:
    """Return the paths of each set of prompts by name.

    A path, a list of paths, or None is one set without a name.
    """
    sets = value if isinstance(value, Mapping) else {"": [] if value is None else value}
    return {
        name: [paths] if isinstance(paths, (str, Path)) else list(paths)
        for name, paths in sets.items()
    }


def _split_weights(
    value: Any,
    faults: list[Fault],
) -> tuple[list[Any], tuple[float, ...] | None]:
    key = "model.data.data_prefix.train"
    entries = sets_of(value)[""]
    given = [entry for entry in entries if not isinstance(entry, (int, float))]
    if given == entries:
        return entries, None
    weights = entries[::2]
    paths = entries[1::2]
    if paths != given or len(weights) != len(paths):
        sentence = (
            f"{key} is {entries}; expected paths only, so that each prompt comes once an epoch, or "
            "a weight before every path: [0.3, a.jsonl, 0.7, b.jsonl]"
        )
        faults.append(Fault(sentence, key="data.weights.not_before_each_path"))
        return given, None
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            sentence = f"{key} has the weight {weight}; expected a number above 0"
            faults.append(Fault(sentence, key="data.weights.not_above_zero"))
    for path in dict.fromkeys(paths):
        if paths.count(path) > 1:
            sentence = f"{key} gives {path} two weights; expected each file once"
            faults.append(Fault(sentence, key="data.weights.file_twice"))
    return paths, tuple(map(float, weights))
