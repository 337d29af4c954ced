"""The configuration of `examples/train_reinforce_actor.py` as dataclasses; what each key is for stands in its YAML.

`config/reading.py` builds them from what Hydra composed and validates them with `config/checks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reinforce_rl.utils.addresses import Address

DEEP = "deep"  # of `preflight`
NOT_SET = "(not set)"  # the value of a required key that is missing or wrong, which is said once: no path, no name


@dataclass
class RewardShapingConfig:
    standardisation: str = "none"
    mean: float = 0.0
    deviation: float = 1.0
    scale: float = 1.0
    clip: float | None = None
    length_penalty: float = 0.0


@dataclass
class ReinforceConfig:
    max_epochs: int = 1
    max_steps: int = -1
    val_check_interval: int = 10
    save_interval: int = 10
    gradient_clip_val: float = 1.0
    num_rollouts_per_prompt: int = 4
    initial_policy_kl_penalty: float = 0.05
    use_absolute_kl: bool = False
    kl_estimator: str = "k1"
    kl_reduction: str = "sum"
    kl_placement: str = "reward"
    kl_loss_weights: str = "prefix"
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    advantage_estimator: str = "rloo"
    baseline_window: int = 10
    baseline_decay: float = 0.9
    advantage_whitening: str = "none"
    credit_assignment: str = "sequence"
    discount_factor: float = 1.0
    loss_aggregation: str = "sequence_sum"
    entropy_bonus: float = 0.0
    reinforce_epochs: int = 1
    importance_ratio: str = "none"
    ratio_clip_low: float = 0.2
    ratio_clip_high: float = 0.2
    generator_correction: str = "none"
    generator_ratio_cap: float = 2.0
    truncated_samples: str = "keep"
    truncation_penalty: float = 0.0
    overlong_buffer: int = 0
    dynamic_filtering: bool = False
    max_resampling_rounds: int = 3
    generation_work_queue: bool = False
    generator_log_probs: bool = True
    max_failed_fraction: float = 0.1
    max_skipped_steps: int = 3
    rollout_batch_seq_length: int | None = None
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)

    @property
    def kl_estimator_used(self) -> str:
        """`kl_estimator`, or what `use_absolute_kl` stands for."""
        return "absolute_k1" if self.use_absolute_kl else self.kl_estimator


@dataclass
class TrainerConfig:
    num_nodes: int = 1
    devices: int = 1
    precision: str = "auto"  # `resolve_defaults` puts the machine's in its place
    collective_timeout_seconds: float = 1800.0
    heartbeat_timeout_seconds: float = 120.0
    straggler_factor: float = 1.5
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices


@dataclass
class RewardServerConfig:
    name: str = "reward_model"
    ip: str = "localhost"
    port: int = 5555
    replicas: list[str] = field(default_factory=list)
    token_file: str | None = None
    weight: float = 1.0
    input: str = "auto"

    @property
    def addresses(self) -> list[Address]:
        """All servers of this model; `config/checks.py` validates their form."""
        return [Address(self.ip, self.port), *map(Address.parse, self.replicas)]


@dataclass
class MoreFunctionConfig:
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass
class RewardFunctionConfig:
    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    more_functions: dict[str, MoreFunctionConfig] = field(default_factory=dict)
    num_workers: int = 2
    sample_timeout_seconds: float = 5.0
    sample_memory_mb: int = 2048
    environment: list[str] = field(default_factory=list)
    sandbox: bool = False


@dataclass
class RemoteRMConfig:
    reward_model: RewardServerConfig = field(default_factory=RewardServerConfig)
    more_reward_models: dict[str, RewardServerConfig] = field(default_factory=dict)
    pad_to_length: int | None = None
    ready_timeout_seconds: float = 60.0
    deadline_seconds: float = 600.0
    attempt_timeout_seconds: float = 60.0


@dataclass
class WandbConfig:
    project: str = "reinforce_rl"
    name: str = "reinforce"
    mode: str = "online"


@dataclass
class CheckpointConfig:
    keep_last: int = 2
    keep_best: int = 0
    best_metric: str = "val/rewards"
    best_mode: str = "max"
    async_save: bool = False
    save_hf_on_train_end: bool = True


@dataclass
class ExpManagerConfig:
    explicit_log_dir: str = "results/reinforce"
    name: str = "reinforce"
    resume_if_exists: bool = True
    max_time_per_run: str | None = None
    create_tensorboard_logger: bool = False
    create_wandb_logger: bool = False
    wandb_logger_kwargs: WandbConfig = field(default_factory=WandbConfig)
    checkpoint_callback_params: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class PretrainedConfig:
    restore_from_path: str


@dataclass
class SamplingConfig:
    use_greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    end_strings: list[str] = field(default_factory=list)


@dataclass
class LengthConfig:
    max_length: int = 128
    min_length: int = 0


@dataclass
class RolloutConfig:
    num_rollout_samples: int = 8
    rollout_micro_batch_size: int = 8
    forward_micro_batch_size: int = 4
    val_rollout_micro_batch_size: int = 32
    generation_cache_tokens: int | None = None
    lean_decoding: bool = True
    static_decoding: bool = False
    cuda_graphs: bool = False
    num_val_samples: int | None = None
    offload_adam_states: bool = False
    overlap_offload: bool = False
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    allow_biased_sampling: bool = False
    val_sampling_params: SamplingConfig = field(default_factory=lambda: SamplingConfig(use_greedy=True))
    length_params: LengthConfig = field(default_factory=LengthConfig)


@dataclass
class ScheduleConfig:
    name: str = "constant"
    warmup_steps: int = 0
    constant_steps: int = 0
    min_lr: float = 0.0


@dataclass
class OptimConfig:
    name: str = "adam"
    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    eps: float = 1e-8
    fused: bool = True
    distributed: bool | None = None
    overlap_grad_sync: bool | None = None
    in_place_gradients: bool = True
    sched: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class DataPrefixConfig:
    train: str | list[float | str]  # `data_prefix.py` says which lists mean something
    validation: str | list[str] | None = None
    test: str | list[str] | None = None


@dataclass
class DataConfig:
    data_prefix: DataPrefixConfig
    apply_chat_template: bool = False
    add_bos: bool = False
    too_long: str = "refuse"
    shuffle: bool = True


@dataclass
class LoraTuningConfig:
    adapter_dim: int = 32
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all"])


@dataclass
class PeftConfig:
    peft_scheme: str | None = None
    lora_tuning: LoraTuningConfig = field(default_factory=LoraTuningConfig)


@dataclass
class ModelConfig:
    data: DataConfig
    seed: int = 1234
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    activations_checkpoint_granularity: str | None = None
    activations_checkpoint_method: str | None = None
    activations_checkpoint_num_layers: int | None = None
    transformer_engine: bool = False
    megatron_overrides: dict[str, Any] = field(default_factory=dict)
    encoder_seq_length: int = 2048
    micro_batch_size: int = 4
    tokens_per_micro_batch: int | None = None
    logits_chunk_tokens: int | None = None
    shared_prefix: bool | None = None
    global_batch_size: int | None = None
    reference_placement: str = "host"
    peft: PeftConfig = field(default_factory=PeftConfig)
    reinforce: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def block_size(self) -> int:
        """Ranks that share one copy of the model and work on the same prompts."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens a prompt may have, so that it fits with its response."""
        return self.encoder_seq_length - self.reinforce.length_params.max_length


