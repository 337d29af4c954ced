"""Whole runs of the trainer in bf16 on a random model, with a reward function, on this machine."""

from __future__ import annotations

import gc
import json
import math
import random
import string
from collections.abc import Sequence
from typing import Any

import torch
from helpers.tiny_tokenizer import write_tiny_tokenizer

from gpu_checks.base import FAKE, Context
from gpu_checks.measure import free
from gpu_checks.plain_side import transformers_model
from gpu_checks.shapes import SHAPES
from reinforce_rl.config.compose import compose
from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.trainer.run import train

OF_CLOCK = ("time", "timers/", "timing/", "memory/")  # of metrics.jsonl
# On fake tensors each operator takes as long as on real ones of any size, and more sequences teach
# nothing.
FEW_SEQUENCES = (
    "trainer.reinforce.num_rollouts_per_prompt=2",
    "model.reinforce.num_rollout_samples=4",
    "model.reinforce.rollout_micro_batch_size=4",
)
MUST_BE_FINITE = ("train/actor_loss", "train/grad_norm", "train/rewards")
Line = dict[str, Any]  # of metrics.jsonl


class Runs:
    """Runs on one model and the same prompts, below a check's folder.

    Args:
        context: of the check.
        shape: of `SHAPES`.
        prompt_tokens, response_tokens: at most.
    """

    def __init__(self, context: Context, shape: str, prompt_tokens: int, response_tokens: int):
        self._context = context
        self._prompt_tokens = prompt_tokens
        self._response_tokens = response_tokens
        cpu = torch.device("cpu")
        arch = Architecture.from_hf(SHAPES[shape])
        transformers_model(arch, torch.float32, cpu, cpu).save_pretrained(context.folder / "model")
        write_tiny_tokenizer(context.folder / "model", vocab_size=arch.vocab_size)
        draw = random.Random(0)
        texts = [
            "".join(draw.choices(string.ascii_lowercase, k=prompt_tokens - n % 5))
            for n in range(32)
        ]
        lines = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        (context.folder / "prompts.jsonl").write_text(lines, encoding="utf-8")

    def words(
        self, name: str, steps: int, extra: Sequence[str] = (), *, saves: bool = False
    ) -> list[str]:
        """The command line of a run; with `saves` there is a checkpoint after each step."""
        # The share of characters: tokens of a random model are names of some 12, so that every
        # sample earns another.
        characters = 16 * self._response_tokens
        overrides = [
            f"pretrained_checkpoint.restore_from_path={self._context.folder / 'model'}",
            f"model.data.data_prefix.train={self._context.folder / 'prompts.jsonl'}",
            f"exp_manager.explicit_log_dir={self._context.folder / name}",
            "exp_manager.checkpoint_callback_params.save_hf_on_train_end=false",
            f"trainer.reinforce.max_steps={steps}",
            "trainer.reinforce.max_epochs=1000",
            "trainer.reinforce.val_check_interval=0",
            f"trainer.reinforce.save_interval={int(saves)}",
            "trainer.precision=bf16",
            f"model.encoder_seq_length={self._prompt_tokens + self._response_tokens}",
            f"model.reinforce.length_params.max_length={self._response_tokens}",
            "model.optim.lr=1e-3",
            "reward=function",
            "reward_function.name=reinforce_rl.rewards.functions.length",
            f"+reward_function.kwargs.target={characters}",
            f"+reward_function.kwargs.tolerance={characters}",
            "+reward_function.kwargs.unit=characters",
        ]
        if self._context.mode == FAKE:
            overrides += FEW_SEQUENCES
        return [*overrides, *extra]

    def run(
        self, name: str, steps: int, extra: Sequence[str] = (), *, saves: bool = False
    ) -> list[Line]:
        """A whole run in this process, going on from its checkpoint; its metrics."""
        try:
            train(
                load_config(
                    compose("train_reinforce_actor", self.words(name, steps, extra, saves=saves))
                )
            )
        finally:
            gc.collect()
            free(torch.device(self._context.device))
        return [
            json.loads(line)
            for line in (self._context.folder / name / "metrics.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]


def largest_difference(left: Line, right: Line) -> tuple[float, str]:
    """Return the largest relative difference of two lines' numbers, and its name.

    It is infinite if their keys differ.
    """
    worst = (0.0, "")
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name) and not name.startswith(OF_CLOCK):
            left_value = _number(left.get(name))
            right_value = _number(right.get(name))
            difference = abs(left_value - right_value) / max(1.0, abs(left_value))
            worst = max(worst, (difference if math.isfinite(difference) else math.inf, name))
    return worst


def not_finite(lines: Sequence[Line]) -> list[str]:
    """Numbers that are missing, NaN or infinite where a right run has none such."""
    pairs = [(line, name) for line in lines for name in MUST_BE_FINITE]
    return [
        f"{name} at step {line['step']}"
        for line, name in pairs
        if not math.isfinite(_number(line.get(name)))
    ]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan
