"""Parallel layouts, and an actor's results that must not depend on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from helpers.batches import actor_of, flat, gradient_of, rows_of, sequences, whole_batch
from helpers.lora import load_updates, random_updates
from helpers.policies import random_tokens
from helpers.ranks import one_group

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.hf_weights import hf_tensors
from reinforce_rl.megatron.lora import PROJECTIONS, LoraSettings, MergedWeights, lora_settings_of
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.model import ModelOptions
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

NUM_VALID = 10
NUM_STEPS = 3
# With a smaller eps, the sign of a near-zero gradient would decide the step of a weight.
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.0, betas=[0.9, 0.95], eps=1e-3)
SETTINGS: dict[str, Any] = {"optim": OPTIM, "clip_grad": 1.0, "total_steps": 10}


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    sp: bool = False
    model: ModelOptions = field(default_factory=ModelOptions)
    optim: OptimConfig = field(default_factory=OptimConfig)
    dtype: torch.dtype = torch.float32
    updates: LoraSettings | None = None

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @contextlib.contextmanager
    def mesh(self) -> Iterator[Mesh]:
        with parallel_mesh(self.tp, self.pp, self.cp, sequence_parallel=self.sp) as mesh:
            yield mesh


FULL = ModelOptions(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
BLOCK = ModelOptions(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = ModelOptions(recompute_granularity="selective")
DISTRIBUTED = OptimConfig(distributed=True, overlap_grad_sync=True)
LAYOUTS = {
    "TP2": Layout(tp=2),
    "TP2 SP": Layout(tp=2, sp=True),
    "PP2": Layout(pp=2),
    "CP2": Layout(cp=2),
    "DP2": Layout(dp=2),
    "DP2 distributed optimizer": Layout(dp=2, optim=DISTRIBUTED),
    "CP2 distributed optimizer": Layout(cp=2, optim=DISTRIBUTED),
    "TP2 SP full recompute": Layout(tp=2, sp=True, model=FULL),
    "PP2 block recompute": Layout(pp=2, model=BLOCK),
    "CP2 selective recompute": Layout(cp=2, model=SELECTIVE),
    "PP2 uneven": Layout(
        pp=2, model=ModelOptions(overrides={"num_layers_in_first_pipeline_stage": 3})
    ),
    "TP2 DP2": Layout(tp=2, dp=2),
    "TP2 PP2 SP": Layout(tp=2, pp=2, sp=True),
    "TP2 PP2": Layout(tp=2, pp=2),
    "PP2 DP2": Layout(pp=2, dp=2),
    "TP2 CP2": Layout(tp=2, cp=2),
    "TP2 CP2 SP": Layout(tp=2, cp=2, sp=True),
    "CP2 DP2": Layout(cp=2, dp=2),
    "PP2 CP2": Layout(pp=2, cp=2),
    "PP4": Layout(pp=4),
    "TP4 SP": Layout(tp=4, sp=True),
    "CP4": Layout(cp=4),
    "DP4": Layout(dp=4),
    "PP2 DP2 distributed optimizer": Layout(pp=2, dp=2, optim=DISTRIBUTED),
}

BF16_LAYOUTS = {
    f"{name} bf16": replace(LAYOUTS[name], dtype=torch.bfloat16)
    for name in ("TP2 SP", "PP2", "CP2", "DP2 distributed optimizer")
}
LORA = LoraSettings(rank=3, alpha=7.0, targets=PROJECTIONS, seed=5)
LORA_LAYOUTS = {
    f"{name} LoRA": replace(LAYOUTS[name], updates=LORA)
    for name in (
        "TP2 SP",
        "PP2",
        "CP2",
        "DP2 distributed optimizer",
        "TP2 PP2 SP",
        "PP2 DP2 distributed optimizer",
    )
}
ALL_LAYOUTS = LAYOUTS | BF16_LAYOUTS | LORA_LAYOUTS


def computed(
    layout: Layout, folder: str | Path, mesh: Mesh, out: Path | None = None
) -> dict[str, Any]:
    """Compute all results that must not depend on the layout; a collective call.

    `out` is the export folder of the trained policy, if any.
    """
    options: dict[str, Any] = {"model": layout.model, "optim": layout.optim, "dtype": layout.dtype}
    actor = actor_of(folder, mesh, with_reference=True, updates=layout.updates, **options)
    if layout.updates is not None:
        load_updates(actor.lm, random_updates(Path(folder), layout.updates))
    batch = whole_batch()
    per_rank = len(batch.trains) // mesh.dp_size
    rows = list(range(mesh.dp_rank * per_rank, (mesh.dp_rank + 1) * per_rank))
    mine = rows_of(batch, rows)
    where = (mine.rollouts.sequences, mine.rollouts.prompt_lengths, mine.rollouts.response_lengths)

    sampled = SamplingParams(max_length=12, stop_token_ids=(2, 5, 6, 7), repetition_penalty=1.2)
    results: dict[str, Any] = {
        "greedy": generated(actor, SamplingParams(max_length=12, use_greedy=True)),
        "sampled": generated(actor, sampled),
        "bounded": generated(actor, sampled, cache_tokens=40),
        "log_probs": over_dp(actor, actor.get_inference_log_probs(*where)),
        "weights_before": weights(actor),
        "losses": [],
        "norms": [],
    }
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS))
    for step in range(NUM_STEPS):
        share = actor.get_loss_and_metrics(mine, sequences(NUM_VALID))
        results["losses"].append(
            float(mesh.sum_over_dp(torch.tensor(share.loss, dtype=torch.float64)))
        )
        # With the distributed optimizer no rank has the whole gradient, and frozen weights have
        # none; steps are compared instead.
        if step == 0 and not layout.optim.distributed and layout.updates is None:
            results["gradient"] = gradient_of(actor)
        results["norms"].append(optimizer.step().grad_norm)
    results["weights"] = weights(actor)
    results["log_probs_after"] = over_dp(actor, actor.get_inference_log_probs(*where))
    results["reference_log_probs"] = over_dp(actor, actor.get_init_policy_logprobs(*where))
    if out is not None:
        actor.export(folder, out)
    return results


def generated(
    actor: MegatronGPTReinforceActorModel, params: SamplingParams, cache_tokens: int | None = None
) -> dict[str, Any]:
    """Generate three samples of four prompts, split over the data-parallel ranks."""
    prompts = [
        Prompt(i, "", tuple(row[: 2 + 2 * i]))
        for i, row in enumerate(random_tokens(61, 4, 9).tolist())
    ]
    per_rank = len(prompts) // actor.mesh.dp_size
    local_prompts = prompts[actor.mesh.dp_rank * per_rank : (actor.mesh.dp_rank + 1) * per_rank]
    generator = NativeGenerator(actor.lm, actor.tokenizer, cache_tokens)
    done: Completions = generator.generate(local_prompts, 3, params, seed=3)
    assert done.log_probs is not None
    rows = zip(done.tokens, done.log_probs, done.lengths.tolist(), strict=True)
    mine = [(tokens[:length].tolist(), log_probs[:length]) for tokens, log_probs, length in rows]
    every = [row for part in actor.mesh.gather_over_dp(mine) for row in part]
    return {"tokens": [row[0] for row in every], "log_probs": torch.cat([row[1] for row in every])}


def over_dp(actor: MegatronGPTReinforceActorModel, values: torch.Tensor) -> torch.Tensor:
    parts = actor.mesh.gather_over_dp(values)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


def weights(actor: MegatronGPTReinforceActorModel) -> torch.Tensor:
    merged = None if lora_settings_of(actor.lm) is None else MergedWeights(actor.lm)
    tensors: Any = dict(hf_tensors(actor.lm, merged))
    return actor.mesh.from_model_parallel_rank_0(
        flat(tensors) if actor.mesh.is_model_parallel_rank_0 else None
    )


def computed_on_ranks(folder: Path, names: Sequence[str], out: Path) -> dict[str, dict[str, Any]]:
    """Return the results of several layouts; a policy is exported to OUT/NAME."""
    results: dict[str, dict[str, Any]] = {}
    with one_group():
        for name in names:
            with ALL_LAYOUTS[name].mesh() as mesh:
                results[name] = computed(ALL_LAYOUTS[name], folder, mesh, out / name)
    return results