@dataclass
class TensorRTLLMConfig:
    mode: str = "colocated"
    tensor_parallel_size: int | None = None
    free_gpu_memory_fraction: float = 0.5
    max_batch_size: int = 256
    max_num_tokens: int = 8192
    weight_bucket_megabytes: int = 512
    start_timeout_seconds: float = 600.0
    update_timeout_seconds: float = 120.0
    request_timeout_seconds: float = 480.0


@dataclass
class TrainConfig:
    pretrained_checkpoint: PretrainedConfig
    model: ModelConfig
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    generation: str = "native"
    tensorrt_llm: TensorRTLLMConfig = field(default_factory=TensorRTLLMConfig)
    reward: str = "server"
    reward_function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    remote_rm: RemoteRMConfig = field(default_factory=RemoteRMConfig)
    exp_manager: ExpManagerConfig = field(default_factory=ExpManagerConfig)
    resume_with_changes: bool = False
    preflight: bool | str = False
    preflight_machine: str = "h100"
    preflight_response_tokens: int | None = None

    @property
    def prompts_per_update(self) -> int | None:
        """Prompts, over all ranks, of one optimizer step; None where it takes the whole rollout batch."""
        size, samples = self.model.global_batch_size, self.trainer.reinforce.num_rollouts_per_prompt
        prompts = None if size is None else size // max(samples, 1)
        return None if prompts == self.model.reinforce.num_rollout_samples else prompts

    @property
    def torch_timeout_seconds(self) -> float:
        """After so long torch itself gives up waiting for a rank.

        Longer than `collective_timeout_seconds`, by which the watch over the ranks names the culprit first; and than
        one rank may wait for the reward server while the others wait for it.
        """
        remote = self.remote_rm
        longest = max(self.trainer.collective_timeout_seconds, remote.deadline_seconds, remote.ready_timeout_seconds)
        return 60 + 1.1 * longest
