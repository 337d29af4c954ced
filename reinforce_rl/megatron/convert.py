"""Converts between Hugging Face folders and `dist_checkpointing` checkpoints.

Tensor-parallel sizes may differ.

`to_megatron` writes `model/` (sharded weights, as in a run's checkpoint) beside copied config and
tokenizer files.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from reinforce_rl.errors import CheckpointError, ConfigError, Fault, key_of
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpoint_files import MANIFEST_FILE, check_files, load_sharded
from reinforce_rl.megatron.checkpointer import (
    CHECKPOINTS,
    LATEST_FILE,
    STATE_FILE,
    latest_checkpoint,
    reason_of,
)
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import (
    Track,
    carry_over,
    check_headers,
    export_hf_folder,
    load_hf_weights,
)
from reinforce_rl.megatron.lora import (
    LoraSettings,
    MergedWeights,
    add_lora,
    check_lora_identity,
    trained_state,
)
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import PREFIX
from reinforce_rl.megatron.stored_metadata import FORMAT_FILE, check_stored_metadata
from reinforce_rl.megatron.weight_map import weight_map
from reinforce_rl.utils.files import replace_folder
from reinforce_rl.utils.untrusted_files import read_json

MODEL = "model"
_MOST_TIMES = 4  # a model may be this many times as large as the checkpoint to be read into it


def to_megatron(
    source: str | Path,
    out: str | Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    track: Track = iter,
) -> Path:
    """Write a Hugging Face folder's weights as a checkpoint, atomically; a collective call.

    `out` is replaced if it exists. `dtype` is by default the dtype of the folder; of several, a
    dtype that holds the values of all.

    Raises ConfigError: the model is not supported; CheckpointError: the folder cannot be read or
    the checkpoint cannot be written.
    """
    source = Path(source)
    out = Path(out)
    architecture = Architecture.from_folder(source)
    weights = HFFolder(source)
    check_headers(architecture, weights)
    stored = weights.common_dtype(row.hf for row in weight_map(architecture, 1))
    lm = CausalLM(architecture, mesh, dtype or stored)
    load_hf_weights(lm, weights, track=track)
    part = out.with_name(out.name + ".part")

    def failed(error: BaseException) -> CheckpointError:
        sentence = f"rank {mesh.rank} cannot write {part}: {reason_of(error)}"
        return CheckpointError(sentence, key=key_of(error, "convert.folder.not_written"))

    with mesh.raise_on_all_ranks(failed):
        if mesh.is_main:
            shutil.rmtree(part, ignore_errors=True)
            (part / MODEL).mkdir(parents=True)
            carry_over(source, part)
    with mesh.raise_on_all_ranks(failed):
        dist_checkpointing.save({"model": lm.sharded_state_dict()}, str(part / MODEL))
    with mesh.raise_on_all_ranks(failed):
        if mesh.is_main:
            replace_folder(part, out)
    return out


def to_hf(
    checkpoint: str | Path,
    out: str | Path,
    mesh: Mesh,
    *,
    model: str | Path | None = None,
    **options: Any,
) -> Path:
    """Write a checkpoint's weights as a Hugging Face folder, atomically; a collective call.

    Args:
        checkpoint: from `to_megatron` or a run, of any number of ranks, or a run's folder, of which
            the newest checkpoint is used.
        model: folder with config and tokenizer; for a LoRA run, the folder of the base model. None
            if the checkpoint has them.
        options: `dtype`, `max_shard_bytes` and `track` of `export_hf_folder`.

    Raises ConfigError: no config.json, or the model is not supported; CheckpointError: the
    checkpoint cannot be read or is another model's, or the folder cannot be written.
    """
    checkpoint = _checkpoint_in(Path(checkpoint))
    source = checkpoint if model is None else Path(model)
    if model is None and not (checkpoint / "config.json").is_file():
        sentence = (
            f"{checkpoint} has no config.json, since a run's checkpoints do not have one; give the "
            "folder of the run's model with --model"
        )
        raise ConfigError([Fault(sentence, key="convert.model.not_given")])
    architecture = Architecture.from_folder(source)
    state = checkpoint / STATE_FILE
    trainer_state = _trainer_state(state) if state.is_file() else {}
    dtype = _dtype_of(checkpoint)
    # Check the size before a model of config.json's size takes memory.
    if trainer_state.get("lora") is None:
        _check_size(architecture, source, checkpoint)
    else:
        check_headers(architecture, HFFolder(source))
    lm = CausalLM(architecture, mesh, dtype)
    merged = _add_lora_of(checkpoint, trainer_state, lm, source)
    load_weights(lm, checkpoint)
    return export_hf_folder(
        lm, source, out, values=merged, step=trainer_state.get("step"), **options
    )


def _check_size(architecture: Architecture, source: Path, checkpoint: Path) -> None:
    """Raise CheckpointError if config.json describes a model far larger than the checkpoint.

    The checkpoint itself has been checked. Loading it reports smaller mismatches, tensor by tensor.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoint / MODEL))
    available = sum(
        math.prod(tensor.global_shape)
        for name, tensor in stored.items()
        if not name.startswith(PREFIX)
    )
    expected = sum(math.prod(row.shape) for row in weight_map(architecture, 1))
    if expected > _MOST_TIMES * available:
        raise CheckpointError(
            f"a model of {source / 'config.json'} has {expected} parameters, but the tensors in "
            f"{checkpoint} have {available} numbers; give the folder of this checkpoint's model",
            key="convert.model.too_large",
        )


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path, within=path.parent))
    except (OSError, ValueError, TypeError) as error:
        sentence = f"{path} cannot be read: {error}"
        raise CheckpointError(
            sentence, key=key_of(error, "checkpoint.state.not_readable")
        ) from error


