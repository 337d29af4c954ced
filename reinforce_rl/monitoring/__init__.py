"""Seeing a run: loggers, samples of each step, the live display and the report."""

from reinforce_rl.monitoring.base import Loggers, MetricLogger
from reinforce_rl.monitoring.comparison import PairedComparison, compare_validation
from reinforce_rl.monitoring.jsonl import JsonlLogger, read_metrics
from reinforce_rl.monitoring.progress import TrainingProgress
from reinforce_rl.monitoring.rollouts import RolloutRow, RolloutWriter, read_rollouts, rollout_files
from reinforce_rl.monitoring.summary import run_summary
from reinforce_rl.monitoring.tensorboard_logger import TensorboardLogger
from reinforce_rl.monitoring.wandb_logger import WandbLogger

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
