"""A policy for a training loop of the caller's own: `from reinforce_rl import open_policy`.

`examples/minimal_loop.py` is such a loop. The trainer's parts do each of its steps, so that a loop
with the trainer's settings gives the trainer's numbers.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.launch.api import Prompts, configured, prompts_file
from reinforce_rl.utils.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from reinforce_rl.config.actor import TrainConfig
    from reinforce_rl.data.batches import Prompt, RolloutBatch
    from reinforce_rl.megatron.optimizer import ActorOptimizer
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
    from reinforce_rl.rewards.base import RewardRequest


@dataclass(frozen=True)
class UpdateResult:
    """Numbers of an optimizer step."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradient was not finite; no weight changed


@contextlib.contextmanager
def open_policy(model: str | Path, prompts: Prompts, **settings: Any) -> Iterator[Policy]:
    """Load a model and its prompts for a training loop of the caller's own, in this process.

    One policy can be open at a time. Under torchrun every rank runs the same loop.

    Args:
        model, prompts, settings: as for `reinforce_rl.train`. The optimizer's schedule is over
            `trainer.reinforce.max_steps` optimizer steps.

    Raises:
        ReinforceError: see its subclasses.
    """
    # Idle OpenMP threads that spin can slow a busy CPU tenfold.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = dict[Path, str]()
        values = {
            "pretrained_checkpoint.restore_from_path": str(model),
            "exp_manager.explicit_log_dir": str(folder),
            "model.data.data_prefix.train": prompts_file(prompts, folder / "prompts.jsonl", files),
        }
        for path, text in files.items():
            write_atomically(path, text)
        cfg = configured(values, settings)
        if cfg.placement != "colocated":
            sentence = (
                f"placement is {cfg.placement!r}, but a loop of your own generates on the ranks "
                "that train; leave it at colocated"
            )
            raise ConfigError([Fault(sentence, key="api.loop.not_colocated")])
        from reinforce_rl.data.tokenizer import load_tokenizer
        from reinforce_rl.megatron.architecture import Architecture
        from reinforce_rl.policy.build import (
            build_actor,
            build_actor_optimizer,
            check_vocabulary,
            configured_mesh,
        )
        from reinforce_rl.rollout.prompts import build_datasets

        mesh = stack.enter_context(configured_mesh(cfg))
        tokenizer = load_tokenizer(model)
        check_vocabulary(tokenizer, Architecture.from_folder(model), model)
        dataset = build_datasets(cfg, tokenizer, splits=["train"]).train
        actor = build_actor(cfg, mesh, tokenizer)
        stack.callback(actor.generator.close)
        optimizer = build_actor_optimizer(cfg, actor, max(cfg.trainer.reinforce.max_steps, 1))
        yield Policy(cfg, actor, optimizer, [dataset[i] for i in range(len(dataset))])


class Policy:
    """A model in training.

    N samples are in prompt-major order, T is the longest response's number of tokens.

    Attributes:
        prompts: all prompts, tokenised. Their `id` is the group of their samples.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        actor: MegatronGPTReinforceActorModel,
        optimizer: ActorOptimizer,
        prompts: Sequence[Prompt],
    ):
        self.cfg = cfg
        self.actor = actor
        self.optimizer = optimizer
        self.prompts = list(prompts)

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, step: int
    ) -> tuple[RolloutBatch, RewardRequest]:
        """Sample `num_samples` responses of each prompt.

        `step` selects the noise; `train` counts its steps from 1.

        Returns:
            The samples without rewards, all but empty ones valid, and their texts, as a reward
            source is asked about them.
        """
        from reinforce_rl.data.sampler import step_seed
        from reinforce_rl.rollout.scoring import can_train, reward_request, unscored_batch

        offloads = self.cfg.model.reinforce.offload_adam_states
        offloaded = self.optimizer.offloaded() if offloads else contextlib.nullcontext()
        with offloaded, self.actor.generator.awake():
            completions = self.actor.infer(
                prompts, num_samples, step_seed(self.cfg.model.seed, step)
            )
        batch = unscored_batch(prompts, completions, self.actor.pad_id)
        request = reward_request(self.actor, prompts, completions)
        return replace(batch, valid=can_train(batch)), request

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """Return the response tokens' log-probs under the policy, without gradient.

        float32 [N, T] on the CPU; 0 on padding.
        """
        return self.actor.get_inference_log_probs(*_tokens_of(batch))

    def reference_log_probs(self, batch: RolloutBatch) -> Tensor:
        """Return `log_probs` under the initial policy.

        It is kept if `trainer.reinforce.initial_policy_kl_penalty` is above 0.
        """
        return self.actor.get_init_policy_logprobs(*_tokens_of(batch))

    def update(self, batch: RolloutBatch, advantages: Tensor) -> UpdateResult:
        """Make one optimizer step on the loss of the valid samples: -mean of advantage * log-prob.

        `trainer.reinforce.loss_aggregation` is how tokens are averaged. The generator has the new
        weights afterwards.

        Args:
            advantages: [N] of responses, or [N, T] of tokens.
        """
        import torch

        from reinforce_rl.data.batches import ReinforceBatch
        from reinforce_rl.trainer.updates import denominators_of

        mask = batch.response_mask & batch.valid[:, None]
        by_token = advantages[:, None] if advantages.dim() == 1 else advantages
        of_samples = torch.zeros(len(batch.valid))
        reinforce_batch = ReinforceBatch(
            rollouts=batch,
            # The loss reads none of these three.
            kl=of_samples,
            rewards_with_kl=of_samples,
            baseline=of_samples,
            advantages=by_token.float().where(mask, 0.0),
            trains=batch.valid,
        )
        mesh = self.actor.mesh
        denominators = denominators_of(
            reinforce_batch,
            torch.arange(len(batch.valid)),
            self.actor.sampling.max_length,
            mesh.sum_over_dp,
        )
        share = self.actor.get_loss_and_metrics(reinforce_batch, denominators)
        step = self.optimizer.step()
        self.actor.generator.refit()
        return UpdateResult(
            loss=sum(mesh.gather_over_dp(share.loss)),
            grad_norm=step.grad_norm,
            lr=step.lr,
            skipped=step.skipped,
        )

    def export(self, folder: str | Path) -> Path:
        """Write the policy as a Hugging Face folder."""
        return self.actor.export(self.cfg.pretrained_checkpoint.restore_from_path, folder)


def _tokens_of(batch: RolloutBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.sequences, batch.prompt_lengths, batch.response_lengths, batch.group_ids
