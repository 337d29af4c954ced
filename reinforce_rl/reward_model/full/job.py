"""The whole job of `examples/train_reward_model.py mode=full`: data and a folder in, a trained classifier out.

output_dir/
  model/                      the best model so far, as a Hugging Face ...ForSequenceClassification folder
  evaluation.json             the held-out evaluation of that model
  checkpoints/                as of the actor's runs
  metrics.jsonl  report.html  config.yaml
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf

from reinforce_rl.data.sampler import PromptSampler
from reinforce_rl.data.tokenizer import load_tokenizer, token_id
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.checkpoint.checkpointer import Checkpointer, latest_checkpoint
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.transformer_config import ModelOptions
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.reward_model.config import TrainRewardModelConfig
from reinforce_rl.reward_model.full.card import FullCard
from reinforce_rl.reward_model.full.monitor import FullTrainingMonitor
from reinforce_rl.reward_model.full.report import EVALUATION_FILE, write_full_report
from reinforce_rl.reward_model.full.training import Best, FullTrainer, FullTrainingSettings
from reinforce_rl.reward_model.objectives import Objective, Ranking, Regression
from reinforce_rl.reward_model.pairs import encode_pairs, left_out, read_pairs, split_by_prompt
from reinforce_rl.reward_model.ratings import encode_ratings, read_ratings
from reinforce_rl.reward_model.trainable import TrainableRewardModel, load_trainable
from reinforce_rl.runtime.settings import CONFIG_FILE, compare
from reinforce_rl.trainer.build_actor import DTYPES, data_parallel_settings, optimizer_settings
from reinforce_rl.utils.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FOLDER = "model"
# With another value of one of these, the steps before and after it belong to different runs.
MEANING = re.compile(r"model\.restore_from_path$|data\.|full\.(objective|attributes|pooling|global_batch_size)$|seed$")


@dataclass(frozen=True)
class FullData:
    """Examples of the objective, split by prompt.

    Attributes:
        train, held_out: no prompt is on both sides.
        skipped: reason to number of examples that were left out.
    """

    train: list[Any]
    held_out: list[Any]
    skipped: dict[str, int]


def train_all_weights(cfg: TrainRewardModelConfig, *, command: str) -> FullTrainer[Any]:
    """Run the job on this rank.

    Args:
        cfg: checked already, with `mode=full`.
        command: how the run was started, for the model card.

    Raises:
        ReinforceError: the data, the model, a file or a checkpoint cannot be used; the text says which and why.
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    sizes = cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size
    with parallel_mesh(
        *sizes, cfg.model.context_parallel_size, sequence_parallel=cfg.model.sequence_parallel, seed=cfg.seed
    ) as mesh:
        folder = Path(cfg.output_dir)
        tokenizer = load_tokenizer(cfg.model.restore_from_path)
        objective: Objective[Any] = Ranking() if cfg.full.objective == "ranking" else Regression(cfg.full.attributes)
        data = read_data(cfg, tokenizer)
        sampler = PromptSampler(
            len(data.train), cfg.full.global_batch_size, seed=cfg.seed, max_epochs=cfg.full.max_epochs
        )
        steps = cfg.full.max_epochs * sampler.steps_per_epoch
        steps = steps if cfg.full.max_steps == -1 else min(steps, cfg.full.max_steps)
        checkpoint = latest_checkpoint(folder / "checkpoints") if cfg.full.resume_if_exists else None
        settings = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))
        if checkpoint is not None:
            refuse_changes(folder, settings)
        if mesh.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / CONFIG_FILE, settings)
        start_step = checkpoint.trainer_state["step"] if checkpoint else 0
        monitor = FullTrainingMonitor(
            folder, steps, start_step, enabled=mesh.is_main, regression=cfg.full.objective == "regression"
        )
        with monitor.running():
            tell_about(monitor, mesh, cfg, data, tokenizer)
            trainer = build_trainer(cfg, mesh, tokenizer, objective, data, sampler, monitor, steps, command)
            if checkpoint is not None:
                trainer.restore(checkpoint)
                monitor.note(f"Going on from {checkpoint.folder}, after step {start_step} of {steps}.")
            trainer.fit()
            if trainer.stopped_early and trainer.best is not None:
                monitor.note(
                    f"Ended after step {trainer.step} of {steps}: the held-out loss has not fallen since step "
                    f"{trainer.best.step}."
                )
            if mesh.is_main:
                monitor.note(f"Report: {write_full_report(folder)}")
                monitor.note(f"Model: {folder / MODEL_FOLDER}")
        return trainer


