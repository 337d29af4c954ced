"""Finds the files of a Hugging Face folder that transformers loads as its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from reinforce_rl.config.model_folder import ADAPTER_FILE, MERGE_ADAPTER, model_values, no_model
from reinforce_rl.errors import CheckpointError, key_of
from reinforce_rl.utils.console import warn_once
from reinforce_rl.utils.untrusted_files import (
    UnreadableFileError,
    check_model_files,
    read_model_json,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
INDEX_ENDING = ".safetensors.index.json"
NAMED_FILE = "transformers_weights"  # key of config.json: a file to load in place of these two

# Weights in other forms, with advice. Other files may end in .bin too, such as training_args.bin.
_OTHER_FORMS = {
    "pytorch_model*.bin": "is pickled, which is not read, because unpickling can run any code. "
    "Where you trust it, load it with transformers and write it with save_pretrained",
    "consolidated*": "is of the model's author's own format, whose tensors have other names. "
    "Use the folder that has model.safetensors too, "
    "or convert it with the script of transformers for this family",
    "*.gguf": "is a file of llama.cpp. Use the folder that it was made from",
    "model.*.safetensors": "is a variant, which transformers loads only when it is asked for by "
    f"name. Rename the variant that you want to {SINGLE_FILE}, or its index to {INDEX_FILE}",
}


@dataclass(frozen=True)
class WeightFiles:
    """The files that transformers would load from a folder."""

    listing: Path  # the single file, or the index
    file_of: dict[str, Path]  # by tensor, as the index says; empty for a single file

    @property
    def paths(self) -> list[Path]:
        return sorted(set(self.file_of.values())) or [self.listing]


def find_weight_files(folder: Path) -> WeightFiles:
    """Find the weights in transformers' order: the single file, then the index.

    Logs a warning once if the folder holds both. Raises CheckpointError: there are no weights, they
    have another form, or an adapter lies beside them.
    """
    try:
        if folder.is_dir():
            check_model_files(folder)
    except UnreadableFileError as error:
        raise CheckpointError(str(error), key=error.key) from error
    if (folder / ADAPTER_FILE).is_file():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} {no_model(folder)}", key="model.folder.no_model")
        raise CheckpointError(
            f"{folder} holds {ADAPTER_FILE}, an adapter of PEFT. transformers loads it on top of "
            "the weights where peft is installed, and the weights alone where it is not. "
            f"{MERGE_ADAPTER}, or move the adapter's files away for the weights alone",
            key="model.folder.adapter",
        )
    listing = _listing(folder)
    if not listing.name.endswith(INDEX_ENDING):
        return WeightFiles(listing, {})
    return WeightFiles(listing, _files_of_index(listing))


def _listing(folder: Path) -> Path:
    single = folder / SINGLE_FILE
    index = folder / INDEX_FILE
    named = model_values(str(folder)).get(NAMED_FILE)
    if named is not None:
        path = folder / str(named)
        if not (
            path.is_file()
            and _is_inside(path, folder)
            and path.name.endswith((".safetensors", INDEX_ENDING))
        ):
            raise CheckpointError(
                f"{folder / 'config.json'}: {NAMED_FILE} is {named!r}; expected a file of this "
                f"folder that ends in .safetensors or {INDEX_ENDING}",
                key="model.config.other_weights",
            )
        return path
    if single.is_file():
        if index.is_file():
            warn_once(
                f"{folder} holds weights twice: {SINGLE_FILE}, which is read, as transformers "
                f"does, and {INDEX_FILE} with its shards, which are not. "
                "Delete the ones that are out of date"
            )
        return single
    if index.is_file():
        return index
    raise CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; {_other_forms(folder)}",
        key="model.weights.missing",
    )


def _is_inside(path: Path, folder: Path) -> bool:
    return os.path.abspath(path).startswith(os.path.abspath(folder) + os.sep)


def _other_forms(folder: Path) -> str:
    for pattern, advice in _OTHER_FORMS.items():
        names = sorted(file.name for file in folder.glob(pattern))
        if names:
            return f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} {advice}"
    return "expected a Hugging Face folder with safetensors"


def _files_of_index(index: Path) -> dict[str, Path]:
    try:
        names = dict(read_model_json(index)["weight_map"])
        files = {name: index.parent / file for name, file in names.items()}
        outside = [name for name in files.values() if not _is_inside(name, index.parent)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} cannot be read: {error!r}; expected a JSON object with a weight_map",
            key=key_of(error, "model.index.not_readable"),
        ) from error
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]}, which is not in {index.parent}; expected shards in its "
            "folder",
            key="model.index.file_elsewhere",
        )
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise CheckpointError(
            f"{index} names files that are not there: {', '.join(missing)}",
            key="model.index.file_missing",
        )
    if not files:
        raise CheckpointError(
            f"{index} names no tensors; expected a weight_map with every tensor's file",
            key="model.index.empty",
        )
    return files
