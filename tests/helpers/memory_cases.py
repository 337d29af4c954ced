"""Configurations whose memory is planned and measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    ranks: int
    overrides: tuple[str, ...]


TP2, PP2, CP2 = (f"model.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline", "context"))
CP2 = "model.context_parallel_size=2"
SP, DISTRIBUTED, BF16 = "model.sequence_parallel=true", "model.optim.distributed=true", "trainer.precision=bf16"
LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=8")
_FULL = "model.activations_checkpoint_granularity=full"
UNIFORM = (_FULL, "model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=1")
UNIFORM_2 = (_FULL, "model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=2")
BLOCK = (_FULL, "model.activations_checkpoint_method=block", "model.activations_checkpoint_num_layers=2")
ATTENTION_ONLY = "model.peft.lora_tuning.target_modules=[q_proj,v_proj]"

CASES = {
    "one": Case(1, ()),
    "large micro-batch": Case(1, ("model.micro_batch_size=8",)),
    "small micro-batch": Case(1, ("model.micro_batch_size=1", "model.reinforce.rollout_micro_batch_size=1")),
    "small chunk": Case(1, ("model.logits_chunk_tokens=32",)),
    "tokens": Case(1, ("model.tokens_per_micro_batch=1200",)),
    "full": Case(1, UNIFORM),
    "full in twos": Case(1, UNIFORM_2),
    "block": Case(1, BLOCK),
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
