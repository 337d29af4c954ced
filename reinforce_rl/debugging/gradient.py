"""The gradient of a stored step's loss on a checkpoint of the run, by the actor on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reinforce_rl.config.actor import ReinforceConfig, TrainConfig
from reinforce_rl.data.batches import ReinforceBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.checkpointer import checkpoint_up_to
from reinforce_rl.megatron.convert import load_weights
from reinforce_rl.megatron.lora import check_lora_identity
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.policy.build import build_actor, loss_settings
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.trainer.updates import denominators_of


@dataclass(frozen=True)
class StepGradient:
    values: Tensor  # float32, of all trained weights
    capped: float  # share of tokens with a weight against the generator beyond the cap


@dataclass(frozen=True)
class Gradients:
    actor: MegatronGPTReinforceActorModel
    step: int  # the last one that trained the weights; 0 for the initial weights

    def of(
        self,
        batch: ReinforceBatch,
        cfg: ReinforceConfig,
        kl_coefficient: float | None,
    ) -> StepGradient:
        """Return the gradient of the whole step's loss, of the policy before its first update."""
        actor = self.actor
        actor.loss = loss_settings(cfg)
        rows = torch.arange(len(batch.trains))
        max_length = actor.max_response_tokens
        share = actor.get_loss_and_metrics(
            batch,
            denominators_of(batch, rows, max_length, actor.mesh.sum_over_dp),
            rows=rows,
            kl_coefficient=kl_coefficient,
        )
        trained = [weight for weight in actor.ddp.module.parameters() if weight.requires_grad]
        gradients = [weight.main_grad.detach() for weight in trained]  # type: ignore
        flat = torch.cat([gradient.flatten().float().cpu() for gradient in gradients])
        capped = share.sums.get("generator_capped", 0.0)
        tokens = share.sums.get("tokens", 0.0)
        return StepGradient(flat, capped / max(tokens, 1.0))


@contextlib.contextmanager
def gradients_before(run: Path, cfg: TrainConfig, step: int, mesh: Mesh) -> Iterator[Gradients]:
    """Load the newest weights from before a step, on one rank in float32.

    Without a checkpoint these are the initial weights.
    """
    cfg = _on_one_rank(cfg)
    checkpoint = checkpoint_up_to(run / "checkpoints", step - 1)
    tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
    # The record has the log-probs of the reference.
    actor = build_actor(cfg, mesh, tokenizer, with_reference=False)
    with contextlib.closing(actor.generator):
        if checkpoint is None:
            yield Gradients(actor, 0)
            return
        check_lora_identity(actor.lora, checkpoint.folder, checkpoint.trainer_state)
        load_weights(actor.lm, checkpoint.folder)
        yield Gradients(actor, checkpoint.trainer_state["step"])


def _on_one_rank(cfg: TrainConfig) -> TrainConfig:
    """Return the settings for one rank: native generator, float32, no parallelism."""
    cfg = cfg.colocated()
    cfg.generation = "native"
    cfg.trainer.num_nodes = 1
    cfg.trainer.devices = 1
    cfg.trainer.precision = "32"
    model = cfg.model
    model.tensor_model_parallel_size = 1
    model.pipeline_model_parallel_size = 1
    model.context_parallel_size = 1
    model.sequence_parallel = False
    model.transformer_engine = False
    model.optim.distributed = False
    model.optim.overlap_grad_sync = False
    return cfg
