"""Schema of a run's output: folder, checkpoints, records, loggers and alerts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from reinforce_rl.config.base import Count, Natural, PathText, Section, Text, key


@dataclass(frozen=True)
class LoggerEntry:
    """A logger that ships with the package."""

    class_name: str  # dotted name of a `MetricLogger`
    package: str | None = None  # which it imports, also the name of the extra that brings it


LOGGERS = {
    "tensorboard": LoggerEntry("reinforce_rl.monitoring.backends.TensorboardLogger", "tensorboard"),
    "wandb": LoggerEntry("reinforce_rl.monitoring.backends.WandbLogger", "wandb"),
    "swanlab": LoggerEntry("reinforce_rl.monitoring.backends.SwanlabLogger", "swanlab"),
    "mlflow": LoggerEntry("reinforce_rl.monitoring.backends.MlflowLogger", "mlflow"),
}


class WandbConfig(Section):
    project: Text | None = key(
        None,
        "project in wandb and swanlab; null: WANDB_PROJECT, or SWANLAB_PROJ_NAME, else "
        "reinforce_rl",
    )
    name: Text = key("reinforce", "the run's name in them", follows="exp_manager.name")
    mode: Literal["online", "offline"] | None = key(
        None, "online or offline; null: WANDB_MODE, or SWANLAB_MODE, else online"
    )


class MlflowConfig(Section):
    experiment_name: Text | None = key(
        None,
        "MLflow's experiment; null: MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, else "
        "reinforce_rl",
    )
    tracking_uri: Text | None = key(
        None,
        "address of MLflow's server, such as http://host:5000; null: MLFLOW_TRACKING_URI, else "
        "files in explicit_log_dir/mlruns",
    )


class CheckpointConfig(Section):
    keep_last: Count = key(2, "newest checkpoints to keep")
    keep_best: Natural = key(
        0,
        "best checkpoints to keep as well; a step that is among them is saved after its validation",
        details=", whatever `save_interval` is",
    )
    best_metric: Text = key("val/rewards", "metric of validation that ranks them")
    best_mode: Literal["max", "min"] = key("max", "max or min: which values are better")
    async_save: bool = key(
        False,
        "write during training, from a copy in host memory",
        details="; see [checkpoints.md](checkpoints.md)",
    )
    save_hf_on_train_end: bool = key(
        True, "write the trained model as a Hugging Face folder, explicit_log_dir/hf"
    )


def _off(value: Any) -> Any:
    return "off" if value is False else value  # YAML's reading of off


Record = Annotated[Literal["full", "samples", "off"], BeforeValidator(_off)]


class ExpManagerConfig(Section):
    explicit_log_dir: PathText = key(
        "results/reinforce",
        "folder of the run: checkpoints, metrics, rollouts and the report",
        kind="path",
    )
    name: Text = key("reinforce", "the run's name")
    resume_if_exists: bool = key(
        True,
        "resume from the newest checkpoint in explicit_log_dir",
        details=". With false, a folder that holds metrics is refused",
    )
    max_time_per_run: Text | None = key(
        None,
        "DD:HH:MM:SS from the allocation's start, else the process's; saved by then; null: no "
        "bound",
        kind="`DD:HH:MM:SS`",
        details=(
            ". The allocation's start is `SLURM_JOB_START_TIME`. The run validates, saves and "
            "ends with exit code 75; see [operations.md](operations.md#time-limits)"
        ),
    )
    record: Record = key(
        "full",
        "full: every sample, and of each step checksums, versions and loss terms; samples; off",
        details=(
            ". `full` is what `reinforce-rl replay` needs. See [debugging.md](debugging.md#records)"
        ),
    )
    record_keep: Count = key(
        100,
        "with record=full: newest steps with full records; older ones keep their samples only",
        "steps",
    )
    record_tokens_every: Natural = key(
        1,
        "steps between those whose samples are recorded with token ids and values per token; 0 "
        "for never",
        "steps",
        details=". See [debugging.md](debugging.md#records)",
    )
    loggers: list[Text] = key(
        [],
        f"besides metrics.jsonl: {', '.join(LOGGERS)}, or a class's dotted name",
        details=(
            ", see [A logger](../CONTRIBUTING.md#a-logger). See "
            "[monitoring.md](monitoring.md#loggers)"
        ),
    )
    create_tensorboard_logger: bool = key(False, "the same as loggers=[tensorboard]")
    create_wandb_logger: bool = key(False, "the same as loggers=[wandb]")
    wandb_logger_kwargs: WandbConfig = WandbConfig()
    mlflow_logger_kwargs: MlflowConfig = MlflowConfig()
    sample_table_interval: Natural = key(
        10, "steps between tables of samples in these loggers; 0 for none", "steps"
    )
    checkpoint_callback_params: CheckpointConfig = CheckpointConfig()

    @property
    def used_loggers(self) -> list[str]:
        """Names of `LOGGERS` and of classes, each once."""
        switches = {
            "tensorboard": self.create_tensorboard_logger,
            "wandb": self.create_wandb_logger,
        }
        return list(
            dict.fromkeys([*self.loggers, *(name for name, is_on in switches.items() if is_on)])
        )


Action = Annotated[Literal["warn", "stop", "off"], BeforeValidator(_off)]


class RulesConfig(Section):
    not_finite: Action = key("warn", "the loss or the mean reward is not finite")
    skipped: Action = key(
        "warn", "an optimizer step was skipped because its gradient was not finite"
    )
    unscored: Action = key("warn", "samples have no score")
    unscored_length: Action = key(
        "warn", "long samples fail to be scored more often than short ones"
    )
    constant_reward: Action = key("warn", "all samples have the same reward, or nearly")
    zero_reward_std: Action = key("warn", "in nearly all groups all rewards are equal")
    solved: Action = key("warn", "as zero_reward_std, at a reward far above the first one")
    zero_gradient: Action = key("warn", "the gradient is zero")
    reward_jump: Action = key(
        "warn", "level or spread of the rewards jumps from one step to the next"
    )
    kl: Action = key("warn", "the KL grows far above its past values")
    entropy: Action = key("warn", "the entropy has collapsed, or doubled")
    truncated: Action = key("warn", "most responses are cut at max_length, or a growing share")
    turns: Action = key("warn", "episodes have come down to one answer")
    length: Action = key("warn", "responses grow along with the reward")
    repetition: Action = key("warn", "responses repeat themselves more and more")
    generator_logprob_diff: Action = key(
        "warn", "log-probs of trainer and generator differ, or diverge over time"
    )
    gradient_spikes: Action = key("warn", "the gradient's norm jumps repeatedly")
    overfitting: Action = key("warn", "the validation reward falls while the training reward rises")
    prompts_repeated: Action = key(
        "warn", "a training prompt occurs twice in the data, or in validation"
    )
    straggler: Action = key("warn", "a rank is slow, by trainer.straggler_factor")


class AlertsConfig(Section):
    rules: RulesConfig = key(
        RulesConfig(),
        "warn: log it once; stop: also save, and end with exit code 78; off. See "
        "docs/monitoring.md",
    )
