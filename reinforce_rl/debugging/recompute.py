"""Other settings on stored rollouts: `reinforce-rl replay RUN --step N KEY=VALUE ...`.

Recomputes advantages and gradients of recorded steps by the trainer's own functions, with the run's
settings and with overrides.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.debugging.gradient import Gradients, gradients_before
from reinforce_rl.debugging.overrides import OverriddenSettings, changes_results
from reinforce_rl.debugging.recompute_results import (
    ZERO,
    Recomputation,
    SampleChange,
    StepChange,
    correlation,
    cosine,
)
from reinforce_rl.debugging.rescore import Rescorer
from reinforce_rl.debugging.stored import StoredRun, StoredStep
from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.monitoring.metrics import group_spread
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.view import frozen_page
from reinforce_rl.rollout.scoring import with_valid
from reinforce_rl.trainer.advantages import reinforce_batch, shaped_rewards
from reinforce_rl.trainer.state import RunningBaselines, depends_on_past
from reinforce_rl.utils.files import write_atomically

TOLERANCE = 1e-6  # of recomputed advantages: rounding
PHASES = ("all", "advantages", "update")


def recompute(
    run: str | Path,
    steps: str | None = None,
    overrides: Sequence[str] = (),
    *,
    phase: str = "all",
    trust: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> Recomputation:
    """Recompute recorded steps with the run's own settings and with overrides, and compare the two.

    Args:
        run: folder of a run.
        steps: `10:20` with both ends, `10:`, `:20` or `12`; None for the last one recorded.
        overrides: KEY=VALUE of `train`, on top of the run's settings.
        phase: `update` also compares the gradients, on the newest checkpoint before the first of
            these steps; so does `all` where an override is a setting of the loss.
        trust: use functions, addresses and the like that only the folder names, if an override
            changes rewards.
        say: called with each of them before it is used.

    Raises:
        ConfigError: overrides are wrong, or change nothing on stored rollouts. Has all faults in
            one message.
        DataError: the record lacks a step or values of it, or does not give the recorded
            advantages.
    """
    if phase not in PHASES:
        sentence = (
            f"--phase is {phase!r}, but changed settings and several steps are computed from "
            f"stored rollouts; expected one of {', '.join(PHASES)}"
        )
        raise ConfigError([Fault(sentence, key="replay.phase.of_one_step")])
    stored = StoredRun(run)
    chosen = _chosen_steps(stored, steps)
    with_loss = phase != "advantages"
    settings = _SettingsBySteps(
        stored,
        list(overrides),
        with_loss=with_loss,
        trust=trust,
        say=say,
    )
    last = settings.of(chosen[-1])
    is_stateful = [
        depends_on_past(last.recorded.trainer.reinforce),
        depends_on_past(last.reinforce),
    ]
    first = chosen[0]
    if any(is_stateful):
        _check_all_before(stored, chosen[0], "overrides" if is_stateful[1] else "run's settings")
        first = 1
    with_gradient = phase == "update" or (phase == "all" and last.changes_loss)
    sides = (_Side(), _Side())
    changes: list[StepChange] = []
    largest_difference = 0.0
    rescorer: Rescorer | None = None
    gradients: Gradients | None = None
    with contextlib.ExitStack() as stack:
        if with_gradient or last.changes_rewards:
            mesh = stack.enter_context(parallel_mesh())
            if last.changes_rewards:
                rescorer = Rescorer(last.cfg, mesh)
                stack.enter_context(contextlib.closing(rescorer))
            if with_gradient:
                before = gradients_before(stored.path, last.cfg, chosen[0], mesh)
                gradients = stack.enter_context(before)
        for number in range(first, chosen[-1] + 1):
            of_step = settings.of(number)
            step = stored.step(number)
            pair = _recomputed_pair(sides, step, of_step, rescorer)
            if number in chosen:
                largest_difference = max(largest_difference, _check_recorded(step, pair[0]))
                changes.append(_change_of_step(step, sides, pair, of_step, gradients))
            for side, batch in zip(sides, pair, strict=True):
                side.past.add(batch, lambda columns: [columns])
    return Recomputation(
        run=stored.run.name,
        settings=last.changes,
        steps=changes,
        checkpoint=gradients.step if gradients else None,
        largest_difference=largest_difference,
        notes=_notes(changes, last),
    )


def write_page(recomputation: Recomputation, run: str | Path, html: Path) -> None:
    """Write the run's page with figures of what changed."""
    folder = StoredRun(run).run
    content = overview(folder) | {"figures": recomputation.figures()}
    write_atomically(html, frozen_page({folder.name: (folder, content)}))


def is_recomputed(run: str | Path, steps: str | None, overrides: Sequence[str]) -> bool:
    """Return whether a replay only recomputes stored rollouts: several steps, or other settings.

    Raises the errors of `recompute`.
    """
    if steps is not None and ":" in steps:
        return True
    if not overrides:
        return False
    stored = StoredRun(run)
    step = _chosen_steps(stored, steps)[-1]
    return changes_results(stored.settings(step)[0], overrides)


