"""`reinforce-rl whatif`: stored rollouts under other settings, by the trainer's own functions and without a GPU."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reinforce_rl.algorithm.rewards import shape_rewards
from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.debugging.gradient import Gradients, gradients_before
from reinforce_rl.debugging.rescore import Rescorer
from reinforce_rl.debugging.stored import StoredRun, StoredStep
from reinforce_rl.debugging.whatif_results import ZERO, SampleChange, StepChange, WhatIf, correlation, cosine
from reinforce_rl.debugging.whatif_settings import Settings
from reinforce_rl.errors import ConfigError, DataError, Fault
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.monitoring.metrics import group_spread
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.view import frozen_page
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.reward_requests import with_valid
from reinforce_rl.trainer.state import RunningBaselines, depends_on_past
from reinforce_rl.trainer.updates import reward_shaping
from reinforce_rl.utils.files import write_atomically, write_json

TOLERANCE = 1e-6  # of recomputed advantages: rounding


def whatif(
    run: str | Path,
    steps: str | None = None,
    overrides: Sequence[str] = (),
    *,
    gradient: bool = False,
    trust: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> WhatIf:
    """Recompute the advantages of recorded steps with the run's own settings and with overrides, and compare them.

    Args:
        run: folder of a run.
        steps: `10:20` with both ends, `10:`, `:20` or `12`; None for the last one recorded.
        overrides: KEY=VALUE of `train`, on top of the run's settings.
        gradient: also compare the gradients, on the newest checkpoint before the first of these steps.
        trust: use functions, addresses and the like that only the folder names, where rewards are asked for again.
        say: told each of them first.

    Raises:
        ConfigError: an override is wrong, or changes nothing on stored rollouts; all in one message.
        DataError: the record lacks a step or what is needed of it, or does not give the recorded advantages.
    """
    stored = StoredRun(run)
    chosen = _chosen(stored, steps)
    last, faults = stored.settings(chosen[-1])
    options: dict[str, Any] = {"with_gradient": gradient, "trust": trust, "say": say}
    asked = Settings(stored.path, last, faults, list(overrides), **options)
    is_stateful = [depends_on_past(cfg) for cfg in (last.trainer.reinforce, asked.reinforce)]
    if any(is_stateful):
        _check_all_before(stored, chosen[0], "overrides" if is_stateful[1] else "run's settings")
    sides, found, largest = (_Side(), _Side()), [], 0.0
    by_settings = {id(last): asked}
    with contextlib.ExitStack() as stack:
        rescored = gradients = None
        if gradient or asked.changes_rewards:
            mesh = stack.enter_context(parallel_mesh())
            if asked.changes_rewards:
                rescored = stack.enter_context(contextlib.closing(Rescorer(asked.cfg, mesh)))
            if gradient:
                gradients = stack.enter_context(gradients_before(stored.path, asked.cfg, chosen[0], mesh))
        for number in range(1 if any(is_stateful) else chosen[0], chosen[-1] + 1):
            own, faults = stored.settings(number)
            if id(own) not in by_settings:  # changed at a resume
                by_settings[id(own)] = Settings(stored.path, own, faults, list(overrides), **options)
            now, step = by_settings[id(own)], stored.step(number)
            batches = step.batch, step.batch if rescored is None else rescored(step)
            pair = [
                side.recompute(step, batch, cfg, now.max_length)
                for side, batch, cfg in zip(sides, batches, (own.trainer.reinforce, now.reinforce), strict=True)
            ]
            if number in chosen:
                largest = max(largest, _check(step, pair[0]))
                found.append(_compared(step, sides, pair, now, gradients))
            for side, data in zip(sides, pair, strict=True):
                side.past.add(data, lambda own: [own])
    return WhatIf(
        run=stored.run.name,
        settings=asked.changes,
        steps=found,
        checkpoint=gradients.step if gradients else None,
        largest_difference=largest,
        notes=_notes(found, asked),
    )


def write(found: WhatIf, run: str | Path, json_file: Path | None, html: Path | None) -> None:
    """Write the numbers as JSON, and the run's page with figures of them."""
    if json_file is not None:
        write_json(json_file, found.as_json())
    if html is not None:
        of = StoredRun(run).run
        write_atomically(html, frozen_page({of.name: (of, overview(of) | {"figures": found.figures()})}))


class _Side:
    """One of the two sets of settings, with what its earlier steps left behind."""

    past: RunningBaselines
    _cfg: ReinforceConfig | None = None

    def recompute(
        self, step: StoredStep, batch: RolloutBatch, cfg: ReinforceConfig, max_length: int
    ) -> ReinforceBatch:
        if cfg is not self._cfg:
            past = RunningBaselines(cfg)
            if self._cfg is not None:  # as a resume with other settings does
                past.load_state_dict(self.past.state_dict())
            self.past, self._cfg = past, cfg
        step.needs(cfg)
        if not cfg.uses_reference:
            batch = replace(batch, init_log_probs=None)
        batch = with_valid(batch, cfg.truncated_samples)
        return reinforce_batch(batch, cfg, self.past, step=step.step, max_length=max_length)

    def clipped(self, data: ReinforceBatch, cfg: ReinforceConfig, max_length: int) -> float:
        """Return the share of valid samples that the bound on shaped rewards changes."""
        batch, shaping = data.rollouts, replace(reward_shaping(cfg, max_length), clip=None)
        free = shape_rewards(
            batch.rewards, batch.valid, batch.response_lengths, batch.is_end, shaping, self.past.scores
        )
        assert data.shaped_rewards is not None
        return _mean((free != data.shaped_rewards)[batch.valid])


