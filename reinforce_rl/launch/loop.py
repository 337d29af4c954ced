"""A policy for your own training loop: `from reinforce_rl import open_policy`.

`examples/minimal_loop.py` is such a loop. Each step uses the trainer's parts, so a loop with the
trainer's settings gives the trainer's numbers.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforce_rl.errors import (
    ConfigError,
    DivergedError,
    Fault,
    GenerationError,
    ReinforceError,
)
from reinforce_rl.launch.api import Prompts, configured, prompts_file
from reinforce_rl.utils.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from reinforce_rl.config.actor import TrainConfig
    from reinforce_rl.data.batches import Prompt, RolloutBatch
    from reinforce_rl.megatron.optimizer import ActorOptimizer
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
    from reinforce_rl.rewards.base import RewardRequest

# Keys and sections that a loop reads, except for the keys in NOT_READ.
READ = (
    "algorithm",
    "engine",
    "generation",
    "model",
    "placement",
    "tensorrt_llm",
    "trainer.collective_timeout_seconds",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.precision",
    "trainer.reinforce.entropy_bonus",
    "trainer.reinforce.generator_correction",
    "trainer.reinforce.generator_ratio_cap",
    "trainer.reinforce.gradient_clip_val",
    "trainer.reinforce.initial_policy_kl_penalty",
    "trainer.reinforce.loss_aggregation",
    "trainer.reinforce.max_steps",
    "trainer.reinforce.rollout_batch_seq_length",
    "vllm",
)
NOT_READ = (
    "model.data.data_prefix",
    "model.data.shuffle",
    "model.global_batch_size",
    "model.reinforce.num_rollout_samples",
)

# Megatron's process groups are global, so the policy of a process is too.
_open_policy = threading.Lock()


@dataclass(frozen=True)
class UpdateResult:
    """Numbers of an optimizer step."""

    loss: float
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradient was not finite; no weight changed


@contextlib.contextmanager
def open_policy(model: str | Path, prompts: Prompts, **settings: Any) -> Iterator[Policy]:
    """Load a model and its prompts for your own training loop, in this process.

    One policy can be open at a time. Under torchrun the ranks share one model (tensor, pipeline or
    context parallel), and each runs the same loop; there is no data parallelism.

    An engine's logs are in a temporary folder, which is kept after a GenerationError.

    Args:
        model, prompts: as for `reinforce_rl.train`.
        settings: configuration keys: of `model`, `generation` and the engines, `trainer.devices`,
            `num_nodes`, `precision` and `collective_timeout_seconds`; of `trainer.reinforce`
            `initial_policy_kl_penalty` (above 0 keeps the initial policy), `loss_aggregation`,
            `entropy_bonus`, `generator_correction`, `generator_ratio_cap`, `gradient_clip_val`,
            `rollout_batch_seq_length`, and `max_steps`, the length of a learning-rate schedule in
            optimizer steps. `algorithm` sets those of a preset. Others are refused: rewards, KL,
            baselines and the number of prompts, samples and steps are the loop's.

    Raises:
        ReinforceError: see its subclasses.
    """
    with contextlib.ExitStack() as stack:
        if not _open_policy.acquire(blocking=False):
            raise ReinforceError(
                "a policy is open in this process; leave its `with open_policy(...)` first",
                key="api.loop.already_open",
            )
        stack.callback(_open_policy.release)
        _refuse_settings_without_effect(settings)
        folder = stack.enter_context(_folder_of_logs())
        files = dict[Path, str]()
        values = {
            "pretrained_checkpoint.restore_from_path": str(model),
            "exp_manager.explicit_log_dir": str(folder),
            "model.data.data_prefix.train": prompts_file(prompts, folder / "prompts.jsonl", files),
        }
        for path, text in files.items():
            write_atomically(path, text)
        cfg = configured(values, settings)
        if faults := list(_faults(cfg)):
            raise ConfigError(faults)
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
        policy = Policy(cfg, actor, optimizer, [dataset[i] for i in range(len(dataset))])
        stack.callback(policy.close)
        yield policy


@contextlib.contextmanager
def _folder_of_logs() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="reinforce_rl_"))
    is_kept = False
    try:
        yield folder
    except GenerationError:  # its message names a log in the folder
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def _refuse_settings_without_effect(settings: Iterable[str]) -> None:
    """Raise ConfigError, before rules across keys give advice that is meant for a run."""
    from reinforce_rl.config.compose import unknown_keys

    names = [name for name in settings if not _is_in(name, READ) or _is_in(name, NOT_READ)]
    if names and not unknown_keys(names, "train_reinforce_actor"):
        raise ConfigError(
            [
                Fault(
                    f"{name} has no effect in a loop of your own; leave it out, or use "
                    "reinforce_rl.train. help(reinforce_rl.open_policy) lists the keys that do",
                    key="api.loop.no_effect",
                )
                for name in names
            ]
        )


def _faults(cfg: TrainConfig) -> Iterator[Fault]:
    """Yield the faults of settings that work in a run but not in a loop."""
    if cfg.placement != "colocated":
        yield Fault(
            f"placement is {cfg.placement!r}, but a loop of your own generates on the ranks "
            "that train; leave it at colocated",
            key="api.loop.not_colocated",
        )
    reinforce = cfg.trainer.reinforce
    if reinforce.kl_placement == "loss":
        yield Fault(
            "trainer.reinforce.kl_placement is loss, but the loss of a loop of your own has no "
            "KL; expected reward or advantage, where the loop subtracts it. Choose another "
            "algorithm, or use reinforce_rl.train",
            key="api.loop.kl_in_loss",
        )
    schedule = cfg.model.optim.sched.name
    if schedule != "constant" and reinforce.max_steps == -1:
        yield Fault(
            f"model.optim.sched.name is {schedule}, but its length is unknown; set "
            "trainer.reinforce.max_steps to the loop's number of optimizer steps",
            key="api.loop.schedule_without_steps",
        )
    ranks = cfg.trainer.world_size
    ranks_of_model = cfg.model.block_size
    if ranks > ranks_of_model:
        yield Fault(
            f"trainer.devices x trainer.num_nodes is {ranks}, but tensor x pipeline x context "
            f"parallel is {ranks_of_model}; a loop of your own has no data parallelism, so "
            "expected the same. Use reinforce_rl.train for more ranks",
            key="api.loop.data_parallel",
        )


def _is_in(name: str, sections: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{section}.") for section in sections)


class Policy:
    """A model in training.

    N samples are in prompt-major order, T is the longest response's number of tokens. After the
    `with` of `open_policy`, its methods raise ReinforceError.

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
        self.optimizer = optimizer
        self.prompts = list(prompts)
        self._actor: MegatronGPTReinforceActorModel | None = actor

    @property
    def actor(self) -> MegatronGPTReinforceActorModel:
        if self._actor is None:
            raise ReinforceError(
                "this policy is closed; use it inside of its `with open_policy(...)`",
                key="api.loop.closed",
            )
        return self._actor

    def close(self) -> None:
        self._actor = None

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, step: int
    ) -> tuple[RolloutBatch, RewardRequest]:
        """Sample `num_samples` responses of each prompt.

        Args:
            prompts: of `Policy.prompts`, none twice.
            step: selects the noise; `train` counts its steps from 1.

        Returns:
            The samples, without rewards, and their texts, as a request to a reward source. Samples
            are valid unless empty or outside the vocabulary.
        """
        from reinforce_rl.data.sampler import step_seed
        from reinforce_rl.rollout.scoring import can_train, reward_request, unscored_batch

        actor = self.actor
        counts = Counter(prompt.id for prompt in prompts)
        repeated = [number for number, count in counts.items() if count > 1]
        if repeated:
            raise ReinforceError(
                f"the prompt with id {repeated[0]} is given {counts[repeated[0]]} times, and would "
                "get the same responses each time; give it once, with a larger num_samples",
                key="api.loop.repeated_prompt",
            )
        offloads = self.cfg.model.reinforce.offload_adam_states
        offloaded = self.optimizer.offloaded() if offloads else contextlib.nullcontext()
        seed = step_seed(self.cfg.model.seed, step)
        try:
            with offloaded, actor.generator.awake():
                completions = actor.infer(prompts, num_samples, seed)
        except GenerationError as error:
            # On every rank, as the others would wait for this one.
            actor.mesh.raise_if_any(error)
            raise
        actor.mesh.raise_if_any(None)
        batch = unscored_batch(prompts, completions, actor.pad_id)
        request = reward_request(actor, prompts, completions)
        return replace(batch, valid=can_train(batch)), request

    def log_probs(self, batch: RolloutBatch) -> Tensor:
        """Return the response tokens' log-probs under the policy, without gradient.

        float32 [N, T] on the CPU; 0 on padding.
        """
        return self.actor.get_inference_log_probs(*batch.sequence_inputs)

    def reference_log_probs(self, batch: RolloutBatch) -> Tensor:
        """Return `log_probs` under the initial policy.

        The policy is kept if `trainer.reinforce.initial_policy_kl_penalty` is above 0.
        """
        if not self.cfg.uses_reference:
            raise ReinforceError(
                "trainer.reinforce.initial_policy_kl_penalty is 0, so the initial policy is not "
                "kept; set it above 0",
                key="api.loop.no_reference",
            )
        return self.actor.get_init_policy_logprobs(*batch.sequence_inputs)

    def update(self, batch: RolloutBatch, advantages: Tensor) -> UpdateResult:
        """Make one optimizer step on the loss of the valid samples: -mean of advantage * log-prob.

        `trainer.reinforce.loss_aggregation` sets how tokens are averaged. The generator has the new
        weights afterwards. Call it once for each batch: the loss has no importance ratio.

        Args:
            advantages: [N] of responses, or [N, T] of tokens.

        Raises:
            DivergedError: the weights were not finite.
        """
        import torch

        from reinforce_rl.data.batches import ReinforceBatch
        from reinforce_rl.trainer.updates import denominators_of

        mask = batch.response_mask & batch.valid[:, None]
        by_token = advantages[:, None] if advantages.dim() == 1 else advantages
        zeros = torch.zeros(len(batch.valid))
        reinforce_batch = ReinforceBatch(
            rollouts=batch,
            # The loss reads none of these three.
            kl=zeros,
            rewards_with_kl=zeros,
            baseline=zeros,
            advantages=by_token.float().where(mask, 0.0),
            trains=batch.valid,
        )
        actor = self.actor
        denominators = denominators_of(
            reinforce_batch,
            torch.arange(len(batch.valid)),
            actor.max_response_tokens,
            actor.mesh.sum_over_dp,
        )
        share = actor.get_loss_and_metrics(reinforce_batch, denominators)
        step = self.optimizer.step()
        if actor.mesh.any_rank(step.weights_lost):
            raise DivergedError(
                "the policy's weights were not finite before an update",
                key="trainer.weights.not_finite",
            )
        actor.generator.refit()
        return UpdateResult(
            loss=share.loss,
            grad_norm=step.grad_norm,
            lr=step.lr,
            skipped=step.skipped,
        )

    def export(self, folder: str | Path) -> Path:
        """Write the policy as a Hugging Face folder."""
        return self.actor.export(self.cfg.pretrained_checkpoint.restore_from_path, folder)
