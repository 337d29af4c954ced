"""Loggers, rollout samples, live display and report of a run."""

from reinforce_rl.monitoring.loggers import (
    JsonlLogger,
    Loggers,
    MetricLogger,
    TensorboardLogger,
    WandbLogger,
    read_metrics,
)
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.rollouts import RolloutRow, RolloutWriter, read_rollouts, rollout_files
from reinforce_rl.monitoring.summary import PairedComparison, compare_validation, run_summary

__all__ = [
    "JsonlLogger",
    "Loggers",
    "MetricLogger",
    "PairedComparison",
    "RolloutRow",
    "RolloutWriter",
    "TensorboardLogger",
    "TrainingProgress",
    "WandbLogger",
    "compare_validation",
    "read_metrics",
    "read_rollouts",
    "rollout_files",
    "run_summary",
]
