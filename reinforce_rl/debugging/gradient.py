"""The gradient of a stored step's loss, on a checkpoint of the run, by the actor's own update on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from reinforce_rl.actor.policy import LossShare, MegatronGPTReinforceActorModel
from reinforce_rl.config.actor import ReinforceConfig, TrainConfig
from reinforce_rl.config.base import Precision
from reinforce_rl.data.batches import ReinforceBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.checkpointer import checkpoint_up_to
from reinforce_rl.megatron.convert import load_weights
from reinforce_rl.megatron.lora import check_lora_identity
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.trainer.build import build_actor, loss_settings
from reinforce_rl.trainer.updates import denominators_of


@dataclass(frozen=True)
class StepGradient:
    values: Tensor  # float32, of all trained weights
    capped: float  # share of tokens whose weight against the generator is beyond the cap


def accumulate(
    actor: MegatronGPTReinforceActorModel,
    batch: ReinforceBatch,
    cfg: ReinforceConfig,
    beta: float,
    rows: Tensor | None = None,
) -> LossShare:
    """Accumulate the gradient of the whole step's loss; `rows` are this data-parallel rank's, None for all."""
    rows = torch.arange(len(batch.trains)) if rows is None else rows
    denominators = denominators_of(batch, rows, actor.settings.sampling.max_length, actor.mesh.sum_over_dp)
    in_loss = beta if cfg.kl_placement == "loss" else None
    return actor.get_loss_and_metrics(batch, denominators, rows=rows, kl_coefficient=in_loss)


@dataclass(frozen=True)
class Gradients:
    actor: MegatronGPTReinforceActorModel
    step: int  # that trained the weights last; 0: those of the start

    def of(self, batch: ReinforceBatch, cfg: ReinforceConfig, beta: float) -> StepGradient:
        """Return the gradient of the whole step's loss; several optimizer steps of it begin with this policy."""
        actor = self.actor
        actor.settings = replace(actor.settings, loss=loss_settings(cfg))
        sums = accumulate(actor, batch, cfg, beta).sums
        trained = [one for one in actor.ddp.module.parameters() if one.requires_grad]
        values = torch.cat([one.main_grad.detach().flatten().float().cpu() for one in trained])  # type: ignore
        return StepGradient(values, sums.get("generator_capped", 0.0) / max(sums.get("tokens", 0.0), 1.0))


@contextlib.contextmanager
def gradients_before(run: Path, cfg: TrainConfig, step: int, mesh: Mesh) -> Iterator[Gradients]:
    """Load the newest weights from before a step, of a checkpoint, or those of the start, on one rank in float32."""
    cfg, found = on_one_rank(cfg), checkpoint_up_to(run / "checkpoints", step - 1)
    tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
    # The log-probs of the reference are stored.
    actor = build_actor(cfg, mesh, tokenizer, with_reference=False)
    with contextlib.closing(actor.generator):
        if found is not None:
            check_lora_identity(actor.lora, found.folder, found.trainer_state)
            load_weights(actor.lm, found.folder)
        yield Gradients(actor, 0 if found is None else found.trainer_state["step"])


def on_one_rank(cfg: TrainConfig, precision: Precision = "32") -> TrainConfig:
    """Return the settings with the native generator and without what concerns several ranks."""
    cfg = cfg.colocated()
    cfg.generation = "native"
    cfg.trainer.num_nodes = 1
    cfg.trainer.devices = 1
    cfg.trainer.precision = precision
    model = cfg.model
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = model.context_parallel_size = 1
    model.sequence_parallel = model.transformer_engine = False
    model.optim.distributed = model.optim.overlap_grad_sync = False
    return cfg
