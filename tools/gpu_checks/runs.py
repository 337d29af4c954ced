"""Whole runs of the trainer on a random model, with a reward function and nothing but this machine."""

from __future__ import annotations

import json
import math
import random
import string
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_tokenizer import write_tiny_tokenizer
from one_gpu.plain import transformers_model
from one_gpu.shapes import SHAPES

from reinforce_rl.megatron.architecture import Architecture

# Of metrics.jsonl: what depends on the clock and on the process.
OF_CLOCK = ("time", "timers/", "timing/", "memory/")


def write_inputs(folder: Path, shape: str, prompt_tokens: int, prompts: int = 32) -> None:
    """A random model in fp32 with a tokenizer of characters, and prompts of about so many tokens."""
    cpu = torch.device("cpu")
    model = transformers_model(Architecture.from_hf(SHAPES[shape]), torch.float32, cpu, cpu)
    model.save_pretrained(folder / "model")
    write_tiny_tokenizer(folder / "model", vocab_size=SHAPES[shape]["vocab_size"])
    draw = random.Random(0)
    texts = ["".join(draw.choices(string.ascii_lowercase, k=prompt_tokens - n % 5)) for n in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def overrides(inputs: Path, out: Path, steps: int, prompt_tokens: int, response_tokens: int) -> list[str]:
    """The command line of a run.

    Args:
        inputs: of `write_inputs`.
        out: of the run.
        steps: of the optimizer, a checkpoint after each.
    """
    return [
        f"pretrained_checkpoint.restore_from_path={inputs / 'model'}",
        f"model.data.data_prefix.train={inputs / 'prompts.jsonl'}",
        f"exp_manager.explicit_log_dir={out}",
        "exp_manager.checkpoint_callback_params.save_hf_on_train_end=false",
        f"trainer.reinforce.max_steps={steps}",
        "trainer.reinforce.max_epochs=1000",
        "trainer.reinforce.val_check_interval=0",
        "trainer.precision=bf16",
        f"model.encoder_seq_length={prompt_tokens + response_tokens}",
        f"model.reinforce.length_params.max_length={response_tokens}",
        "model.optim.lr=1e-3",
        "reward=function",
        "reward_function.name=reinforce_rl.reward.functions.length",
        "+reward_function.kwargs.target=250",
        "+reward_function.kwargs.tolerance=250",
        "+reward_function.kwargs.unit=characters",
    ]


def run(words: list[str]) -> list[dict[str, Any]]:
    """A whole run in this process, going on from its checkpoint; the lines of its metrics."""
    from reinforce_rl.build import train
    from reinforce_rl.cli import compose
    from reinforce_rl.config_reading import load_config

    config = load_config(compose("train_reinforce_actor", words))
    train(config)
    return metrics(Path(config.exp_manager.explicit_log_dir))


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> tuple[float, str]:
    """Of two lines' numbers, relative above 1, and its name; infinite where one has a number that the other lacks."""
    worst = (0.0, "")
    for name in sorted(left.keys() | right.keys()):
        if name.startswith(OF_CLOCK) or left.get(name) == right.get(name):
            continue
        pair = left.get(name), right.get(name)
        if all(isinstance(value, (int, float)) for value in pair):
            difference = abs(pair[0] - pair[1]) / max(1.0, abs(pair[0]))  # type: ignore[operator]
            worst = max(worst, (difference if math.isfinite(difference) else math.inf, name))
        else:
            worst = max(worst, (math.inf, name))
    return worst


def not_finite(lines: list[dict[str, Any]]) -> list[str]:
    """Names of numbers that are null, NaN or infinite where a right run has none."""
    names = ("train/actor_loss", "train/grad_norm", "train/rewards")
    return [f"{name} at step {line.get('step')}" for line in lines for name in names if not _is_finite(line.get(name))]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