def _chosen(stored: StoredRun, steps: str | None) -> range:
    known = stored.run.sample_steps()
    if not known:
        raise DataError(
            f"{stored.path} has no record of a training step; expected files in {stored.path / 'rollouts'}",
            key="whatif.run.no_steps",
        )
    found = re.fullmatch(r"(\d*)(:?)(\d*)", str(known[-1]) if steps is None else steps)
    if found is None or not (found[1] or found[3]):
        sentence = f"--steps is {steps!r}; expected a step such as 12, or a range such as 10:20, 10: or :20"
        raise ConfigError([Fault(sentence, key="whatif.steps.invalid")])
    first = int(found[1] or known[0])
    last = int(found[3] or known[-1]) if found[2] else first
    if first > last:
        has = f"the run has recorded steps {known[0]} to {known[-1]}"
        sentence = f"--steps is {steps!r}, whose first step is after its last; {has}"
        raise ConfigError([Fault(sentence, key="whatif.steps.backwards")])
    for number in range(first, last + 1):
        if number not in known:
            stored.run.samples(number)  # says which there are
    return range(first, last + 1)


def _check_all_before(stored: StoredRun, first: int, whose: str) -> None:
    missing = sorted(set(range(1, first)) - set(stored.run.sample_steps()))
    if missing:
        raise DataError(
            f"the {whose} have a state that goes on from step to step (a baseline of past rewards, "
            f"standardisation=running or kl_target), but {stored.path / 'rollouts'} lacks step {missing[0]}; "
            "expected all steps from 1 on. Take settings without a state, or bring the missing files back",
            key="whatif.steps.missing",
        )


def _check(step: StoredStep, data: ReinforceBatch) -> float:
    """Return the largest difference from the recorded advantages. Raises DataError if it is more than rounding."""
    recorded = torch.tensor([row.advantage for row in step.rows], dtype=torch.float64)
    differences = (data.sequence_advantages.double() - recorded).abs().nan_to_num(math.inf)
    # Of float32 sums over a response's tokens, whose order depends on the number of ranks.
    sizes = (recorded, data.kl[data.rollouts.valid])
    scale = max(1.0, *(float(one.abs().max()) for one in sizes if len(one)))
    worst = int(differences.argmax())
    if float(differences[worst]) > TOLERANCE * scale:
        row = step.rows[worst]
        raise DataError(
            f"step {step.step}: the run's own settings give prompt {row.prompt_id}, sample {row.sample_id} the "
            f"advantage {float(data.sequence_advantages[worst]):.6g}, but its record has {row.advantage:.6g}; "
            f"expected the same within {TOLERANCE * scale:.0e}. The record or config.yaml was changed, or "
            "another reinforce_rl, which computed otherwise, made them: take that one",
            key="whatif.advantages.differ",
        )
    return float(differences[worst])


def _compared(
    step: StoredStep,
    sides: tuple[_Side, _Side],
    pair: Sequence[ReinforceBatch],
    settings: Settings,
    gradients: Gradients | None,
) -> StepChange:
    cfgs = settings.recorded.trainer.reinforce, settings.reinforce
    valid = pair[0].rollouts.valid | pair[1].rollouts.valid
    advantages = [data.sequence_advantages for data in pair]
    columns = [
        [one.rollouts.valid.tolist() for one in pair],
        [one.rollouts.rewards.tolist() for one in pair],
        [one.tolist() for one in advantages],
    ]
    samples = [
        SampleChange(step.step, row.prompt_id, row.sample_id, row.response, *((c[0][i], c[1][i]) for c in columns))
        for i, row in enumerate(step.rows)
    ]
    spread = [group_spread(one.rewards_with_kl, one.rollouts.group_ids, one.rollouts.valid) for one in pair]
    clipped = [side.clipped(d, cfg, settings.max_length) for side, d, cfg in zip(sides, pair, cfgs, strict=True)]
    before = now = None
    if gradients is not None:
        step.needs_tokens("the gradient reads them")
        before, now = (
            gradients.of(data, cfg, side.past.beta.value) for side, data, cfg in zip(sides, pair, cfgs, strict=True)
        )
    return StepChange(
        step=step.step,
        samples=samples,
        sign_changes=sum(one.changes_sign for one in samples),
        correlation=correlation(*(one[valid] for one in advantages)),
        group_spread=(_mean(spread[0][0]), _mean(spread[1][0])),
        groups_without_spread=(_mean(spread[0][1]), _mean(spread[1][1])),
        without_advantage=(_mean(advantages[0].abs() <= ZERO), _mean(advantages[1].abs() <= ZERO)),
        clipped=(clipped[0], clipped[1]),
        capped=(before.capped, now.capped) if before and now else None,
        cosine=cosine(before.values, now.values) if before and now else None,
    )


def _notes(steps: Sequence[StepChange], settings: Settings) -> list[str]:
    samples = [one for step in steps for one in step.samples]
    unscored = sum(not math.isfinite(one.reward[1]) for one in samples)
    notes = [f"{unscored} of {len(samples)} samples have no reward; they count as invalid"] if unscored else []
    if settings.changes_rewards and settings.reinforce.dynamic_filtering:
        notes.append("a real run would have drawn other prompts: dynamic_filtering looks at the rewards")
    return notes


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan
