"""Schema of `reinforce-rl train`; `rules.py` has the rules across its keys."""

from __future__ import annotations

from typing import Annotated, Literal

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.algorithm.kl import KL_ESTIMATORS
from reinforce_rl.config.base import (
    DEEP,
    HOST,
    NOT_SET,
    Count,
    Host,
    NameIn,
    Natural,
    NonNegative,
    PathText,
    Positive,
    Precision,
    Section,
    Steps,
    Text,
    key,
)
from reinforce_rl.config.engines import EngineConfig, TensorRTLLMConfig, VLLMConfig
from reinforce_rl.config.environment import EnvironmentConfig
from reinforce_rl.config.model import ModelConfig
from reinforce_rl.config.monitoring import AlertsConfig, ExpManagerConfig
from reinforce_rl.config.rewards import (
    MoreFunctionConfig,
    RemoteRMConfig,
    RewardFunctionConfig,
    RewardServerConfig,
    RewardTerm,
    name_in_metrics,
)

REWARDS = ("server", "function", "environment")  # values of `reward` that do not name a class


class RewardShapingConfig(Section):
    standardization: Literal["none", "given", "running"] = key(
        "none", "given: (r - mean) / std; running: with mean and std of past steps"
    )
    mean: float = key(0.0, "of given")
    std: Positive = key(1.0, "of given")
    scale: Positive = key(1.0, "multiplies the standardised reward")
    clip: Positive | None = key(None, "then keeps it within -clip .. clip; null for no bound")
    length_penalty: NonNegative = key(
        0.0, "then subtracted for each response token", "reward per token"
    )


