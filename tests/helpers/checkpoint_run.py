"""State to checkpoint for any model folder, without the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.policies import megatron_model
from torch import Tensor

from reinforce_rl.config.model import OptimConfig, ScheduleConfig
from reinforce_rl.megatron.checkpointer import Checkpointer
from reinforce_rl.megatron.lora import add_lora
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.model import DEFAULT_OPTIONS
from reinforce_rl.megatron.model.sequences import PaddedSequences
from reinforce_rl.megatron.optimizer import (
    ActorOptimizer,
    build_optimizer,
    wrap_data_parallel,
)
from reinforce_rl.megatron.schedule import accumulate_gradients

OPTIM = OptimConfig(
    lr=1e-2,
    weight_decay=0.1,
    betas=[0.9, 0.95],
    sched=ScheduleConfig(name="linear", warmup_steps=2, min_lr=1e-4),
)


class Run:
    """A model, its optimizer and its checkpointer."""

    def __init__(
        self,
        mesh: Mesh,
        model_folder: Path,
        folder: Path,
        optim: OptimConfig = OPTIM,
        *,
        total_steps: int = 10,
        **options: Any,
    ):
        self.mesh = mesh
        self.lm = megatron_model(
            model_folder,
            mesh,
            options.pop("dtype", torch.float32),
            options.pop("model", DEFAULT_OPTIONS),
        )
        updates = options.pop("updates", None)
        if updates is not None:
            add_lora(self.lm, updates)
        self.ddp = wrap_data_parallel(self.lm, optim)
        parts = build_optimizer(self.ddp, optim, clip_grad=1.0, total_steps=total_steps)
        self.optimizer = ActorOptimizer(*parts)
        self.inner: Any = parts[0].optimizer  # type: ignore[attr-defined]
        self.checkpointer = Checkpointer(folder, mesh, self.ddp, *parts, **options)

    def train(self, steps: int) -> list[float]:
        """Train on data from torch's generator, so random state matters; return gradient norms."""
        return [self.step(torch.randint(4, 64, (2, 12)))[1] for _ in range(steps)]

    def train_on(self, first: int, count: int) -> list[float]:
        """Train on data that does not depend on the layout; return losses."""
        losses = []
        for number in range(first, first + count):
            tokens = torch.randint(4, 61, (4, 12), generator=torch.Generator().manual_seed(number))
            local_tokens = tokens.chunk(self.mesh.dp_size)[self.mesh.dp_rank]
            losses.append(sum(self.mesh.gather_over_dp(self.step(local_tokens)[0])))
        return losses

    def step(self, sequences: Tensor) -> tuple[float, float]:
        """Train on [n, 12] tokens; return this rank's loss before the step and the norm."""
        pairs = len(sequences) // 2
        prompt_lengths = torch.tensor([5, 3]).repeat(pairs)
        response_lengths = torch.tensor([7, 6]).repeat(pairs)

        def hidden_of(model: Any, layout: PaddedSequences) -> Tensor:
            return layout.hidden(model)

        def loss_of(hidden: Tensor, layout: PaddedSequences) -> tuple[Tensor, float]:
            scores = response_scores(
                layout, hidden, self.lm, temperature=1.0, width=7, chunk_tokens=4
            )
            loss = -scores.log_probs.sum()
            return loss, loss.item()

        layouts = [PaddedSequences(self.lm, sequences, prompt_lengths, response_lengths)]
        losses = accumulate_gradients(
            self.ddp, layouts, hidden_of, loss_of, lambda layout: layout.stage_shape
        )
        (loss,) = self.mesh.from_last_stage(losses)
        return loss, self.optimizer.step().grad_norm

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's weights and their main copies."""
        named = dict(self.lm.named_parameters())
        mains = (p for group in self.inner.param_groups for p in group["params"])
        named |= {f"main {number}": main for number, main in enumerate(mains)}
        return {name: p.detach().clone() for name, p in named.items()}
