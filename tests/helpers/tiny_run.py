"""The whole trainer with a tiny model, and a reward function instead of the server."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from helpers.models import tiny_llama_folder
from helpers.rewards import FunctionReward
from omegaconf import DictConfig
from torch import Tensor

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.compose import CONF_FOLDER
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.monitoring.records import Kind
from reinforce_rl.monitoring.run_folder import RunFolder
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.runtime.settings import freeze_template_date
from reinforce_rl.trainer.reinforce import ReinforceTrainer
from reinforce_rl.trainer.run import begin_files, build_monitor, build_trainer
from reinforce_rl.utils.files import write_json_lines

PROMPT_TOKENS = 3
MAX_LENGTH = 5


def odd_share(ids: list[int]) -> float:
    """Return the share of odd token ids; 0.5 for an empty response."""
    return sum(i % 2 for i in ids) / len(ids) if ids else 0.5


def odd_share_or_alike(row: list[int]) -> float:
    """Return `odd_share` of the response, or 1 if the prompt begins with t, a, o or i."""
    return 1.0 if row[0] in (6, 7, 8, 9) else odd_share(row[PROMPT_TOKENS:])


SOME_ALIKE = FunctionReward(odd_share_or_alike, 0)


def three_letters(count: int) -> list[str]:
    """Return `count` distinct prompts of `PROMPT_TOKENS` tokens."""
    letters = itertools.product("etaoinshr", repeat=PROMPT_TOKENS)
    return ["".join(reversed(text)) for text in itertools.islice(letters, count)]


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    """Write a file of prompts atomically: running programs may be reading it."""
    write_json_lines(path, [{"prompt": text} for text in texts])
    return path


def tiny_overrides(
    folder: Path, *, num_prompts: int = 8, prompts: Sequence[str] | None = None
) -> list[str]:
    """Write a model and prompts below `folder`; return the overrides of a short run."""
    model = folder / "model"
    if not model.exists():
        tiny_llama_folder(model, vocab_size=32, layers=1, hidden=16, ffn=32, max_positions=16)
    train = write_prompts(folder / "train.jsonl", prompts or three_letters(num_prompts))
    validation = write_prompts(folder / "validation.jsonl", three_letters(3))
    return [
        f"pretrained_checkpoint.restore_from_path={model}",
        f"model.data.data_prefix.train={train}",
        f"model.data.data_prefix.validation={validation}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        "exp_manager.checkpoint_callback_params.save_hf_on_train_end=false",
        "model.encoder_seq_length=16",
        f"model.reinforce.length_params.max_length={MAX_LENGTH}",
        "model.reinforce.num_rollout_samples=4",
        "model.reinforce.rollout_micro_batch_size=3",
        "model.micro_batch_size=5",
        "model.optim.lr=0.01",
        "trainer.reinforce.val_check_interval=0",
        "trainer.reinforce.initial_policy_kl_penalty=0.1",
    ]


def compose(*overrides: str, name: str = "train_reinforce_actor") -> DictConfig:
    """Compose a shipped configuration with overrides."""
    with hydra.initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        return hydra.compose(name, overrides=list(overrides))


def tiny_config(folder: Path, *overrides: str, prompts: Sequence[str] | None = None) -> TrainConfig:
    return load_config(compose(*tiny_overrides(folder, prompts=prompts), *overrides))


@contextlib.contextmanager
def tiny_trainer(
    config: TrainConfig, mesh: Mesh, rm: RewardSource | Callable[[list[int]], float] = odd_share
) -> Iterator[ReinforceTrainer]:
    """Yield the trainer of `build.train`, resumed, without server and export.

    Loggers close at the end of the block. `rm` is a reward source, or a function of a response's
    token ids.
    """
    freeze_template_date(config)
    tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
    datasets = build_datasets(config, tokenizer)
    checkpoint = latest_checkpoint(Path(config.exp_manager.explicit_log_dir) / "checkpoints")
    monitor, wandb_run_id = build_monitor(config, mesh, datasets, checkpoint)
    source: Any = rm if hasattr(rm, "infer_rm") else FunctionReward(rm, PROMPT_TOKENS)
    with monitor.running():
        trainer = build_trainer(config, mesh, tokenizer, datasets, source, monitor, checkpoint)
        trainer.wandb_run_id = wandb_run_id
        if mesh.is_main:
            begin_files(config, monitor, trainer.step)
        yield trainer


def run(
    folder: Path,
    mesh: Mesh,
    *overrides: str,
    rm: RewardSource | Callable[[list[int]], float] = odd_share,
    prompts: Sequence[str] | None = None,
) -> list[dict]:
    """Run to the end, resuming from a checkpoint below `folder`; return metrics.jsonl's lines."""
    with tiny_trainer(tiny_config(folder, *overrides, prompts=prompts), mesh, rm) as trainer:
        trainer.fit()
    return metrics_of(folder)


def train_on_ranks(
    overrides: Sequence[str], rm: RewardSource | Callable[[list[int]], float] = odd_share
) -> list[Tensor]:
    """Run to the end on several ranks and return the weights."""
    config = load_config(compose(*overrides))
    tp = config.model.tensor_model_parallel_size
    pp = config.model.pipeline_model_parallel_size
    with parallel_mesh(tp, pp) as mesh, tiny_trainer(config, mesh, rm) as trainer:
        trainer.fit()
        return weights(trainer)


def weights(trainer: ReinforceTrainer) -> list[Tensor]:
    """Copy the policy's weights."""
    return [parameter.detach().clone() for parameter in trainer.model.lm.parameters()]


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_of(folder: Path) -> list[dict]:
    return json_lines(folder / "run" / "metrics.jsonl")


def rollouts_of(folder: Path, step: int, kind: Kind = "rollouts") -> list[dict]:
    return [row.as_json() for row in RunFolder(folder / "run").samples(step, kind)]


def without_times(line: dict) -> dict:
    """Drop metrics that depend on the clock or the process."""
    of_clock = ("timers/", "timing/", "memory/", "alerts/straggler")
    values = {}
    for key, value in line.items():
        if key != "time" and not key.startswith(of_clock):
            values[key] = value
    return values


def however_cut(line: dict) -> dict:
    """Also drop metrics that depend on micro-batches and ranks."""
    return {
        key: value for key, value in without_times(line).items() if key != "train/padding_fraction"
    }


def largest_difference(left: dict, right: dict) -> float:
    """Return the largest difference of two lines with the same keys.

    It is infinite if exactly one value is null.
    """
    assert left.keys() == right.keys()
    pairs = [(left[key], right[key]) for key in left if left[key] != right[key]]
    if any(None in pair for pair in pairs):
        return math.inf
    return max((abs(value - other) for value, other in pairs), default=0.0)
