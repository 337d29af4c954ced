"""Generators with a fault that `reinforce-rl verify` must find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.checkpointer import Checkpointer
from reinforce_rl.megatron.optimizer import MOMENTS


class DependsOnBatch(NativeGenerator):
    """Its samples depend on how many prompts are generated together."""

    def __init__(self, cfg: TrainConfig, lm: Any, tokenizer: Any):
        super().__init__(lm, tokenizer)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int, watch: Any = None
    ) -> Completions:
        return super().generate(prompts, num_samples, params, seed + len(prompts), watch)


class ForgetsMoments(NativeGenerator):
    """A run with it goes on from a checkpoint without Adam's moments."""

    def __init__(self, cfg: TrainConfig, lm: Any, tokenizer: Any):
        super().__init__(lm, tokenizer)
        load = Checkpointer._load

        def load_without(checkpointer: Any, folder: Any) -> None:
            load(checkpointer, folder)
            for state in checkpointer._optimizer.optimizer.state.values():
                for name in MOMENTS:
                    torch.zero_(state[name])

        Checkpointer._load = load_without  # type: ignore[method-assign]
