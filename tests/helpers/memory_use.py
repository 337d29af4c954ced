"""Measured memory of a real actor, and the preflight's estimate for the same configuration.

torch's own allocator counts the bytes, and the profiler records each allocation and release. Kernel
scratch is included; the interpreter and the C library's reserve are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.batches import sequences
from helpers.tiny_run import compose
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.policy.build import build_actor
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.preflight.memory import RankMemory
from reinforce_rl.preflight.plan import plan_batches, plan_memory
from reinforce_rl.trainer.inputs import layout_of, read_inputs

TP2 = "model.tensor_model_parallel_size=2"
PP2 = "model.pipeline_model_parallel_size=2"
CP2 = "model.context_parallel_size=2"
SP = "model.sequence_parallel=true"
DISTRIBUTED = "model.optim.distributed=true"
BF16 = "trainer.precision=bf16"
LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=8")


def full_checkpoints(method: str, layers: int) -> tuple[str, ...]:
    return (
        "model.activations_checkpoint_granularity=full",
        f"model.activations_checkpoint_method={method}",
        f"model.activations_checkpoint_num_layers={layers}",
    )


UNIFORM = full_checkpoints("uniform", 1)
ATTENTION_ONLY = "model.peft.lora_tuning.target_modules=[q_proj,v_proj]"
PROMPT = 144
RESPONSE = 48


@dataclass(frozen=True)
class Case:
    ranks: int
    overrides: tuple[str, ...]


CASES = {
    "one": Case(1, ()),
    "large micro-batch": Case(1, ("model.micro_batch_size=8",)),
    "small micro-batch": Case(
        1, ("model.micro_batch_size=1", "model.reinforce.rollout_micro_batch_size=1")
    ),
    "small chunk": Case(1, ("model.logits_chunk_tokens=32",)),
    "tokens": Case(1, ("model.tokens_per_micro_batch=1200",)),
    "full": Case(1, UNIFORM),
    "full in twos": Case(1, full_checkpoints("uniform", 2)),
    "block": Case(1, full_checkpoints("block", 2)),
    "selective": Case(1, ("model.activations_checkpoint_granularity=selective",)),
    "lora": Case(1, LORA),
    "lora of attention": Case(1, (*LORA, ATTENTION_ONLY)),
    "lora full": Case(1, (*LORA, *UNIFORM)),
    "bf16": Case(1, (BF16,)),
    "bf16 full": Case(1, (BF16, *UNIFORM)),
    "TP2": Case(2, (TP2,)),
    "TP2 SP": Case(2, (TP2, SP)),
    "TP2 SP full": Case(2, (TP2, SP, *UNIFORM)),
    "TP2 lora": Case(2, (TP2, *LORA)),
    "PP2": Case(2, (PP2,)),
    "PP2 full": Case(2, (PP2, *UNIFORM)),
    "CP2": Case(2, (CP2,)),
    "CP2 distributed": Case(2, (CP2, DISTRIBUTED)),
    "DP2 distributed": Case(2, (DISTRIBUTED,)),
    "DP2 distributed bf16": Case(2, (DISTRIBUTED, BF16)),
}


@dataclass(frozen=True)
class Use:
    """Bytes of unique storages by kind, and the growth in each phase."""

    weights: int
    gradients: int
    optimizer: int
    phases: dict[str, int]


def overrides_of(folder: Path, ranks: int, *overrides: str) -> list[str]:
    """Return the overrides of a run on `folder` with prompts of `PROMPT` tokens."""
    return [
        f"pretrained_checkpoint.restore_from_path={folder}",
        f"model.data.data_prefix.train={folder / 'prompts.jsonl'}",
        f"exp_manager.explicit_log_dir={folder / 'run'}",
        f"model.encoder_seq_length={PROMPT + RESPONSE}",
        f"model.reinforce.length_params.max_length={RESPONSE}",
        f"trainer.devices={ranks}",
        "model.shared_prefix=false",  # the preflight plans padded rows; packed rows take no more
        *overrides,
    ]


def planned(overrides: list[str]) -> list[RankMemory]:
    cfg = load_config(compose(*overrides))
    inputs = read_inputs(cfg)
    assert inputs.faults == []
    assert inputs.layers is not None
    layout = layout_of(cfg)
    assert layout is not None
    batches = plan_batches(cfg, layout, inputs.datasets)
    return plan_memory(cfg, inputs, batches, gpu=False)


def measured(overrides: list[str]) -> Use:
    """Measure this rank after an optimizer step; a collective call."""
    cfg = load_config(compose(*overrides))
    model = cfg.model
    with parallel_mesh(
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
        sequence_parallel=model.sequence_parallel,
    ) as mesh:
        tokenizer = load_tokenizer(cfg.pretrained_checkpoint.restore_from_path)
        actor = build_actor(cfg, mesh, tokenizer)
        clip_grad = cfg.trainer.reinforce.gradient_clip_val
        built = build_optimizer(actor.ddp, cfg.model.optim, clip_grad=clip_grad, total_steps=10)
        optimizer = ActorOptimizer(*built)
        batch = full_batch(cfg, mesh.dp_size)
        count = float(len(batch.trains))
        rollouts = batch.rollouts
        where = (rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths)
        prompts = [
            Prompt(i, "", tuple([5 + i] * PROMPT))
            for i in range(len(set(rollouts.group_ids.tolist())))
        ]
        soon_ending = dataclasses.replace(actor.sampling, stop_token_ids=tuple(range(0, 2000, 5)))
        size = model.reinforce.rollout_micro_batch_size

        def train() -> None:
            actor.get_loss_and_metrics(batch, sequences(count))

        train()
        optimizer.step()
        return Use(
            weights=storage_bytes(actor.lm.parameters()),
            gradients=storage_bytes(buffer.grad_data for buffer in actor.ddp.buffers),
            optimizer=storage_bytes(states_of(built[0])) - shared_bytes(states_of(built[0]), actor),
            phases={
                "training": peak_of(train),
                "optimizer step": peak_of(optimizer.step),
                "log-probs": peak_of(lambda: actor.get_inference_log_probs(*where)),
                "generation": peak_of(
                    lambda: actor.generator.generate(
                        prompts[:size],
                        cfg.trainer.reinforce.num_rollouts_per_prompt,
                        soon_ending,
                        0,
                    )
                ),
            },
        )


def full_batch(cfg: TrainConfig, dp_size: int) -> ReinforceBatch:
    """Return one data-parallel rank's step with full-length sequences."""
    samples = cfg.trainer.reinforce.num_rollouts_per_prompt
    count = cfg.model.reinforce.num_rollout_samples // dp_size * samples
    nothing = torch.zeros(count)
    rollouts = RolloutBatch(
        sequences=torch.randint(
            5, 30, (count, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0)
        ),
        prompt_lengths=torch.full((count,), PROMPT),
        response_lengths=torch.full((count,), RESPONSE),
        group_ids=torch.arange(count) // samples,
        sample_ids=torch.arange(count) % samples,
        finish_reasons=("length",) * count,
        rewards=nothing,
        valid=torch.ones(count, dtype=torch.bool),
    )
    trains = torch.ones(count, dtype=torch.bool)
    return ReinforceBatch(rollouts, nothing, nothing, nothing, torch.ones(count, RESPONSE), trains)