class ReinforceConfig(Section):
    max_epochs: Count = key(1, "passes over the training prompts", "epochs")
    max_steps: Steps = key(
        -1,
        "rollout batches in total, resumed runs included; -1 for all of max_epochs",
        "steps",
        expected="at least 1, or -1 for all of max_epochs",
    )
    val_check_interval: Natural = key(
        10,
        "steps between validations, with one before the first and one after the last; 0 for never",
        "steps",
    )
    save_interval: Natural = key(
        10,
        "steps between checkpoints, with one after the last; 0 for the last only",
        "steps",
        follows="trainer.reinforce.val_check_interval",
    )
    gradient_clip_val: NonNegative = key(1.0, "bound on the gradient's norm; 0 for none")
    num_rollouts_per_prompt: Count = key(
        4, "samples of each prompt (G); at least 2 for estimators that compare samples", "samples"
    )

    initial_policy_kl_penalty: NonNegative = key(
        0.05,
        "beta: cost of a nat of KL in reward; 0 skips the reference",
        "reward per nat",
        heading="KL from the initial policy. See docs/algorithms.md for what is biased.",
    )
    use_absolute_kl: bool = key(False, "NeMo-Aligner's name for kl_estimator=absolute_k1; biased")
    kl_estimator: Annotated[str, NameIn(KL_ESTIMATORS)] = key(
        "k1",
        f"{', '.join(KL_ESTIMATORS)}; k1 alone is exact in the reward",
        details=". See [algorithms.md](algorithms.md#kl)",
    )
    kl_reduction: Literal["sum", "mean"] = key(
        "sum", "over a response's tokens: sum, or mean as in NeMo-Aligner, which is biased"
    )
    kl_placement: Literal["reward", "advantage", "loss"] = key(
        "reward", "reward (before the baseline), advantage (after it) or loss"
    )
    kl_loss_weights: Literal["prefix", "token", "none"] = key(
        "prefix",
        "of kl_placement=loss: prefix (exact for k1, k3), token or none (GRPO), which are biased",
    )
    kl_target: Positive | None = key(
        None, "target KL of a response, to which beta adapts; null keeps beta constant", "nats"
    )
    kl_horizon: Positive = key(
        1e4, "responses after which an error of 20 % or more changes beta by 20 %", "responses"
    )

    advantage_estimator: Annotated[str, NameIn(ADVANTAGE_ESTIMATORS)] = key(
        "rloo",
        ", ".join(ADVANTAGE_ESTIMATORS),
        heading="Baseline and credit",
        details="; see [algorithms.md](algorithms.md#baselines-and-advantages)",
    )
    baseline_window: Count = key(10, "steps that moving_average averages over", "steps")
    baseline_decay: float = key(
        0.9,
        "weight of a reward in exponential_moving_average, relative to the next step's",
        gt=0,
        lt=1,
        expected="above 0 and below 1; running_mean never forgets",
    )
    advantage_whitening: Literal["none", "sequence", "token"] = key(
        "none",
        "none, or mean 0 and std 1 over the batch's responses (sequence) or tokens (token)",
    )
    credit_assignment: Literal["sequence", "token", "turn"] = key(
        "sequence",
        "sequence: the response is one action; token: return-to-go of each token; turn: "
        "return-to-go of each answer of an episode",
    )
    discount_factor: float = key(
        1.0, "gamma a token, with credit_assignment=token; below 1 is biased", gt=0, le=1
    )

    loss_aggregation: Literal["sequence_sum", "sequence_mean", "token_mean", "fixed_length"] = key(
        "sequence_sum",
        "tokens summed, sequences averaged; or sequence_mean (GRPO), token_mean (DAPO), "
        "fixed_length (Dr. GRPO)",
        heading="Loss",
        details=". See [algorithms.md](algorithms.md#loss)",
    )
    entropy_bonus: NonNegative = key(
        0.0, "reward for the entropy of each token's distribution", "reward per nat"
    )

    reinforce_epochs: Count = key(
        1,
        "optimizer passes over a rollout batch",
        "epochs",
        heading="Off-policy: several passes or mini-batches, or model.global_batch_size below a "
        "step's sequences, need a ratio",
    )
    mini_batches: Count = key(
        1,
        "optimizer steps of each pass, each on its share of the step's prompts",
        "optimizer steps",
        details=(
            ". A preset can set it, since it does not depend on the batch's size, as "
            "`model.global_batch_size` does"
        ),
    )
    importance_ratio: Literal["none", "token", "sequence", "sequence_geometric"] = key(
        "none", "none, token (PPO), sequence (TRL's RLOO) or sequence_geometric (GSPO)"
    )
    ratio_clip_low: float = key(
        0.2,
        "the ratio is clipped at 1 - this",
        ge=0,
        le=1,
        expected="at least 0 and at most 1: no ratio is negative",
    )
    ratio_clip_high: NonNegative = key(0.2, "and at 1 + this")
    generator_correction: (
        Literal["none", "token", "sequence", "token_mask", "sequence_mask"] | None
    ) = key(
        None,
        "importance weights against the generator's log-probs: none; truncated: token, sequence; "
        "masked: *_mask; null: sequence with rollouts of older weights (max_staleness), else none",
    )
    generator_ratio_cap: Positive = key(
        2.0, "largest of these weights; masked are those beyond it or 1 / it"
    )

    truncated_samples: Literal["keep", "drop", "mask", "penalize"] = key(
        "keep",
        "responses cut at max_length: keep (train), drop (out of loss and baseline), mask (out of "
        "the loss), penalize (train, with truncation_penalty)",
        heading="Which samples count",
    )
    truncation_penalty: NonNegative = key(
        0.0, "subtracted from the reward, with truncated_samples=penalize", "reward"
    )
    overlong_buffer: Natural = key(
        0,
        "tokens before max_length over which that penalty grows from 0 (DAPO); 0: at the cut only",
        "tokens",
    )
    dynamic_filtering: bool = key(
        False, "drop prompts whose samples all have the same reward, and draw others (DAPO)"
    )
    max_resampling_rounds: Natural = key(
        3, "rollout batches that a step may draw besides the first"
    )
    generation_work_queue: bool = key(
        False,
        "idle data-parallel ranks take over the remaining micro-batches of others; results do not "
        "change",
        details=(
            ". Needs more than one micro-batch a rank "
            "(`model.reinforce.rollout_micro_batch_size`); see "
            "[parallelism.md](parallelism.md#work-queue)"
        ),
    )
    generator_log_probs: bool = key(
        True,
        "compute the KL from the native generator's log-probs, which saves a pass",
        details=(
            ". Without effect with an engine, in bf16, and where a rollout batch takes several "
            "optimizer steps: there the trainer computes its own"
        ),
    )
    max_failed_fraction: float = key(
        0.1,
        "largest share of samples without a score in a step, a validation or the test set; above "
        "it the run saves and ends",
        "share",
        ge=0,
        le=1,
        expected="a share, 0 to 1",
    )
    max_skipped_steps: Count = key(
        3,
        "optimizer steps in a row without a finite gradient; then the run ends with exit code 77",
        "optimizer steps",
    )
    rollout_batch_seq_length: Count | None = key(
        None,
        "pad each sequence to this length in log-prob passes and updates, so that all passes have "
        "one shape; null pads to the longest of a micro-batch",
        "tokens",
        details=". Longer ones are not cut, and results do not change",
    )

    reward_shaping: RewardShapingConfig = key(RewardShapingConfig(), "in this order")

    @property
    def uses_reference(self) -> bool:
        """Whether the initial policy is kept, since a KL from it is taken."""
        return self.initial_policy_kl_penalty > 0

    @property
    def has_token_advantages(self) -> bool:
        """Whether the advantages of a response's tokens may differ."""
        return self.credit_assignment != "sequence"

    def takes_several_updates(self, prompts_per_update: int | None) -> bool:
        """Whether a rollout batch takes several optimizer steps, all but the first with a ratio.

        `prompts_per_update` is None where a step takes the whole rollout batch.
        """
        return self.reinforce_epochs > 1 or prompts_per_update is not None

    @property
    def kl_estimator_used(self) -> str:
        return "absolute_k1" if self.use_absolute_kl else self.kl_estimator


