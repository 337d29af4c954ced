"""This project's side: the actor, its native engine and its optimizer, as a run builds them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
from rloo_step.comparison import NotTheSame
from rloo_step.rates import synchronize
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from gpu_checks.random_weights import fill_ours
from gpu_checks.workload import BETAS, CLIP_GRAD, EPSILON, GENERATION, LEARNING_RATE, STEP, Workload
from reinforce_rl.algorithm.advantages import rloo
from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.config.model import ModelConfig, OptimConfig, RolloutConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.data.batches import (
    Completions,
    Prompt,
    ReinforceBatch,
    RolloutBatch,
    join_prompts_and_responses,
)
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import hf_tensors, parameters_of
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.preflight.memory import (
    Decoding,
    Pass,
    Policy,
    RankMemory,
    rank_memory,
    stage_shapes,
)

BETA = 0.05  # what a nat of KL costs
# Parts of a step.
GENERATING = "generation"
REFERENCE = "reference log-probs"
GRADIENT = "loss and gradient"
OPTIMIZER = "optimizer"
CHUNK_TOKENS = 1024  # response tokens whose logits exist at a time


def no_tokenizer() -> PreTrainedTokenizerFast:
    """There is no text here: it only says that 0 is the padding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, "<pad>")),
        pad_token="<pad>",
    )


def memory_plan(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
) -> RankMemory:
    """What `preflight` says that this side needs, phase by phase."""
    policy = Policy(
        weight_bytes=dtype.itemsize,
        layout=Layout(1, 1, 1, 1, False),
        optimizer_shards=1,
        reference="device" if device.type == "cpu" else "host",
        lora=None,
        recompute=0,
        recompute_group=1,
        chunk_tokens=CHUNK_TOKENS,
        offload_optimizer=False,
        fused_adam=True,
        gpu=device.type == "cuda",
    )
    length = workload.prompt_tokens + workload.response_tokens - 1
    rows = workload.micro_batch
    micro_batch = Pass(rows, length, rows * workload.response_tokens)
    decoding = Decoding(
        workload.prompts,
        workload.group,
        workload.prompt_tokens,
        workload.response_tokens,
        None,
    )
    shape = stage_shapes(arch, 1, [arch.num_layers], None)[0]
    return rank_memory(0, shape, policy, micro_batch, micro_batch, {"generation": decoding})


def least_bytes(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    workload: Workload,
    phase: str,
) -> int:
    """Weights, and in training gradients and optimizer; a reference that lies on the device too."""
    plan = memory_plan(arch, dtype, device, workload)
    return plan.weights if phase == GENERATION else plan.held


