"""The plain side: a model of transformers, its `generate`, and a training loop in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from rloo_step.comparison import NotTheSame
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gpu_checks.random_weights import fill_transformers
from gpu_checks.workload import BETAS, CLIP_GRAD, EPSILON, GENERATION, LEARNING_RATE, Workload
from reinforce_rl.algorithm.advantages import rloo
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.size import ADAM_MOMENTS, FP32, ModelSize


def transformers_model(
    arch: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    drawn_on: torch.device,
    attention: str = "sdpa",
) -> Any:
    """With random weights.

    Args:
        arch: the model.
        dtype: of the weights.
        device: where it lies.
        drawn_on: see `fill_transformers`.
        attention: transformers' name of the implementation.
    """
    values = {key: value for key, value in arch.raw.items() if key != "model_type"}
    config = AutoConfig.for_model(arch.raw["model_type"], **values)
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    fill_transformers(model, drawn_on)
    return model.eval()


def least_bytes(arch: Architecture, dtype: torch.dtype, phase: str) -> int:
    """Weights, and in training gradients and Adam's moments, all in fp32."""
    size = ModelSize.from_architecture(arch, None).parameters
    return size * (dtype.itemsize if phase == GENERATION else 2 * FP32 + ADAM_MOMENTS)


def response_log_probs(model: Any, sequences: Tensor, response_tokens: int) -> Tensor:
    """float32 [n, response_tokens] of the last tokens of [n, S] sequences of one length."""
    # The last token predicts nothing, and the prompt's tokens are not asked for.
    logits = model(sequences[:, :-1], logits_to_keep=response_tokens, use_cache=False).logits
    targets = sequences[:, -response_tokens:]
    return -F.cross_entropy(
        logits.float().flatten(0, 1),
        targets.flatten(),
        reduction="none",
    ).view_as(targets)


class PlainSide:
    """See `measure.Side`.

    Training has what the other side has: weights, gradients and moments in fp32, products in
    `dtype` (autocast).

    Args:
        arch: the model.
        device: it runs on.
        dtype: of the weights in generation, and of the products.
        workload: what to do.
        attention: transformers' name of the implementation.
    """

    def __init__(
        self,
        arch: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        workload: Workload,
        attention: str = "sdpa",
    ):
        self.model = transformers_model(arch, dtype, device, device, attention)
        self._device = device
        self._dtype = dtype
        self._workload = workload
        self._vocab_size = arch.vocab_size
        length = workload.response_tokens
        self._generation = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=workload.group,
            max_new_tokens=length,
            min_new_tokens=length,  # no response may end early
            eos_token_id=arch.raw["eos_token_id"],
            pad_token_id=arch.raw["pad_token_id"],
        )
        self._optimizer: torch.optim.AdamW | None = None

    def run(self, phase: str) -> dict[str, float]:
        """See `measure.Side`."""
        if phase == GENERATION:
            self._generate()
        else:
            self._train()
        return {}

    @torch.no_grad()
    def _generate(self) -> None:
        prompts = self._workload.prompt_ids(self._vocab_size).to(self._device)
        self.model.eval()
        sequences = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=self._generation,
        )
        expected = (
            self._workload.sequences,
            self._workload.prompt_tokens + self._workload.response_tokens,
        )
        shape = tuple(sequences.shape)
        if shape != expected:
            raise NotTheSame(
                f"transformers gave {shape} sequences and tokens, expected {expected}",
            )

    def gradients(self) -> tuple[float, dict[str, Tensor]]:
        """The loss of the sequences that both sides train on, and its gradient, by name.

        The weights must be fp32.
        """
        loss = float(self._accumulate())
        gradients = {}
        for name, value in self.model.named_parameters():
            if value.grad is not None:
                gradients[name] = value.grad
        self.model.zero_grad(set_to_none=True)
        return loss, gradients

    def _accumulate(self) -> float | Tensor:
        """Forward and backward in micro-batches; the loss."""
        work = self._workload
        whole = 0.0
        self.model.train()
        groups = torch.arange(work.prompts).repeat_interleave(work.group)
        advantages = rloo(work.rewards(), groups).to(self._device)
        sequences = work.sequences_of(self._vocab_size).to(self._device)
        for rows in torch.arange(work.sequences, device=self._device).split(work.micro_batch):
            with torch.autocast(
                self._device.type,
                self._dtype,
                enabled=self._dtype != torch.float32,
            ):
                log_probs = response_log_probs(self.model, sequences[rows], work.response_tokens)
            loss = -(advantages[rows] * log_probs.sum(dim=1)).sum() / work.sequences
            loss.backward()
            whole += loss.detach()
        return whole

    def _train(self) -> None:
        """Forward and backward, then a step of AdamW on the clipped gradient."""
        if self._optimizer is None:
            self.model.float()
            self._optimizer = torch.optim.AdamW(
                self.model.parameters(),
                lr=LEARNING_RATE,
                betas=BETAS,
                eps=EPSILON,
                weight_decay=0.0,
                fused=self._device.type == "cuda",
            )
        self._accumulate()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
