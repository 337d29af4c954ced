"""One model for inference, on the trainer's own path: its configuration, and the actor without gradients.

cfg = inference_config("results/demo")
with configured_mesh(cfg) as mesh, contextlib.closing(load_actor(cfg, mesh).generator): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.compose import CONF_FOLDER, compose
from reinforce_rl.config.load import read_config
from reinforce_rl.config.parallelism import model_values
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.runtime.settings import CONFIG_FILE
from reinforce_rl.trainer.build import build_actor, check_vocabulary

PROGRAM = "train_reinforce_actor"
LENGTH = "model.encoder_seq_length"
DATA = "model.data.data_prefix"
# Sections and keys of training alone, which are taken back to their defaults.
OF_TRAINING = (
    "model.peft",
    "model.global_batch_size",
    "model.optim",
    "trainer.reinforce.kl_target",
    "trainer.reinforce.dynamic_filtering",
    "exp_manager.max_time_per_run",
    "exp_manager.checkpoint_callback_params",
)


def model_folder(path: str | Path) -> Path:
    """Return the Hugging Face folder of a model: the folder itself, or what a run has exported to `hf/`.

    Raises:
        ConfigError: there is none; for a run that was not exported, with the command that does it.
    """
    folder = Path(path)
    for found in (folder, folder / "hf"):
        if (found / "config.json").is_file():
            return found
    if (folder / "checkpoints").is_dir():
        began = _began_from(folder) or "THE_MODEL_IT_BEGAN_FROM"
        command = f"python examples/convert_checkpoint.py to-hf {folder} {folder / 'hf'} --model {began}"
        raise ConfigError([f"{folder} is a run without an exported model, {folder / 'hf'}; write it: {command}"])
    found = "has no config.json" if folder.is_dir() else "does not exist"
    raise ConfigError([f"{folder} {found}; expected a Hugging Face model folder, or the folder of a run"])


def _began_from(run: Path) -> str | None:
    if not (run / CONFIG_FILE).is_file():
        return None
    return OmegaConf.select(OmegaConf.load(run / CONFIG_FILE), "pretrained_checkpoint.restore_from_path")


def inference_config(
    model: str | Path,
    overrides: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    like: str | Path | None = None,
    folder: str | Path | None = None,
) -> TrainConfig:
    """Compose and check the trainer's configuration for a model that generates and scores, and is not trained.

    Args:
        model: see `model_folder`.
        overrides: KEY=VALUE of `conf/train_reinforce_actor.yaml`; the model-parallel layout is among them.
        data: prompts; None for the validation set of `overrides` or `like`, or none at all.
        like: a run, whose settings take the place of the defaults.
        folder: of what is written.

    Raises:
        ConfigError: all faults in one message.
    """
    path = model_folder(model)
    if like is not None and not (Path(like) / CONFIG_FILE).is_file():
        raise ConfigError([f"{like} has no {CONFIG_FILE}; expected the folder of a run"])
    source = (PROGRAM, CONF_FOLDER) if like is None else (Path(CONFIG_FILE).stem, Path(like))
    cfg = compose(source[0], overrides, source[1])

    def put(key: str, value: Any) -> None:
        OmegaConf.update(cfg, key, value, force_add=True)

    with open_dict(cfg):
        for key in OF_TRAINING:
            section, _, name = key.rpartition(".")
            OmegaConf.select(cfg, section).pop(name, None)
    put("pretrained_checkpoint.restore_from_path", str(path))
    put("trainer.reinforce.initial_policy_kl_penalty", 0.0)
    longest = model_values(str(path)).get("max_position_embeddings")
    given = {override.partition("=")[0] for override in overrides}
    if isinstance(longest, int) and LENGTH not in given:
        put(LENGTH, min(longest, OmegaConf.select(cfg, LENGTH)))
    if folder is not None:
        put("exp_manager.explicit_log_dir", str(folder))
    if data is not None:
        put(f"{DATA}.validation", str(data))
    prompts = OmegaConf.select(cfg, f"{DATA}.validation")
    if prompts is not None:
        put(f"{DATA}.train", prompts)
    put(f"{DATA}.test", None)
    config, faults = read_config(cfg)
    ours = DATA if prompts is None else f"{DATA}.train"  # nobody has given these
    faults = [fault for fault in faults if not fault.startswith(ours)]
    if faults:
        raise ConfigError(faults)
    return config


def load_actor(cfg: TrainConfig, mesh: Mesh) -> MegatronGPTReinforceActorModel:
    """Load tokenizer, weights and generator of a model for inference: no optimizer, no gradients, no reference.

    Close its `generator` at the end.

    Raises:
        ConfigError: the folder's tokenizer or weights do not fit, or this machine or layout cannot run the model.
    """
    folder = Path(cfg.pretrained_checkpoint.restore_from_path)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, Architecture.from_folder(folder), folder)
    return build_actor(cfg, mesh, tokenizer, trains=False)