class _SettingsBySteps:
    """The settings of each step, which may change at a resume.

    Steps with equal settings share an object.
    """

    def __init__(
        self,
        stored: StoredRun,
        overrides: list[str],
        *,
        with_loss: bool,
        trust: bool,
        say: Callable[[str], object],
    ):
        self._with_loss = with_loss
        self._stored = stored
        self._overrides = overrides
        self._trust = trust
        self._say = say
        self._by_recorded: dict[int, OverriddenSettings] = {}

    def of(self, step: int) -> OverriddenSettings:
        recorded, faults = self._stored.settings(step)
        if id(recorded) not in self._by_recorded:
            self._by_recorded[id(recorded)] = OverriddenSettings(
                self._stored.path,
                recorded,
                faults,
                self._overrides,
                with_loss=self._with_loss,
                trust=self._trust,
                say=self._say,
            )
        return self._by_recorded[id(recorded)]


class _Side:
    """One of the two sets of settings, with the running statistics of its earlier steps."""

    past: RunningBaselines
    _cfg: ReinforceConfig | None = None

    def recompute(
        self, step: StoredStep, batch: RolloutBatch, cfg: ReinforceConfig, max_length: int
    ) -> ReinforceBatch:
        if cfg is not self._cfg:
            past = RunningBaselines(cfg)
            if self._cfg is not None:
                # A resume with other settings loads this state too.
                past.load_state_dict(self.past.state_dict())
            self.past = past
            self._cfg = cfg
        step.needs(cfg)
        if not cfg.uses_reference:
            batch = replace(batch, init_log_probs=None)
        batch = with_valid(batch, cfg.truncated_samples)
        return reinforce_batch(batch, cfg, self.past, step=step.step, max_length=max_length)

    def clipped_share(self, data: ReinforceBatch, cfg: ReinforceConfig, max_length: int) -> float:
        """Return the share of valid samples whose shaped reward `reward_shaping.clip` changes."""
        batch = data.rollouts
        shaping = cfg.reward_shaping.model_copy(update={"clip": None})
        unclipped = shaped_rewards(
            batch.rewards,
            batch.valid,
            batch.policy_lengths,
            batch.is_end,
            cfg.model_copy(update={"reward_shaping": shaping}),
            self.past.scores,
            max_length=max_length,
        )
        assert data.shaped_rewards is not None
        return _mean((unclipped != data.shaped_rewards)[batch.valid])


def _recomputed_pair(
    sides: tuple[_Side, _Side],
    step: StoredStep,
    settings: OverriddenSettings,
    rescorer: Rescorer | None,
) -> tuple[ReinforceBatch, ReinforceBatch]:
    """Return a step's batch with the recorded settings, and with the overrides."""
    recorded = settings.recorded.trainer.reinforce
    before = sides[0].recompute(step, step.batch, recorded, settings.max_length)
    batch = step.batch if rescorer is None else rescorer(step)
    after = sides[1].recompute(step, batch, settings.reinforce, settings.max_length)
    return before, after


def _chosen_steps(stored: StoredRun, steps: str | None) -> range:
    recorded = stored.run.sample_steps()
    if not recorded:
        raise DataError(
            f"{stored.path} has no record of a training step; expected files in "
            f"{stored.path / 'rollouts'}",
            key="replay.run.no_steps",
        )
    text = str(recorded[-1]) if steps is None else steps
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if match is None or not (match[1] or match[3]):
        expected = "a step such as 12, or a range such as 10:20, 10: or :20"
        sentence = f"--step is {text!r}; expected {expected}"
        raise ConfigError([Fault(sentence, key="replay.step.invalid")])
    first = int(match[1] or recorded[0])
    last = int(match[3] or recorded[-1]) if match[2] else first
    if first > last:
        sentence = (
            f"--step is {text!r}, whose first step is after its last; the run has recorded steps "
            f"{recorded[0]} to {recorded[-1]}"
        )
        raise ConfigError([Fault(sentence, key="replay.step.backwards")])
    for number in range(first, last + 1):
        if number not in recorded:
            stored.run.samples(number)  # raises DataError with the steps that there are
    return range(first, last + 1)


def _check_all_before(stored: StoredRun, first: int, whose: str) -> None:
    missing = sorted(set(range(1, first)) - set(stored.run.sample_steps()))
    if missing:
        raise DataError(
            f"the {whose} carry a state from step to step (a baseline of past rewards, "
            f"standardization=running or kl_target), but {stored.path / 'rollouts'} lacks step "
            f"{missing[0]}; expected all steps from 1 on. Use settings without a state, or restore "
            "the missing files",
            key="replay.step.missing_before",
        )


