"""The updates of a LoRA run as a folder that PEFT loads onto the model that the run began with."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.lora.lora import adapter_rows, lora_settings_of
from reinforce_rl.megatron.lora.map import LoraSettings
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weights.hf_weights import hf_tensors
from reinforce_rl.utils.files import replace_folder

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
# PEFT's names begin at its own wrapper of the model.
PREFIX = "base_model.model."


def export_adapter(lm: CausalLM, source: str | Path, out: str | Path) -> Path:
    """Write A and B of every update; a collective call of all ranks, of which the first one writes.

    Args:
        lm: a model with updates.
        source: the folder of the base model, which PEFT's configuration names.
        out: the folder to write, whole or not at all; replaced where it exists.

    Raises:
        CheckpointError: on every rank, it cannot be written.
    """
    out, mesh, settings = Path(out), lm.mesh, lora_settings_of(lm)
    if settings is None:
        raise ValueError("this model has no updates to export")
    tensors: dict[str, Any] = {}
    if mesh.dp_rank == mesh.cp_rank == 0:
        tensors = {PREFIX + name: tensor for name, tensor in hf_tensors(lm, rows=adapter_rows(lm))}
    failure: Exception | None = None
    if mesh.is_main:
        part = out.with_name(out.name + ".part")
        try:
            _write(part, tensors, peft_config(settings, source))
            replace_folder(part, out)
        except Exception as error:  # safetensors raises its own, undocumented type where the disk is full
            shutil.rmtree(part, ignore_errors=True)
            failure = CheckpointError(f"cannot write the PEFT folder {out}: {error}")
    mesh.check_together(failure)
    return out


def peft_config(settings: LoraSettings, source: str | Path) -> dict[str, Any]:
    """What `peft.LoraConfig` reads; everything else has its default there."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(settings.targets),
        "bias": "none",
    }


def _write(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it readable by its owner only
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class LoraIdentity:
    """What the updates in a checkpoint belong to. They mean nothing on other weights or at another scale.

    Attributes:
        rank, alpha, targets: of `LoraSettings`.
        base_weights: fingerprint of the frozen weights; see `HFFolder.fingerprint`.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_weights: str

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> LoraIdentity:
        """Inverse of `state`."""
        return cls(**{**state, "targets": tuple(state["targets"])})

    def state(self) -> dict[str, Any]:
        """For the trainer's state, which is JSON."""
        return {**dataclasses.asdict(self), "targets": list(self.targets)}


def check_lora_identity(own: LoraIdentity | None, checkpoint: str | Path, trainer_state: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights do not belong to this run.

    Args:
        own: of this run; None where the whole model is trained.
        checkpoint: its folder, for the message.
        trainer_state: the checkpoint's.

    Raises:
        CheckpointError: what differs, all in one message.
    """
    stored: dict[str, Any] | None = trainer_state.get("lora")
    mine = None if own is None else own.state()
    if stored == mine:
        return
    if stored is None or mine is None:
        kinds = ("all weights", "LoRA updates only")
        found, expected = kinds[stored is not None], kinds[mine is not None]
        raise CheckpointError(
            f"checkpoint {checkpoint} holds {found}, but this run has {expected} (model.peft.peft_scheme); "
            "go on with the run's own configuration, or choose another exp_manager.explicit_log_dir"
        )
    keys = {
        "rank": "model.peft.lora_tuning.adapter_dim",
        "alpha": "model.peft.lora_tuning.alpha",
        "targets": "model.peft.lora_tuning.target_modules",
        "base_weights": "the weights of pretrained_checkpoint.restore_from_path (fingerprint)",
    }
    differ = [key for key in mine if stored.get(key) != mine[key]]
    told = "; ".join(f"{keys[key]}: {stored.get(key)} there, {mine[key]} here" for key in differ)
    raise CheckpointError(
        f"checkpoint {checkpoint} has LoRA updates of another model or shape: {told}. Go on with what the run began "
        "with, or choose another exp_manager.explicit_log_dir"
    )