def states_of(optimizer: Any) -> list[Tensor]:
    """Return Adam's moments and fp32 weights."""
    states: list[Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            states += group["params"]
        for state in part.optimizer.state.values():
            states += [value for value in state.values() if isinstance(value, Tensor)]
    return states


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storages(tensors).values())


def shared_bytes(tensors: Iterable[Tensor], actor: MegatronGPTReinforceActorModel) -> int:
    """Count the bytes that are shared with the model's own weights."""
    weights = storages(actor.lm.parameters())
    return sum(size for place, size in storages(tensors).items() if place in weights)


def peak_of(action: Callable[[], Any]) -> int:
    """Return the most bytes that an action holds at a time beyond the bytes held before it.

    gloo's threads release tensors, but the profiler only watches this thread and counts them as
    held. Their memory counts as free as soon as it is allocated again, so collectives still appear
    to hold somewhat more than they do.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    profiler: Any = record.profiler
    nodes = list(profiler.kineto_results.experimental_event_tree())
    events = []
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.typed[0].name == "Allocation":
            events.append((node.start_time_ns, node.typed[1].ptr, node.typed[1].alloc_size))
    there: dict[int, int] = {}
    now = 0
    most = 0
    for _, place, size in sorted(events):
        if size > 0:
            now += size - there.pop(place, 0)
            there[place] = size
        else:
            now += size
            there.pop(place, None)
        most = max(most, now)
    return most