class OurSide:
    """See `measure.Side`.

    Args:
        arch: the model.
        mesh: of one rank.
        dtype: of the weights.
        workload: what to do.
        drawn: False leaves the weights as megatron made them, and lengths of responses unchecked:
            where only shapes count. On fake tensors a CUDA graph's replay changes no value.
    """

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        dtype: torch.dtype,
        workload: Workload,
        *,
        drawn: bool = True,
    ):
        self.lm = CausalLM(arch, mesh, dtype)
        if drawn:
            fill_ours(self.lm)
        self._workload = workload
        self._vocab_size = arch.vocab_size
        self._checks_lengths = drawn
        eos = arch.raw["eos_token_id"]
        length = workload.response_tokens
        self._settings = ModelConfig(
            micro_batch_size=workload.micro_batch,
            seed=0,
            shared_prefix=False,
            logits_chunk_tokens=CHUNK_TOKENS,
            reinforce=RolloutConfig(forward_micro_batch_size=workload.micro_batch),
        )
        # No response may end early.
        self._sampling = SamplingParams(max_length=length, min_length=length, stop_token_ids=(eos,))
        ids = workload.prompt_ids(arch.vocab_size).tolist()
        self._prompts = [Prompt(number, "", tuple(tokens)) for number, tokens in enumerate(ids)]
        self._generator = NativeGenerator(self.lm, no_tokenizer())
        self._actor: MegatronGPTReinforceActorModel | None = None
        self._optimizer: ActorOptimizer | None = None
        self._seed = 0

    def run(self, phase: str) -> dict[str, float]:
        """See `measure.Side`."""
        if phase == GENERATION:
            self._generate()
            return {}
        return self._step() if phase == STEP else self._train(self._fixed_batch())

    def log_probs(
        self,
        sequences: Tensor,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
    ) -> Tensor:
        """float32 [N, T] of the response tokens, as the actor gives them."""
        return self._trained()[0].get_inference_log_probs(
            sequences,
            prompt_lengths,
            response_lengths,
        )

    def greedy(self) -> Tensor:
        """int64 [P, prompt and response tokens], the likeliest token always."""
        length = self._workload.response_tokens
        params = SamplingParams(max_length=length, use_greedy=True)
        completions = self._generator.generate(self._prompts, 1, params, 0)
        prompts = torch.tensor([prompt.tokens for prompt in self._prompts])
        return torch.cat([prompts, completions.tokens], dim=1)

    def _trained(self) -> tuple[MegatronGPTReinforceActorModel, ActorOptimizer]:
        """Actor and optimizer, made at their first use: generation alone takes less memory."""
        if self._actor is None or self._optimizer is None:
            self._actor = MegatronGPTReinforceActorModel(
                self.lm,
                no_tokenizer(),
                self._generator,
                self._settings,
                self._sampling,
            )
            optim = OptimConfig(lr=LEARNING_RATE, weight_decay=0.0, betas=list(BETAS), eps=EPSILON)
            built = build_optimizer(self._actor.ddp, optim, clip_grad=CLIP_GRAD, total_steps=1)
            self._optimizer = ActorOptimizer(*built)
        return self._actor, self._optimizer

    def _generate(self) -> Completions:
        self._seed += 1
        completions = self._generator.generate(
            self._prompts,
            self._workload.group,
            self._sampling,
            self._seed,
        )
        lengths = set(completions.lengths.tolist())
        if self._checks_lengths and lengths != {self._workload.response_tokens}:
            raise NotTheSame(f"responses have {sorted(lengths)} tokens")
        return completions

    def work(self) -> dict[str, Callable[[], object]]:
        """What a step is made of, by the names of `memory_plan`'s phases.

        Gradients are there from the first on.
        """
        actor, optimizer = self._trained()
        batch = self._fixed_batch()
        where = (
            batch.rollouts.sequences,
            batch.rollouts.prompt_lengths,
            batch.rollouts.response_lengths,
        )
        return {
            "training": lambda: self._accumulate(batch),
            "optimizer step": optimizer.step,
            "generation": self._generate,
            "log-probs": lambda: actor.get_inference_log_probs(*where),
            "reference log-probs": lambda: actor.get_init_policy_logprobs(*where),
        }

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """The loss of the sequences that both sides train on, and its gradient.

        The gradient is on the CPU, by Hugging Face's names.
        """
        loss = self._accumulate(self._fixed_batch())
        values = {}
        for name, parameter in parameters_of(self.lm).items():
            values[name] = parameter.main_grad  # type: ignore[attr-defined]
        pairs = hf_tensors(self.lm, values)
        return loss, {name: value for name, value in pairs if value is not None}

    def weights(self) -> dict[str, Tensor]:
        """A copy on the CPU, by Hugging Face's names."""
        return {name: value for name, value in hf_tensors(self.lm) if value is not None}

    def _fixed_batch(self) -> ReinforceBatch:
        """The same sequences as the other side's."""
        return self._batch(
            self._workload.sequences_of(self._vocab_size),
            self._workload.rewards(),
            None,
        )

    def _accumulate(self, batch: ReinforceBatch) -> float:
        """The loss; its gradient is in the buffers then."""
        count = float(self._workload.sequences)
        length = float(self._workload.response_tokens)
        denominators = Denominators(count, count * length, length)
        return self._trained()[0].get_loss_and_metrics(batch, denominators).loss

    def _train(self, batch: ReinforceBatch) -> dict[str, float]:
        _, optimizer = self._trained()
        parts: dict[str, float] = {}
        with self._part(GRADIENT, parts):
            self._accumulate(batch)
        with self._part(OPTIMIZER, parts):
            update = optimizer.step()
        if update.skipped:
            raise NotTheSame(
                f"the gradient's norm is {update.grad_norm}, so no optimizer step was made",
            )
        return parts

    def _step(self) -> dict[str, float]:
        """Generation, reference log-probs, RLOO on rewards less the KL, training."""
        actor, _ = self._trained()
        parts: dict[str, float] = {}
        with self._part(GENERATING, parts):
            completions = self._generate()
        repeated = completions.repeat_to_samples(self._prompts)
        sequences, lengths = join_prompts_and_responses(repeated, completions, actor.pad_id)
        with self._part(REFERENCE, parts):
            reference = actor.get_init_policy_logprobs(sequences, lengths, completions.lengths)
        assert completions.log_probs is not None
        kl = sequence_kl(
            completions.log_probs,
            reference,
            torch.ones_like(reference, dtype=torch.bool),
        )
        return {
            **parts,
            **self._train(self._batch(sequences, self._workload.rewards() - BETA * kl, reference)),
        }

    def _batch(
        self,
        sequences: Tensor,
        rewards: Tensor,
        reference: Tensor | None,
    ) -> ReinforceBatch:
        work = self._workload
        groups = torch.arange(work.prompts).repeat_interleave(work.group)
        rollouts = RolloutBatch(
            sequences=sequences,
            prompt_lengths=torch.full((work.sequences,), work.prompt_tokens),
            response_lengths=torch.full((work.sequences,), work.response_tokens),
            group_ids=groups,
            sample_ids=torch.arange(work.group).repeat(work.prompts),
            finish_reasons=(FINISH_LENGTH,) * work.sequences,
            rewards=rewards,
            valid=torch.ones(work.sequences, dtype=torch.bool),
            init_log_probs=reference,
        )
        advantages = rloo(rewards, groups)[:, None].where(rollouts.response_mask, 0.0)
        nothing = torch.zeros_like(rewards)
        return ReinforceBatch(rollouts, nothing, rewards, nothing, advantages, rollouts.valid)

    @contextlib.contextmanager
    def _part(self, name: str, parts: dict[str, float]) -> Iterator[None]:
        """The block's seconds, to the end of what it gave the device."""
        synchronize(self.lm.mesh.device)
        started = time.perf_counter()
        yield
        synchronize(self.lm.mesh.device)
        parts[name] = time.perf_counter() - started
