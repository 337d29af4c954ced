"""Random training batches and their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from helpers.policies import hf_gradients, megatron_model, padded_sequences
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.config.model import ModelConfig, OptimConfig, RolloutConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.lora import LoraSettings, add_lora
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import DEFAULT_OPTIONS, CausalLM, ModelOptions
from reinforce_rl.megatron.optimizer import DEFAULT_OPTIM
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

TEMPERATURE = 0.7
VOCAB_SIZE = 61
# Four prompts with three samples each. Two samples are invalid, one of them empty; one valid sample
# is empty too.
PROMPT_LENGTHS = [4, 4, 4, 9, 9, 9, 1, 1, 1, 6, 6, 6]
RESPONSE_LENGTHS = [5, 2, 8, 3, 0, 7, 1, 0, 6, 4, 8, 2]
INVALID = (4, 9)


def whole_batch() -> ReinforceBatch:
    sequences, prompts, responses = padded_sequences(PROMPT_LENGTHS, RESPONSE_LENGTHS, VOCAB_SIZE)
    count = len(prompts)
    for row, length in enumerate(PROMPT_LENGTHS):
        sequences[row, :length] = sequences[row - row % 3, :length]
    valid = torch.ones(count, dtype=torch.bool)
    valid[list(INVALID)] = False
    nothing = torch.zeros(count)
    advantages = torch.randn(count, generator=torch.Generator().manual_seed(5))
    rollouts = RolloutBatch(
        sequences=sequences,
        prompt_lengths=prompts,
        response_lengths=responses,
        group_ids=torch.arange(count) // 3,
        sample_ids=torch.arange(count) % 3,
        finish_reasons=("stop",) * count,
        rewards=torch.where(valid, nothing, torch.nan),
        valid=valid,
    )
    advantages = torch.where(valid, advantages, 0.0)[:, None].expand(count, rollouts.width)
    return ReinforceBatch(rollouts, nothing, nothing, nothing, advantages, valid)


def rows_of(batch: ReinforceBatch, rows: list[int]) -> ReinforceBatch:
    """Select rows and cut them to their longest sequence, as on a rank."""
    rollouts = batch.rollouts.select(torch.tensor(rows, dtype=torch.long))
    return ReinforceBatch(
        rollouts,
        batch.kl[rows],
        batch.rewards_with_kl[rows],
        batch.baseline[rows],
        batch.advantages[rows, : rollouts.width],
        batch.trains[rows],
    )


def sequences(count: float) -> Denominators:
    """Return denominators for `sequence_sum`, which reads only the number of sequences."""
    return Denominators(count, 0.0, 0.0)


def actor_of(
    folder: str | Path,
    mesh: Mesh,
    *,
    micro_batch_size: int = 2,
    forward_micro_batch_size: int = 4,
    model: ModelOptions = DEFAULT_OPTIONS,
    tokens_per_micro_batch: int | None = None,
    shared_prefix: bool | None = None,
    updates: LoraSettings | None = None,
    dtype: torch.dtype = torch.float32,
    optim: OptimConfig = DEFAULT_OPTIM,
    reference_placement: Literal["host", "device"] = "host",
    **options: Any,
) -> MegatronGPTReinforceActorModel:
    lm = megatron_model(folder, mesh, dtype, options=model)
    if updates is not None:
        add_lora(lm, updates)
    tokenizer = load_tokenizer(folder)
    sampling = SamplingParams(max_length=8, temperature=TEMPERATURE)
    settings = ModelConfig(
        micro_batch_size=micro_batch_size,
        seed=0,
        tokens_per_micro_batch=tokens_per_micro_batch,
        shared_prefix=mesh.cp_size == 1 if shared_prefix is None else shared_prefix,
        logits_chunk_tokens=1024,
        reference_placement=reference_placement,
        reinforce=RolloutConfig(forward_micro_batch_size=forward_micro_batch_size),
        optim=optim,
    )
    return MegatronGPTReinforceActorModel(
        lm, tokenizer, NativeGenerator(lm, tokenizer), settings, sampling, **options
    )


def gradient_of(model: Any) -> Tensor:
    """Return an actor's or reward model's gradient buffers as a `whole_vector`."""
    return whole_vector(model.lm, hf_gradients(model.lm, "main_grad"))


def whole_vector(lm: CausalLM, tensors: Any) -> Tensor:
    """Return tensors in Hugging Face's layout as one vector; a collective call."""
    # `hf_tensors` communicates, so every rank takes its tensors.
    tensors = dict(tensors)
    vector = flat(tensors) if lm.mesh.is_model_parallel_rank_0 else None
    return lm.mesh.from_model_parallel_rank_0(vector)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    vectors = []
    for name in sorted(tensors):
        vectors.append(tensors[name].reshape(-1).double())
    return torch.cat(vectors)


def relative_difference(tensor: Tensor, reference: Tensor) -> float:
    return float((tensor - reference).norm() / reference.norm())
