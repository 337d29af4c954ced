"""The configuration of `examples/train_reward_model.py`, as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reinforce_rl.config.schema import OptimConfig
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.model.reward_head import POOLINGS
from reinforce_rl.reward_model.head.training import DEFAULT_FOLDS, DEFAULT_L2_GRID

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
    """Made answers that the head learns to score below real ones, see `head/synthetic_negatives.py`."""

    fraction: float = 0.35


@dataclass
class HeadConfig:
    """How hidden states are pooled, and how the L2 strength is chosen."""

    pooling: str = "mean"
    l2: list[float] = field(default_factory=lambda: list(DEFAULT_L2_GRID))
    folds: int = DEFAULT_FOLDS

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
