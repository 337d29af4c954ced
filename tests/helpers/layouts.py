"""Parallel layouts, and an actor's results that must not depend on them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers.batches import actor_of, gradient_of, rows_of, sequences, whole_batch, whole_vector
from helpers.lora import EVERY, load_updates, random_updates
from helpers.policies import random_prompts
from helpers.ranks import one_group

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import Completions
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.hf_weights import hf_tensors
from reinforce_rl.megatron.lora import LoraSettings, MergedWeights, lora_settings_of
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


# Words in a layout's name.
WORDS: dict[str, dict[str, Any]] = {
    "SP": {"sp": True},
    "distributed optimizer": {"optim": OptimConfig(distributed=True, overlap_grad_sync=True)},
    "full recompute": {
        "model": ModelOptions(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
    },
    "block recompute": {
        "model": ModelOptions(
            recompute_granularity="full", recompute_method="block", recompute_num_layers=1
        )
    },
    "selective recompute": {"model": ModelOptions(recompute_granularity="selective")},
    "uneven": {"model": ModelOptions(overrides={"num_layers_in_first_pipeline_stage": 3})},
    "bf16": {"dtype": torch.bfloat16},
    "LoRA": {"updates": EVERY},
}


def named_layouts(*names: str) -> dict[str, Layout]:
    layouts = {}
    for name in names:
        options: dict[str, Any] = {}
        for kind, size in re.findall(r"([TPCD]P)(\d)", name):
            options[kind.lower()] = int(size)
        for words, values in WORDS.items():
            if words in name:
                options |= values
        layouts[name] = Layout(**options)
    return layouts


LAYOUTS = named_layouts(
    "TP2",
    "TP2 SP",
    "PP2",
    "CP2",
    "DP2",
    "DP2 distributed optimizer",
    "CP2 distributed optimizer",
    "TP2 SP full recompute",
    "PP2 block recompute",
    "CP2 selective recompute",
    "PP2 uneven",
    "TP2 DP2",
    "TP2 PP2 SP",
    "TP2 PP2",
    "PP2 DP2",
    "TP2 CP2",
    "TP2 CP2 SP",
    "CP2 DP2",
    "PP2 CP2",
    "PP4",
    "TP4 SP",
    "CP4",
    "DP4",
    "PP2 DP2 distributed optimizer",
)
BF16_LAYOUTS = named_layouts(
    "TP2 SP bf16", "PP2 bf16", "CP2 bf16", "DP2 distributed optimizer bf16"
)
LORA_LAYOUTS = named_layouts(
    "TP2 SP LoRA",
    "PP2 LoRA",
    "CP2 LoRA",
    "DP2 distributed optimizer LoRA",
    "TP2 PP2 SP LoRA",
    "PP2 DP2 distributed optimizer LoRA",
)
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
    greedy = SamplingParams(max_length=12, use_greedy=True)
    results: dict[str, Any] = {"losses": [], "norms": []}
    results["greedy"] = generated(actor, greedy)
    results["sampled"] = generated(actor, sampled)
    results["bounded"] = generated(actor, sampled, cache_tokens=40)
    results["log_probs"] = over_dp(actor, actor.get_inference_log_probs(*where))
    results["weights_before"] = weights(actor)
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS))
    for step in range(NUM_STEPS):
        share = actor.get_loss_and_metrics(mine, sequences(NUM_VALID))
        loss = torch.tensor(share.loss, dtype=torch.float64)
        results["losses"].append(float(mesh.sum_over_dp(loss)))
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
    prompts = random_prompts(61, (2, 4, 6, 8))
    per_rank = len(prompts) // actor.mesh.dp_size
    local_prompts = prompts[actor.mesh.dp_rank * per_rank : (actor.mesh.dp_rank + 1) * per_rank]
    generator = NativeGenerator(actor.lm, actor.tokenizer, cache_tokens)
    done: Completions = generator.generate(local_prompts, 3, params, seed=3)
    assert done.log_probs is not None
    mine = []
    for row, length in enumerate(done.lengths.tolist()):
        mine.append((done.tokens[row, :length].tolist(), done.log_probs[row, :length]))
    tokens = []
    log_probs = []
    for part in actor.mesh.gather_over_dp(mine):
        for of_tokens, of_log_probs in part:
            tokens.append(of_tokens)
            log_probs.append(of_log_probs)
    return {"tokens": tokens, "log_probs": torch.cat(log_probs)}


def over_dp(actor: MegatronGPTReinforceActorModel, values: torch.Tensor) -> torch.Tensor:
    parts = actor.mesh.gather_over_dp(values)
    width = max(part.shape[1] for part in parts)
    padded = []
    for part in parts:
        padding = (0, width - part.shape[1])
        padded.append(torch.nn.functional.pad(part, padding))
    return torch.cat(padded)


def weights(actor: MegatronGPTReinforceActorModel) -> torch.Tensor:
    merged = None if lora_settings_of(actor.lm) is None else MergedWeights(actor.lm)
    return whole_vector(actor.lm, hf_tensors(actor.lm, merged))


def on_layouts(
    names: Sequence[str], compute: Callable[..., Any], folder: Path, out: Path
) -> dict[str, Any]:
    """Return what `compute` returns at each layout; its files are in OUT/NAME."""
    results = {}
    with one_group():
        for name in names:
            with ALL_LAYOUTS[name].mesh() as mesh:
                results[name] = compute(ALL_LAYOUTS[name], folder, mesh, out / name)
    return results