class RanksConfig(Section):
    """Ranks and numbers, of the actor and of a reward model that is trained."""

    num_nodes: Count = key(1, "nodes; above 1 start it by torchrun")
    devices: Count = key(
        1, "ranks on each node; above 1, a plain python starts them itself", "ranks"
    )
    precision: Precision = key(
        "auto",
        "32, bf16 (keeps fp32 main weights and gradients), or auto: bf16 on GPUs, else 32",
        details=". See [parallelism.md](parallelism.md#bf16)",
    )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices

    @property
    def implies_gpus(self) -> bool:
        """Whether a plan of this run is one of GPUs, wherever it is made."""
        return self.precision == "bf16"


class ProfileConfig(Section):
    steps: list[int] = key(
        [],
        "steps to profile, such as [3,4]",
        details="; see [debugging.md](debugging.md#profiling)",
    )
    ranks: list[int] | None = key(None, "ranks to profile; null: all")
    tool: Literal["torch", "nsys"] = key(
        "torch",
        "torch: traces and top operations in explicit_log_dir/profile; nsys: NVTX ranges, for nsys",
    )
    shapes: bool = key(False, "record the shapes of the operations' inputs")
    stacks: bool = key(False, "record the Python lines that called them; several times larger")
    memory: bool = key(False, "record allocations on CUDA, as a snapshot")


class TrainerConfig(RanksConfig):
    collective_timeout_seconds: Positive = key(
        1800.0,
        "abort after this long without progress on any rank; the error names the rank that hangs",
        "s",
        details=". See [operations.md](operations.md#a-rank-that-dies-or-hangs)",
    )
    heartbeat_timeout_seconds: Positive = key(
        120.0,
        "abort if a rank sends no heartbeat for this long",
        "s",
        details=": a machine down, a process stopped",
    )
    straggler_factor: float = key(
        1.5,
        "log a rank that takes this many times the median of a phase",
        ge=1,
        details=". See [operations.md](operations.md#stragglers)",
    )
    profile: ProfileConfig = ProfileConfig()
    reinforce: ReinforceConfig = ReinforceConfig()


class PretrainedConfig(Section):
    restore_from_path: PathText = key(
        NOT_SET,
        "local Hugging Face folder: the policy at the start, and the reference",
        kind="path",
    )


# Settings of disaggregated generation, with their values in a colocated run.
COLOCATED = {
    "placement": "colocated",
    "generation_ranks": 0,
    "generation_tensor_parallel_size": 1,
    "rollout_order": "prompts",
    "max_staleness": None,
    "inflight_updates": "none",
}