def _check_recorded(step: StoredStep, data: ReinforceBatch) -> float:
    """Return the largest difference from the recorded advantages.

    Raises DataError if it is larger than rounding.
    """
    recorded = torch.tensor([row.advantage for row in step.rows], dtype=torch.float64)
    differences = (data.sequence_advantages.double() - recorded).abs().nan_to_num(math.inf)
    # The order of float32 sums over a response's tokens depends on the number of ranks.
    scale = max(1.0, _largest(recorded), _largest(data.kl[data.rollouts.valid]))
    worst = int(differences.argmax())
    if float(differences[worst]) > TOLERANCE * scale:
        row = step.rows[worst]
        advantage = float(data.sequence_advantages[worst])
        raise DataError(
            f"step {step.step}: the run's own settings give prompt {row.prompt_id}, sample "
            f"{row.sample_id} the advantage {advantage:.6g}, but its record has "
            f"{row.advantage:.6g}; expected the same within {TOLERANCE * scale:.0e}. The record or "
            "config.yaml was changed, or was written by another version of reinforce_rl: use that "
            "version",
            key="replay.advantages.differ",
        )
    return float(differences[worst])


def _change_of_step(
    step: StoredStep,
    sides: tuple[_Side, _Side],
    pair: tuple[ReinforceBatch, ReinforceBatch],
    settings: OverriddenSettings,
    gradients: Gradients | None,
) -> StepChange:
    recorded = settings.recorded.trainer.reinforce
    max_length = settings.max_length
    before = _SideOfStep.of(step, sides[0], pair[0], recorded, max_length, gradients)
    after = _SideOfStep.of(step, sides[1], pair[1], settings.reinforce, max_length, gradients)
    samples = [
        SampleChange(
            step=step.step,
            prompt_id=row.prompt_id,
            sample_id=row.sample_id,
            response=row.response,
            valid=(bool(before.valid[i]), bool(after.valid[i])),
            reward=(float(before.rewards[i]), float(after.rewards[i])),
            advantage=(float(before.advantages[i]), float(after.advantages[i])),
        )
        for i, row in enumerate(step.rows)
    ]
    is_valid = before.valid | after.valid
    change = StepChange(
        step=step.step,
        samples=samples,
        sign_changes=sum(sample.changes_sign for sample in samples),
        correlation=correlation(before.advantages[is_valid], after.advantages[is_valid]),
        group_spread=(before.group_spread, after.group_spread),
        groups_with_zero_std=(before.groups_with_zero_std, after.groups_with_zero_std),
        without_advantage=(before.without_advantage, after.without_advantage),
        clipped=(before.clipped, after.clipped),
    )
    if before.gradient is None or after.gradient is None:
        return change
    return replace(
        change,
        capped=(before.capped, after.capped),
        cosine=cosine(before.gradient, after.gradient),
    )


@dataclass(frozen=True)
class _SideOfStep:
    """Results of one set of settings for a step: [N] over its samples, and means."""

    valid: Tensor
    rewards: Tensor
    advantages: Tensor
    group_spread: float
    groups_with_zero_std: float
    without_advantage: float
    clipped: float
    gradient: Tensor | None = None
    capped: float = math.nan

    @classmethod
    def of(
        cls,
        step: StoredStep,
        side: _Side,
        data: ReinforceBatch,
        cfg: ReinforceConfig,
        max_length: int,
        gradients: Gradients | None,
    ) -> _SideOfStep:
        rollouts = data.rollouts
        advantages = data.sequence_advantages
        valid = rollouts.valid
        spread, has_zero_std = group_spread(data.rewards_with_kl, rollouts.group_ids, valid)
        numbers = cls(
            valid=valid,
            rewards=rollouts.rewards,
            advantages=advantages,
            group_spread=_mean(spread),
            groups_with_zero_std=_mean(has_zero_std),
            without_advantage=_mean(advantages.abs() <= ZERO),
            clipped=side.clipped_share(data, cfg, max_length),
        )
        if gradients is None:
            return numbers
        step.needs_tokens("the gradient reads them")
        gradient = gradients.of(data, cfg, side.past.loss_kl_coefficient)
        return replace(numbers, gradient=gradient.values, capped=gradient.capped)


def _notes(steps: Sequence[StepChange], settings: OverriddenSettings) -> list[str]:
    samples = [sample for step in steps for sample in step.samples]
    unscored = sum(not math.isfinite(sample.reward[1]) for sample in samples)
    notes: list[str] = []
    if unscored:
        notes.append(f"{unscored} of {len(samples)} samples have no reward; they count as invalid")
    if settings.changes_rewards and settings.reinforce.dynamic_filtering:
        reason = "dynamic_filtering looks at the rewards"
        notes.append(f"a real run would have drawn other prompts: {reason}")
    return notes


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0