def refuse_changes(folder: Path, settings: str) -> None:
    """Raises ConfigError where a run that goes on had settings so far that make it another run."""
    file = folder / CONFIG_FILE
    changes = compare(file.read_text("utf-8"), settings, TrainRewardModelConfig) if file.is_file() else {}
    refused = "; ".join(f"{key}: {values}" for key, values in changes.items() if MEANING.match(key))
    if refused:
        raise ConfigError(
            [
                f"{folder} has checkpoints of a run with other settings: {refused}. Set them back to go on, or choose "
                "another output_dir"
            ]
        )


def read_data(cfg: TrainRewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> FullData:
    """Pairs or rated answers, tokenised and split.

    Raises:
        DataError: lines that cannot be understood, or too few of them.
    """
    data = cfg.data
    limits: dict[str, Any] = {
        "max_length": cfg.max_length,
        "max_answer_tokens": data.max_answer_tokens,
        "single_turn_only": data.single_turn_only,
        "seed": cfg.seed,
    }
    examples: Sequence[Any]
    if cfg.full.objective == "ranking":
        assert data.pairs_path is not None
        encoded = encode_pairs(read_pairs(data.pairs_path), tokenizer, max_pairs=data.max_pairs, **limits)
        examples, skipped = encoded.pairs, encoded.skipped
    else:
        assert data.ratings_path is not None
        rated = read_ratings(data.ratings_path, cfg.full.attributes)
        examples, skipped = encode_ratings(rated, tokenizer, max_answers=data.max_pairs, **limits)
    train, held_out = split_by_prompt([one.prompt_key for one in examples], data.held_out_fraction, cfg.seed)
    return FullData([examples[i] for i in train], [examples[i] for i in held_out], skipped)


def tell_about(
    monitor: FullTrainingMonitor,
    mesh: Mesh,
    cfg: TrainRewardModelConfig,
    data: FullData,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """What a person should know before the first step."""
    if mesh.world_size > 1:
        monitor.note(mesh.grid())
    monitor.note(f"{len(data.train)} examples to train on, {len(data.held_out)} held out")
    for line in left_out(data.skipped, len(data.train) + len(data.held_out) + sum(data.skipped.values())):
        monitor.note(line)
    pad_id = token_id(tokenizer.pad_token_id)
    if cfg.full.pooling == "last" and pad_id is not None and pad_id == token_id(tokenizer.eos_token_id):
        monitor.note(
            "The tokenizer's padding token is its end-of-sequence token. transformers takes the last token that is no "
            "padding, so the score is read from the token before the end; full.pooling=mean reads all of them."
        )


def build_trainer(
    cfg: TrainRewardModelConfig,
    mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective[Any],
    data: FullData,
    sampler: PromptSampler,
    monitor: FullTrainingMonitor,
    steps: int,
    command: str,
) -> FullTrainer[Any]:
    """Model, optimizer and trainer.

    Raises:
        ConfigError: the tokenizer has ids that the model has no embedding for.
    """
    source, folder, optim = cfg.model.restore_from_path, Path(cfg.output_dir), cfg.model.optim
    vocab_size = Architecture.from_folder(source).vocab_size
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            [f"the tokenizer of {source} has {len(tokenizer)} tokens, its model only {vocab_size} embeddings"]
        )
    monitor.phase("loading the model")
    options = ModelOptions(
        recompute_granularity=cfg.model.activations_checkpoint_granularity,
        recompute_method=cfg.model.activations_checkpoint_method,
        recompute_num_layers=cfg.model.activations_checkpoint_num_layers,
        overrides=cfg.model.megatron_overrides,
    )
    dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
    lm = load_trainable(source, mesh, objective.names, seed=cfg.seed, dtype=dtype, options=options)
    pad_id = token_id(tokenizer.pad_token_id)
    model = TrainableRewardModel(
        lm,
        pooling=cfg.full.pooling,
        pad_id=pad_id,
        micro_batch_size=cfg.micro_batch_size,
        data_parallel=data_parallel_settings(optim),
    )
    settings = optimizer_settings(optim, cfg.full.gradient_clip_val, steps)
    optimizer, scheduler = build_optimizer(model.ddp, settings)
    card = FullCard(Path(source).resolve().name, cfg, objective.names, len(data.train), len(data.held_out), command)

    def export(best: Best) -> None:
        model.export(source, folder / MODEL_FOLDER, objective.names, pad_id)
        if mesh.is_main:
            write_atomically(folder / MODEL_FOLDER / "README.md", card.text(best))
            write_atomically(folder / EVALUATION_FILE, json.dumps(dataclasses.asdict(best), indent=2))

    return FullTrainer(
        model,
        ActorOptimizer(optimizer, scheduler),
        objective,
        data.train,
        data.held_out,
        sampler,
        Checkpointer(folder / "checkpoints", mesh, model.ddp, optimizer, scheduler, keep_last=cfg.full.keep_last),
        monitor,
        export,
        FullTrainingSettings(steps, cfg.full.val_check_interval, cfg.full.patience),
    )
