"""The configuration of `examples/train_reward_model.py`: dataclasses, and checks with one message an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from reinforce_rl.config.checks import OPTIMIZERS, PRECISIONS, SCHEDULES, model_values, tensor_faults
from reinforce_rl.config.parallelism import layout_faults, recomputation_faults
from reinforce_rl.config.reading import build, resolve_defaults
from reinforce_rl.config.schema import OptimConfig
from reinforce_rl.data.jsonl import file_fault
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.model.reward_head import POOLINGS
from reinforce_rl.utils.files import folder_faults

AUTO_POOLING = "auto"
MODES = ("head", "full")
OBJECTIVES = ("ranking", "regression")
HELPSTEER_ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")


@dataclass
class TrainerConfig:
    """Ranks and numbers, of `mode=full`."""

    num_nodes: int = 1
    devices: int = 1
    precision: str = "auto"

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices


@dataclass
class ModelConfig:
    """The trunk: a Hugging Face folder with safetensors and a chat template. All else is of `mode=full`."""

    restore_from_path: str = ""  # so that the other keys are checked too where it is missing
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    activations_checkpoint_granularity: str | None = None
    activations_checkpoint_method: str | None = None
    activations_checkpoint_num_layers: int | None = None
    megatron_overrides: dict[str, Any] = field(default_factory=dict)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    @property
    def block_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass
class DataConfig:
    """Which pairs, or ratings, are used; lengths in tokens."""

    pairs_path: str | None = None
    ratings_path: str | None = None
    max_length: int | None = None
    max_pairs: int | None = None
    max_answer_tokens: int | None = None
    held_out_fraction: float = 0.2
    single_turn_only: bool = False


@dataclass
class CutsConfig:
    """Beginnings of answers that are trained on besides the whole answers; lengths in tokens."""

    per_pair: int = 4
    min_tokens: int = 8
    max_tokens: int = 32
    evaluate_at: int = 24


@dataclass
class DegenerateConfig:
    """Made answers that the head learns to score below real ones, see `head.synthetic_negatives`."""

    fraction: float = 0.35


@dataclass
class HeadConfig:
    """How hidden states are pooled, and how the L2 strength is chosen."""

    pooling: str = "mean"
    l2: list[float] = field(default_factory=lambda: [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0])
    folds: int = 5

    @property
    def poolings(self) -> tuple[str, ...]:
        """The poolings to try."""
        return POOLINGS if self.pooling == AUTO_POOLING else (self.pooling,)


@dataclass
class FullConfig:
    """Training of all weights: what for, and for how long."""

    objective: str = "ranking"
    attributes: list[str] = field(default_factory=lambda: list(HELPSTEER_ATTRIBUTES))
    pooling: str = "last"
    global_batch_size: int = 64
    max_epochs: int = 1
    max_steps: int = -1
    val_check_interval: int = 100
    patience: int | None = 3
    gradient_clip_val: float = 1.0
    keep_last: int = 2
    resume_if_exists: bool = True


@dataclass
class TrainRewardModelConfig:
    """Every setting of `conf/train_reward_model.yaml`, which says what each is for."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mode: str = "head"
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    full: FullConfig = field(default_factory=FullConfig)
    cuts: CutsConfig = field(default_factory=CutsConfig)
    degenerate: DegenerateConfig = field(default_factory=DegenerateConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    micro_batch_size: int = 8
    num_threads: int | None = None
    seed: int = 0
    features_cache: str | None = None
    output_dir: str = "results/reward_head"

    @property
    def max_length(self) -> int:
        """`data.max_length`, or the trunk's longest sequence."""
        return self.data.max_length or Architecture.from_folder(self.model.restore_from_path).max_positions


def load_config(cfg: DictConfig) -> TrainRewardModelConfig:
    """Convert and check what Hydra composed.

    Raises:
        ConfigError: unknown or missing keys, wrong types, or values that cannot work, all together.
    """
    faults: list[str] = []
    config = build(TrainRewardModelConfig, cfg, "", faults)
    faults += _faults(config)
    if faults:
        raise ConfigError(faults)
    model = config.model
    block = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    resolve_defaults(config.trainer, model.optim, config.trainer.world_size // block)
    return config


def _faults(cfg: TrainRewardModelConfig) -> list[str]:
    found = []
    if not cfg.model.restore_from_path:
        found.append("model.restore_from_path is not set; give it as model.restore_from_path=VALUE")
    elif not Path(cfg.model.restore_from_path).is_dir():
        found.append(f"model.restore_from_path is {cfg.model.restore_from_path}, which is no folder")
    if cfg.mode not in MODES:
        found.append(f"mode is {cfg.mode!r}; expected one of {', '.join(MODES)}")
    found += _full_faults(cfg) if cfg.mode == "full" else _head_faults(cfg)
    found += folder_faults("output_dir", cfg.output_dir)
    if not 0 < cfg.data.held_out_fraction < 1:
        found.append(
            f"data.held_out_fraction is {cfg.data.held_out_fraction}; expected above 0 and below 1, for instance 0.2"
        )
    if not 0 <= cfg.degenerate.fraction <= 1:
        found.append(f"degenerate.fraction is {cfg.degenerate.fraction}; expected from 0 to 1")
    if cfg.head.pooling not in (*POOLINGS, AUTO_POOLING):
        choices = ", ".join((*POOLINGS, AUTO_POOLING))
        found.append(f"head.pooling is {cfg.head.pooling!r}; expected one of {choices}")
    if not cfg.head.l2 or not all(strength > 0 for strength in cfg.head.l2):
        found.append(f"head.l2 is {list(cfg.head.l2)}; expected at least one strength, each above 0")
    at_least: list[tuple[str, int | None, int]] = [
        ("data.max_length", cfg.data.max_length, 2),
        ("data.max_pairs", cfg.data.max_pairs, 2),
        ("data.max_answer_tokens", cfg.data.max_answer_tokens, 1),
        ("cuts.per_pair", cfg.cuts.per_pair, 0),
        ("cuts.min_tokens", cfg.cuts.min_tokens, 1),
        ("cuts.max_tokens", cfg.cuts.max_tokens, cfg.cuts.min_tokens),
        ("cuts.evaluate_at", cfg.cuts.evaluate_at, 1),
        ("head.folds", cfg.head.folds, 2),
        ("micro_batch_size", cfg.micro_batch_size, 1),
        ("num_threads", cfg.num_threads, 1),
    ]
    for key, value, least in at_least:
        if value is not None and value < least:
            found.append(f"{key} is {value}; expected at least {least}")
    return found


def _head_faults(cfg: TrainRewardModelConfig) -> Iterator[str]:
    """Of `mode=head`, which trains on one process from pairs."""
    yield from _shape(cfg)
    yield from _file_faults("data.pairs_path", cfg.data.pairs_path)
    if cfg.data.ratings_path is not None:
        yield "data.ratings_path is given, but mode=head trains on pairs only; set mode=full"
    if cfg.trainer.world_size != 1 or cfg.model.block_size != 1:
        yield (
            "mode is head, which runs in one process; leave trainer.devices, trainer.num_nodes and the model's "
            "parallel sizes at 1, or set mode=full"
        )


def _full_faults(cfg: TrainRewardModelConfig) -> Iterator[str]:
    """Of `mode=full`."""
    yield from _objective(cfg)
    yield from _ranges(cfg)
    yield from _layout(cfg)
    yield from _shape(cfg)


def _objective(cfg: TrainRewardModelConfig) -> Iterator[str]:
    full, data = cfg.full, cfg.data
    if full.objective == "regression":
        yield from _file_faults("data.ratings_path", data.ratings_path)
        if data.pairs_path is not None:
            yield "data.pairs_path is given, but full.objective=regression trains on data.ratings_path; leave it out"
        if not full.attributes or len(set(full.attributes)) < len(full.attributes):
            yield f"full.attributes is {full.attributes}; expected at least one name, and each once"
    elif full.objective == "ranking":
        yield from _file_faults("data.pairs_path", data.pairs_path)
        if data.ratings_path is not None:
            yield "data.ratings_path is given, but full.objective=ranking trains on data.pairs_path; leave it out"
        if cfg.micro_batch_size == 1:
            yield "micro_batch_size is 1; full.objective=ranking passes both answers of a pair together: at least 2"
    else:
        yield f"full.objective is {full.objective!r}; expected one of {', '.join(OBJECTIVES)}"
    if full.pooling not in POOLINGS:
        yield f"full.pooling is {full.pooling!r}; expected one of {', '.join(POOLINGS)}"


def _ranges(cfg: TrainRewardModelConfig) -> Iterator[str]:
    full, optim, model = cfg.full, cfg.model.optim, cfg.model
    at_least: list[tuple[str, float | None, float]] = [
        ("trainer.num_nodes", cfg.trainer.num_nodes, 1),
        ("trainer.devices", cfg.trainer.devices, 1),
        ("model.tensor_model_parallel_size", model.tensor_model_parallel_size, 1),
        ("model.pipeline_model_parallel_size", model.pipeline_model_parallel_size, 1),
        ("model.context_parallel_size", model.context_parallel_size, 1),
        ("model.activations_checkpoint_num_layers", model.activations_checkpoint_num_layers, 1),
        ("model.optim.weight_decay", optim.weight_decay, 0),
        ("model.optim.sched.warmup_steps", optim.sched.warmup_steps, 0),
        ("model.optim.sched.constant_steps", optim.sched.constant_steps, 0),
        ("model.optim.sched.min_lr", optim.sched.min_lr, 0),
        ("full.global_batch_size", full.global_batch_size, 1),
        ("full.max_epochs", full.max_epochs, 1),
        ("full.val_check_interval", full.val_check_interval, 1),
        ("full.patience", full.patience, 1),
        ("full.gradient_clip_val", full.gradient_clip_val, 0),
        ("full.keep_last", full.keep_last, 1),
        ("seed", cfg.seed, 0),
    ]
    for key, value, least in at_least:
        if value is not None and not value >= least:
            yield f"{key} is {value}; expected at least {least}"
    for key, value in (("model.optim.lr", optim.lr), ("model.optim.eps", optim.eps)):
        if not value > 0:
            yield f"{key} is {value}; expected above 0"
    choices = (
        ("trainer.precision", cfg.trainer.precision, PRECISIONS),
        ("model.optim.name", optim.name, OPTIMIZERS),
        ("model.optim.sched.name", optim.sched.name, SCHEDULES),
    )
    for key, choice, known in choices:
        if choice not in known:
            yield f"{key} is {choice!r}; expected one of {', '.join(known)}"
    if full.max_steps < 1 and full.max_steps != -1:
        yield f"full.max_steps is {full.max_steps}; expected at least 1, or -1 for all of full.max_epochs"
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"model.optim.betas is {optim.betas}; expected two numbers, each at least 0 and below 1"
    if optim.sched.min_lr > optim.lr > 0:
        yield f"model.optim.sched.min_lr is {optim.sched.min_lr}, above model.optim.lr, which is {optim.lr}"


def _layout(cfg: TrainRewardModelConfig) -> Iterator[str]:
    model, world = cfg.model, cfg.trainer.world_size
    ranks = f"trainer.num_nodes x trainer.devices = {cfg.trainer.num_nodes} x {cfg.trainer.devices}"
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    if min(*sizes, world) >= 1:
        yield from layout_faults(*sizes, model.sequence_parallel, world, ranks)
    started = os.environ.get("WORLD_SIZE")
    if started is not None and started != str(world):
        yield f"{started} ranks were started (WORLD_SIZE), but {ranks} = {world}"
    yield from recomputation_faults(
        model.activations_checkpoint_granularity,
        model.activations_checkpoint_method,
        model.activations_checkpoint_num_layers,
    )


def _shape(cfg: TrainRewardModelConfig) -> Iterator[str]:
    config_file, values = model_values(cfg.model.restore_from_path)
    yield from tensor_faults(values, config_file, cfg.model.tensor_model_parallel_size)
    limit = values.get("max_position_embeddings")
    if isinstance(limit, int) and cfg.data.max_length is not None and cfg.data.max_length > limit:
        yield (
            f"data.max_length is {cfg.data.max_length}, above the {limit} positions (max_position_embeddings) of "
            f"{config_file}"
        )


def _file_faults(key: str, path: str | None) -> Iterator[str]:
    if path is None:
        yield f"{key} is not set; give it as {key}=VALUE"
    elif fault := file_fault(Path(path)):
        yield f"{key} is {path}, which {fault}"
