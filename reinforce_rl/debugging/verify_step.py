"""One training step measured phase by phase, and the comparison of two measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Prompt, ReinforceBatch
from reinforce_rl.debugging.gradient import accumulate
from reinforce_rl.megatron.hf_weights import hf_tensors, parameters_of
from reinforce_rl.megatron.lora import MergedWeights, lora_settings_of
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.run import DefaultBatchIterator
from reinforce_rl.runtime.phases import Activity, StepClock
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.trainer.rollouts import RolloutMaker

SAMPLES, DRAWN, LOG_PROBS = "samples", "log-probs of the samples", "log-probs"
UPDATE, GRADIENT, WEIGHTS = "log-probs of the update", "gradient", "weights after the step"
PHASES = (SAMPLES, DRAWN, LOG_PROBS, UPDATE, GRADIENT, WEIGHTS)  # as they follow on one another
OF_GENERATION, OF_UPDATE = (SAMPLES, DRAWN), (UPDATE, GRADIENT)

# Of trainer.precision=32 and bf16. SmolLM2-135M on a CPU has differences of up to 5e-5 nats and 1.3e-5 of the gradient
# in 32, of 0.3 nats and 2e-2 in bf16; a model of two layers has 1e-6 of both in 32.
BOUNDS: dict[str, tuple[float, float]] = {
    # Share of responses with another token. Noise is keyed by prompt, sample and position, so a token changes only
    # where rounding decides between two; in bf16 that is common, and then all later tokens differ.
    SAMPLES: (0.0, 0.75),
    # Largest difference of a token, in nats: other kernels, and sums of another order.
    DRAWN: (5e-4, 0.75),
    LOG_PROBS: (5e-4, 0.75),
    UPDATE: (5e-4, 0.75),
    # Norm of a tensor's difference, relative to the norm of the whole gradient. The largest element is no measure: a
    # few channels with huge activations have sums that cancel.
    GRADIENT: (1e-4, 0.1),
    # The same of what the step adds to the weights. Adam divides by the gradient's size, so where a gradient is nearly
    # 0 rounding decides in which direction a weight goes.
    WEIGHTS: (1e-2, 0.3),
}

Named = dict[str, Tensor]  # by sample, or by tensor in Hugging Face's names
Measured = dict[str, Named]  # by phase


@dataclass(frozen=True)
class Check:
    """A phase of a variation, compared with the step as configured."""

    setting: str
    compared: str
    difference: float = math.nan  # NaN if it was not tried
    bound: float = math.nan
    detail: str = ""  # the first tensor or sample beyond the bound; or why it was not tried
    failed: bool = False  # it could not be computed at all

    @property
    def verdict(self) -> str:
        if self.failed or not self.has_numbers:
            return "FAILED" if self.failed else "not tried"
        return "DIFFERS" if self.difference > self.bound else "ok"

    @property
    def has_numbers(self) -> bool:
        return not math.isnan(self.difference)


def rollout_maker(
    cfg: TrainConfig, actor: MegatronGPTReinforceActorModel, rm: RewardSource | None = None, loader: Any = None
) -> RolloutMaker:
    """Return what samples as a run of `cfg` does; without `loader` only `sample` may be called."""
    rollout = cfg.model.reinforce
    cut = partial(DefaultBatchIterator, rollout.rollout_micro_batch_size, rollout.val_rollout_micro_batch_size)
    clock = StepClock(Activity(), actor.mesh.device)
    return RolloutMaker(cfg.trainer.reinforce, actor, rm, cut, loader, clock, StopRequest())


@dataclass(frozen=True)
class Step:
    prompts: list[Prompt]  # of all ranks
    data: ReinforceBatch  # of all ranks, prompt by prompt

    def measure(
        self, cfg: TrainConfig, actor: MegatronGPTReinforceActorModel, phases: Sequence[str] = PHASES
    ) -> Measured:
        """Measure phases of the step; a collective call, whose result is whole on the first rank."""
        found: Measured = {}
        rollouts, optimizer = self.data.rollouts, None
        if WEIGHTS in phases:  # as it is made, the model learns how gradients are summed over ranks
            clip = cfg.trainer.reinforce.gradient_clip_val
            parts = build_optimizer(actor.ddp, cfg.model.optim, clip_grad=clip, total_steps=2)
            optimizer = ActorOptimizer(*parts, actor.ddp)
        if SAMPLES in phases:
            found |= self._samples(cfg, actor)
        if LOG_PROBS in phases:
            where = (rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths, rollouts.group_ids)
            found[LOG_PROBS] = self._by_sample(actor.get_inference_log_probs(*where))
        if GRADIENT in phases:
            found |= self._update(cfg, actor)
        if optimizer is not None:
            before = _weights(actor.lm)
            optimizer.step()
            found[WEIGHTS] = {name: one.sub_(before.pop(name)) for name, one in _weights(actor.lm).items()}
        return found

    def _samples(self, cfg: TrainConfig, actor: MegatronGPTReinforceActorModel) -> Measured:
        own = [
            self.prompts[row]
            for row in torch.arange(len(self.prompts)).tensor_split(actor.mesh.dp_size)[actor.mesh.dp_rank]
        ]
        batch = rollout_maker(cfg, actor).sample(own, cfg.trainer.reinforce.num_rollouts_per_prompt, step=1).batch
        found: Measured = {SAMPLES: {}, DRAWN: {}}
        for row, name in enumerate(_names(batch.group_ids, batch.sample_ids)):
            start, length = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
            found[SAMPLES][name] = batch.sequences[row, start : start + length].clone()
            if batch.generator_log_probs is not None:
                found[DRAWN][name] = batch.generator_log_probs[row, :length].clone()
        parts = actor.mesh.gather_over_dp(found)
        return {phase: {name: one for part in parts for name, one in part[phase].items()} for phase in found}

    def _update(self, cfg: TrainConfig, actor: MegatronGPTReinforceActorModel) -> Measured:
        mesh, lm, rl = actor.mesh, actor.lm, cfg.trainer.reinforce
        groups = torch.arange(len(self.data.trains)).view(len(self.prompts), -1)
        rows = groups.tensor_split(mesh.dp_size)[mesh.dp_rank].flatten()
        share = accumulate(actor, self.data, rl, rl.initial_policy_kl_penalty, rows)
        parts: Any = mesh.gather_over_dp(share.log_probs)  # NaN for rows of another rank, and untrained ones
        found: Measured = {UPDATE: self._by_sample(torch.stack(parts).nan_to_num(0.0).sum(dim=0))}
        gradients: Any = {name: getattr(one, "main_grad", None) for name, one in parameters_of(lm).items()}
        if actor.ddp.ddp_config.use_distributed_optimizer:
            return found  # no rank has the whole gradient
        if lora_settings_of(lm) is None:
            found[GRADIENT] = {name: one for name, one in hf_tensors(lm, gradients) if one is not None}
        elif mesh.tp_size == mesh.pp_size == 1:
            found[GRADIENT] = {name: one.cpu().clone() for name, one in gradients.items() if one is not None}
        return found

    def _by_sample(self, values: Tensor) -> Named:
        rollouts = self.data.rollouts
        found = [row[:length].clone() for row, length in zip(values, rollouts.response_lengths.tolist(), strict=True)]
        return dict(zip(_names(rollouts.group_ids, rollouts.sample_ids), found, strict=True))


def _names(group_ids: Tensor, sample_ids: Tensor) -> list[str]:
    return [f"prompt {g} sample {s}" for g, s in zip(group_ids.tolist(), sample_ids.tolist(), strict=True)]


def _weights(lm: CausalLM) -> Named:
    merged = None if lora_settings_of(lm) is None else MergedWeights(lm)
    return {name: one for name, one in hf_tensors(lm, merged, dtype=torch.float32) if one is not None}


def checks(setting: str, base: Measured, found: Measured, cfg: TrainConfig) -> list[Check]:
    """Compare every phase of `found` with that of the step as configured."""
    base = dict(base)
    if DRAWN in found:  # where the tokens are the same
        same = [name for name, one in base[SAMPLES].items() if torch.equal(one, found[SAMPLES].get(name, one[:0]))]
        base[DRAWN] = {name: one for name, one in base[DRAWN].items() if name in same}
    bounds = {phase: BOUNDS[phase][cfg.trainer.precision == "bf16"] for phase in found}
    return [check(setting, phase, base[phase], named, bounds[phase]) for phase, named in found.items()]


def check(setting: str, phase: str, base: Named, found: Named, bound: float) -> Check:
    """Compare a phase, one that is not in BOUNDS relative to its largest element."""
    has_norm = phase in (GRADIENT, WEIGHTS)
    scale, size_of = 1.0, Tensor.norm if has_norm else lambda one: one.abs().max()
    if has_norm or phase not in BOUNDS:
        sizes = [float(size_of(one.double())) for one in base.values()]
        scale = math.hypot(*sizes) if has_norm else max(sizes, default=0.0)

    def gap(one: Tensor, other: Tensor | None) -> float:
        if other is None or one.shape != other.shape or phase == SAMPLES:
            is_same = other is not None and torch.equal(one, other)
            return float(not is_same) if phase == SAMPLES else math.inf
        size = float(size_of(one.double() - other.double())) if one.numel() else 0.0
        return size and (size / scale if scale > 0 and size == size else math.inf)  # NaN is beyond every bound

    gaps = {name: gap(one, found.get(name)) for name, one in base.items()}
    largest = sum(gaps.values()) / max(len(gaps), 1) if phase == SAMPLES else max(gaps.values(), default=0.0)
    beyond, detail = [name for name, one in gaps.items() if one > bound], ""
    if largest > bound:
        worst = max(beyond, key=gaps.__getitem__)
        detail = f"first in {beyond[0]}, in {len(beyond)} of {len(gaps)}, most in {worst}"
    return Check(setting, phase, largest, bound, detail)
