"""One model for inference: its configuration, and the trainer's actor without gradients.

cfg = inference_config("results/demo")
with configured_mesh(cfg) as mesh, contextlib.closing(load_actor(cfg, mesh).generator): ...
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import OmegaConf, open_dict

from reinforce_rl.config.actor import COLOCATED, TrainConfig
from reinforce_rl.config.compose import compose, compose_stored
from reinforce_rl.config.load import read_config
from reinforce_rl.config.model_folder import MODEL, export_command, model_values, no_model
from reinforce_rl.data.data_prefix import sets_of
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import CheckpointError, ConfigError, Fault
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpointer import STATE_FILE, latest_checkpoint
from reinforce_rl.megatron.hf_weights import STEP
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.policy.build import build_actor, check_vocabulary
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.rewards.function_pool import with_user_code
from reinforce_rl.runtime.settings import CONFIG_FILE
from reinforce_rl.runtime.stored_config import parse_values, read_stored
from reinforce_rl.runtime.trust import (
    remove_from_import_path,
    require_trust,
    without_custom_generator,
)
from reinforce_rl.utils.untrusted_files import check_folder

logger = logging.getLogger(__name__)

PROGRAM = "train_reinforce_actor"
DATA = "model.data.data_prefix"
LENGTH = "model.encoder_seq_length"
# Settings that only training uses; inference resets them to their defaults.
OF_TRAINING = (
    "model.peft",
    "model.global_batch_size",
    "model.optim",
    "trainer.reinforce.kl_target",
    "trainer.reinforce.mini_batches",
    "trainer.reinforce.dynamic_filtering",
    "exp_manager.max_time_per_run",
    "exp_manager.checkpoint_callback_params",
)


def model_folder(path: str | Path) -> Path:
    """Return the Hugging Face folder of a model: the folder itself, or the export `hf/` of a run.

    Raises:
        ConfigError: there is no such folder. For a run without an export, the error has the
            command that writes it.
        UnreadableFileError: the run's export is a link out of the run's folder.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder
    exported = folder / "hf"
    if (exported / "config.json").is_file():
        check_folder(exported)
        return exported
    raise ConfigError([Fault(f"{folder} {no_model(folder)}", key="model.folder.no_model")])


def _warn_if_outdated(folder: Path) -> None:
    """Warn if the run has a newer checkpoint than this export."""
    newest = None
    with contextlib.suppress(CheckpointError):  # a damaged checkpoint does not matter here
        newest = latest_checkpoint(folder.parent / "checkpoints") if folder.name == "hf" else None
    if newest is None:
        return
    config = folder / "config.json"
    state = newest.folder / STATE_FILE
    exported = model_values(str(folder)).get(STEP)
    step = newest.trainer_state["step"]
    is_older = (
        exported < step if exported is not None else config.stat().st_mtime < state.stat().st_mtime
    )
    if is_older:
        of = "an earlier step" if exported is None else f"step {exported}"
        logger.warning(
            f"{folder} is the model of {of}, and the run's newest checkpoint is of step {step}; to "
            f"use that one, export it first: {export_command(folder.parent)}"
        )


def inference_config(
    model: str | Path,
    overrides: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    like: str | Path | None = None,
    folder: str | Path | None = None,
    trust: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> TrainConfig:
    """Compose and check the trainer's configuration for a model that generates and is not trained.

    Args:
        model: see `model_folder`.
        overrides: KEY=VALUE of `conf/train_reinforce_actor.yaml`, model parallelism included.
        data: file of prompts; None for the validation set of `overrides` or `like`, if any.
        like: a run; its settings replace the defaults.
        folder: output folder.
        trust, say: for functions, addresses and the like that only `like` names; see
            `runtime.trust.require_trust`.

    Raises:
        ConfigError: has all faults in one message.
    """
    path = model_folder(model)
    remove_from_import_path(model)
    if like is not None and not (Path(like) / CONFIG_FILE).is_file():
        sentence = f"{like} has no {CONFIG_FILE}; expected the folder of a run"
        raise ConfigError([Fault(sentence, key="eval.like.no_run")])
    if like is None:
        cfg = compose(PROGRAM, overrides)
    else:
        remove_from_import_path(like)
        file = Path(like) / CONFIG_FILE
        cfg = compose_stored(
            without_custom_generator(parse_values(read_stored(file), str(file))), overrides
        )
    with open_dict(cfg):
        for section, _, name in (key.rpartition(".") for key in OF_TRAINING):
            OmegaConf.select(cfg, section).pop(name, None)
    prompts = OmegaConf.select(cfg, f"{DATA}.validation") if data is None else str(data)
    values = {
        **COLOCATED,
        MODEL: str(path),
        "trainer.reinforce.initial_policy_kl_penalty": 0.0,
        f"{DATA}.validation": prompts,
        f"{DATA}.test": None,
    }
    if prompts is not None:
        values[f"{DATA}.train"] = list(itertools.chain(*sets_of(prompts).values()))
    if folder is not None:
        values["exp_manager.explicit_log_dir"] = str(folder)
    longest = model_values(str(path)).get("max_position_embeddings")
    if isinstance(longest, int) and not any(
        override.startswith(f"{LENGTH}=") for override in overrides
    ):
        values[LENGTH] = min(longest, OmegaConf.select(cfg, LENGTH))
    for key, value in values.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    config, faults = read_config(cfg)
    if like is not None:
        uses_data = data is None
        require_trust(config, overrides, like, trust=trust, data=uses_data, ranks=True, say=say)
    # The user has not set these keys.
    ignored = DATA if prompts is None else f"{DATA}.train"
    faults = [fault for fault in faults if not fault.startswith(ignored)]
    return with_user_code(config, faults)


def load_actor(cfg: TrainConfig, mesh: Mesh) -> MegatronGPTReinforceActorModel:
    """Load a model's tokenizer, weights and generator for inference.

    The actor has no optimizer, gradients or reference. The caller closes its `generator`. Warns if
    the run has a newer checkpoint.

    Raises:
        ConfigError: tokenizer, weights, machine and layout do not fit together.
    """
    folder = Path(cfg.pretrained_checkpoint.restore_from_path)
    if mesh.is_main:
        _warn_if_outdated(folder)
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, Architecture.from_folder(folder), folder)
    return build_actor(cfg, mesh, tokenizer, trains=False)