def load_weights(lm: CausalLM, checkpoint: Path) -> None:
    """Fill the model from a checkpoint of any number of ranks; a collective call.

    Raises CheckpointError on all ranks.
    """

    def failed(error: BaseException) -> CheckpointError:
        sentence = f"checkpoint {checkpoint} cannot be loaded: {reason_of(error)}"
        return CheckpointError(sentence, key=key_of(error, "checkpoint.folder.not_loaded"))

    with lm.mesh.raise_on_all_ranks(failed):
        if (checkpoint / MANIFEST_FILE).is_file():  # only checkpoints of a run have one
            check_files(checkpoint, lm.mesh.rank, lm.mesh.world_size)
        load_sharded(lm, {"model": trained_state(lm)}, checkpoint / MODEL)


def _add_lora_of(
    checkpoint: Path, trainer_state: dict[str, Any], lm: CausalLM, source: Path
) -> MergedWeights | None:
    """Load the base model of a checkpoint of LoRA updates, and add the updates.

    Returns the merged weights, to be read once the updates are loaded; None without LoRA.
    """
    lora: dict[str, Any] | None = trainer_state.get("lora")
    if lora is None:
        return None
    weights = HFFolder(source)
    settings = LoraSettings(lora["rank"], lora["alpha"], tuple(lora["targets"]))
    check_lora_identity(settings.identity(weights.fingerprint()), checkpoint, trainer_state)
    load_hf_weights(lm, weights)
    add_lora(lm, settings)
    return MergedWeights(lm)


def _checkpoint_in(folder: Path) -> Path:
    """Return the folder if it is a checkpoint, else the newest checkpoint of a run."""
    for candidate in (folder, folder / CHECKPOINTS):
        if (candidate / MODEL / FORMAT_FILE).is_file():
            return candidate
        # A link to a run is allowed, a link in place of its checkpoints folder is not.
        is_a_run = candidate == folder and not os.path.lexists(folder / LATEST_FILE)
        if not is_a_run and (newest := latest_checkpoint(candidate)):
            return newest.folder
    raise CheckpointError(
        f"{folder} is not a checkpoint; expected a folder with model/metadata.json in it, such as "
        "RUN/checkpoints/step_00000010, or the folder of a run",
        key="convert.folder.no_checkpoint",
    )


def _dtype_of(checkpoint: Path) -> torch.dtype:
    check_stored_metadata(checkpoint / MODEL)
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoint / MODEL))
    updates = [tensor for name, tensor in stored.items() if name.endswith(".lora_A.weight")]
    known: Any = stored.get("embedding.word_embeddings.weight", *updates[:1])
    if known is None:
        raise CheckpointError(
            f"{checkpoint} has no embedding.word_embeddings.weight; expected the checkpoint of a "
            "language model",
            key="convert.checkpoint.no_language_model",
        )
    return known.dtype