class TrainConfig(Section):
    trainer: TrainerConfig = TrainerConfig()
    generation: Text = key(
        "native",
        "native: on the actor's own weights; vllm; tensorrt_llm; or a class's dotted name "
        "(CONTRIBUTING.md)",
        details=", see [A generator](../CONTRIBUTING.md#a-generator)",
    )
    placement: Literal["colocated", "disaggregated"] = key(
        "colocated",
        "where responses are generated: colocated, on the ranks that train; disaggregated, on "
        "ranks of their own",
        details="; see [generation.md](generation.md#disaggregated-generation)",
    )
    generation_ranks: Natural = key(
        0,
        "of placement=disaggregated: the last ranks of the job generate, which fail with it; 0: "
        "generators register instead, each started by `reinforce-rl generate`, and may join or "
        "leave mid-run",
        "ranks",
    )
    generation_tensor_parallel_size: Count = key(
        1, "of placement=disaggregated: ranks that share each weight matrix of a generator", "ranks"
    )
    generator_host: Host | None = key(
        None,
        "of placement=disaggregated: the trainers' address, as generators reach it; null: as "
        "torchrun's, or loopback",
        expected=HOST,
    )
    generator_timeout_seconds: Positive = key(
        600.0,
        "of placement=disaggregated without generation_ranks: how long trainers wait while no "
        "generator is registered, and a generator for the trainers",
        "s",
    )
    max_staleness: Natural | None = key(
        None,
        "largest age in steps of the weights that generate rollouts; null: 1 with "
        "placement=disaggregated, else 0",
        "steps",
        details=". 0 gives the numbers of placement=colocated, bit for bit",
    )
    rollout_order: Literal["prompts", "finished"] = key(
        "prompts",
        "of placement=disaggregated, which rollouts a step takes: those of the next prompts, which "
        "is reproducible, or those finished first",
        details="; see [generation.md](generation.md#rollout-order)",
    )
    inflight_updates: Literal["none", "recompute", "keep"] = key(
        "none",
        "of rollout_order=finished: whether unfinished responses continue with new weights; the KV "
        "cache of their tokens is then recomputed (recompute) or kept (keep)",
        details="; see [generation.md](generation.md#rollout-order)",
    )
    engine: EngineConfig = key(
        EngineConfig(), "of generation=vllm and tensorrt_llm; see docs/generation.md"
    )
    vllm: VLLMConfig = key(VLLMConfig(), "of generation=vllm")
    tensorrt_llm: TensorRTLLMConfig = key(
        TensorRTLLMConfig(), "of generation=tensorrt_llm; see docs/generation.md"
    )
    reward: Text = key(
        "server",
        "server: remote_rm.reward_model; function: reward_function, in processes of the trainer; "
        "environment: what the environment gives; or a class's dotted name",
        details=", see [A reward source](../CONTRIBUTING.md#a-reward-source)",
    )
    reward_function: RewardFunctionConfig = key(RewardFunctionConfig(), "see docs/rewards.md")
    remote_rm: RemoteRMConfig = RemoteRMConfig()
    environment: EnvironmentConfig = key(
        EnvironmentConfig(), "episodes of several turns; see docs/environments.md"
    )
    exp_manager: ExpManagerConfig = ExpManagerConfig()
    alerts: AlertsConfig = AlertsConfig()
    pretrained_checkpoint: PretrainedConfig = PretrainedConfig()
    model: ModelConfig = ModelConfig()
    resume_with_changes: bool = key(
        False,
        "resume even if algorithm, samples a prompt, KL, data or model have changed",
        details="; see [operations.md](operations.md#resuming)",
    )
    preflight: bool | Literal["deep"] = key(
        False,
        "true: print the plan and all errors, and start nothing; deep: also run ranks on fake "
        "GPUs, for the memory and a lower bound of the time of a step",
        expected=f"true, false or {DEEP}",
        details="; see [parallelism.md](parallelism.md#preflight)",
    )
    preflight_machine: Text = key(
        "h100",
        "of preflight=deep: h100, h200, a100, or a YAML file with a machine's rates",
        details="; see [parallelism.md](parallelism.md#deep-preflight)",
    )
    preflight_response_tokens: Count | None = key(
        None, "of preflight=deep: mean length of a response; null: max_length", "tokens"
    )

    @property
    def uses_reference(self) -> bool:
        return self.trainer.reinforce.uses_reference

    @property
    def takes_several_updates(self) -> bool:
        return self.trainer.reinforce.takes_several_updates(self.prompts_per_update)

    @property
    def has_environment(self) -> bool:
        """Whether an environment answers the policy, so that a response has several turns."""
        return self.environment.name is not None

    @property
    def max_response_tokens(self) -> int:
        """Longest response, with what an environment writes between the policy's answers."""
        if self.has_environment:
            return self.environment.max_episode_tokens
        return self.model.reinforce.length_params.max_length

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for the longest response."""
        return self.model.encoder_seq_length - self.max_response_tokens

    @property
    def training_ranks(self) -> int:
        """Ranks that hold the optimizer; the job's others generate."""
        return self.trainer.world_size - self.generation_ranks

    @property
    def uses_external_generators(self) -> bool:
        """Whether generators are other programs, which register, and no ranks of this job."""
        return self.placement == "disaggregated" and self.generation_ranks == 0

    @property
    def staleness(self) -> int:
        """`max_staleness`, resolved."""
        if self.max_staleness is not None:
            return self.max_staleness
        return 1 if self.placement == "disaggregated" else 0

    @property
    def is_off_policy(self) -> bool:
        """Whether a step may train on samples of older weights than its own."""
        return self.staleness > 0

    @property
    def reward_class(self) -> str | None:
        """Dotted name of the class that `reward` names; None where it names no class."""
        return None if self.reward in REWARDS else self.reward

    @property
    def takes_environment_rewards(self) -> bool:
        """Whether the environment's rewards are the reward, or a term of it."""
        return self.reward == "environment"

    @property
    def reward_servers(self) -> dict[str, RewardServerConfig]:
        """Sections of the reward servers that are asked, by their dotted names."""
        return self.remote_rm.servers(with_reward_model=self.reward == "server")

    @property
    def reward_functions(self) -> dict[str, RewardFunctionConfig | MoreFunctionConfig]:
        """Sections of the reward functions that are called, by their dotted names."""
        return self.reward_function.functions(with_own=self.reward == "function")

    @property
    def uses_reward_model(self) -> bool:
        """Whether the server of `remote_rm.reward_model` is asked."""
        return "remote_rm.reward_model" in self.reward_servers

    @property
    def reward_terms(self) -> list[RewardTerm]:
        """All that is asked for rewards, in the order in which it is logged."""
        terms: list[RewardTerm] = []
        if self.reward_class is not None:
            class_name = self.reward_class.rpartition(".")[2]
            terms.append(RewardTerm("reward", class_name, 1.0))
        if self.takes_environment_rewards:
            terms.append(RewardTerm("environment", "environment", 1.0))
        for setting, section in {**self.reward_functions, **self.reward_servers}.items():
            name = name_in_metrics(setting, section)
            terms.append(RewardTerm(setting, name, section.weight))
        return terms

    @property
    def logs_reward_terms(self) -> bool:
        """Whether terms are logged; the scores of a single source of weight 1 are the reward."""
        terms = self.reward_terms
        return len(terms) > 1 or terms[0].weight != 1.0

    @property
    def prompts_under_way(self) -> int | None:
        """Prompts that a generator answers at a time and gives back one by one; None: in order."""
        if self.rollout_order != "finished":
            return None
        return self.model.reinforce.rollout_micro_batch_size

    @property
    def cache_after_update(self) -> Literal["recompute", "keep"] | None:
        """What becomes of the cache; None if new weights wait until no response is under way."""
        return None if self.inflight_updates == "none" else self.inflight_updates

    def colocated(self) -> TrainConfig:
        """Return a copy in which the ranks that train generate, too; the others are gone."""
        cfg = self.model_copy(deep=True, update=COLOCATED)
        if self.placement == "disaggregated":
            cfg.trainer.devices = self.training_ranks
            cfg.trainer.num_nodes = 1
        return cfg

    @property
    def prompts_per_update(self) -> int | None:
        """Prompts per optimizer step over all ranks; None for the whole rollout batch."""
        mini_batches = self.trainer.reinforce.mini_batches
        if mini_batches > 1:
            return max(self.model.reinforce.num_rollout_samples // mini_batches, 1)
        size = self.model.global_batch_size
        samples = self.trainer.reinforce.num_rollouts_per_prompt
        prompts = None if size is None else size // max(samples, 1)
        return None if prompts == self.model.reinforce.num_rollout_samples else prompts

    @property
    def torch_timeout_seconds(self) -> float:
        """Timeout of torch's collectives.

        Exceeds `collective_timeout_seconds`, so that the watchdog names the culprit first, and the
        time that ranks may wait for one rank's call to the reward server.
        """
        remote = self.remote_rm
        longest = max(
            self.trainer.collective_timeout_seconds,
            remote.deadline_seconds,
            remote.ready_timeout_seconds,
        )
        return 60 + 1.1 * longest
