"""What other settings would have changed: numbers of each step, as a table, as JSON and as figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

VERSION = 1  # of the JSON
ZERO = 1e-6  # advantages of at most this size have no sign: rounding
_SHOWN = 8  # samples in the table
_TEXT = 48  # characters of a response in it
Pair = tuple[float, float]  # as recorded, and with the overrides


@dataclass(frozen=True)
class SampleChange:
    step: int
    prompt_id: int
    sample_id: int
    response: str
    valid: tuple[bool, bool]
    reward: Pair  # of the source
    advantage: Pair  # mean over the tokens

    @property
    def changes_sign(self) -> bool:
        before, now = self.advantage
        return min(before, now) < -ZERO and max(before, now) > ZERO


@dataclass(frozen=True)
class StepChange:
    step: int
    samples: list[SampleChange]
    sign_changes: int  # samples above 0 with one and below with the other
    correlation: float  # of the advantages of samples that are valid in either; NaN where one has no spread
    group_spread: Pair  # mean standard deviation, within groups, of the rewards that the baseline is subtracted from
    groups_without_spread: Pair  # share
    without_advantage: Pair  # share of samples
    clipped: Pair  # share of valid samples whose reward is bounded by reward_shaping.clip
    capped: Pair | None = None  # share of tokens whose weight against the generator is beyond generator_ratio_cap
    cosine: float | None = None  # between the gradients


@dataclass(frozen=True)
class WhatIf:
    run: str
    settings: dict[str, tuple[Any, Any]]  # that differ: as recorded, and now
    steps: list[StepChange]
    checkpoint: int | None = None  # step of the weights that the gradients were taken on
    largest_difference: float = 0.0  # between recorded advantages and those recomputed with the run's own settings
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> list[SampleChange]:
        return [sample for step in self.steps for sample in step.samples]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        samples = [{**asdict(one), "changes_sign": one.changes_sign} for one in self.samples]
        steps = [{name: value for name, value in vars(one).items() if name != "samples"} for one in self.steps]
        return {"version": VERSION, **vars(self), "steps": steps, "samples": samples}

    def table(self) -> RenderableType:
        """Return a row a step, the samples whose advantages changed most, and what differs."""
        changes = [f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, (old, new) in self.settings.items()]
        head = changes or ["no setting differs: the record alone was checked"]
        head.append(f"recomputed with the run's own settings: differences of {self.largest_difference:.0e} at most")
        if self.checkpoint is not None:
            head.append(f"gradients on the weights after step {self.checkpoint}")
        return Group(*map(Text, head), "", self._of_steps(), "", self._of_samples(), *map(Text, self.notes))

    def _of_steps(self) -> Table:
        columns: dict[str, Callable[[StepChange], str]] = {
            "step": lambda one: str(one.step),
            "samples": lambda one: str(len(one.samples)),
            "sign changes": lambda one: str(one.sign_changes),
            "correlation": lambda one: shown(one.correlation, ".4f"),
            "group spread": lambda one: _pair(one.group_spread, ".3f"),
            "groups without": lambda one: _pair(one.groups_without_spread, ".0%"),
            "no advantage": lambda one: _pair(one.without_advantage, ".0%"),
            "clipped": lambda one: _pair(one.clipped, ".0%"),
        }
        if any(one.cosine is not None for one in self.steps):
            columns["capped"] = lambda one: _pair(one.capped or (math.nan, math.nan), ".0%")
            columns["gradient cosine"] = lambda one: shown(math.nan if one.cosine is None else one.cosine, ".4f")
        table = Table(*(_right(name) for name in columns), box=None, padding=(0, 2, 0, 0), header_style="bold")
        for one in self.steps:
            table.add_row(*(form(one) for form in columns.values()))
        return table

    def _of_samples(self) -> Table:
        names = ("step", "prompt", "sample", "reward", "advantage")
        columns = (*map(_right, names), Column("response", overflow="ellipsis", no_wrap=True))
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
        most = sorted(self.samples, key=lambda one: (not one.changes_sign, -_size(one)))[:_SHOWN]
        for one in (one for one in most if _size(one) > ZERO):
            text = json.dumps(one.response, ensure_ascii=False)[:_TEXT]
            numbers = (_pair(one.reward, ".3f"), _pair(one.advantage, "+.3f"))
            table.add_row(str(one.step), str(one.prompt_id), str(one.sample_id), *numbers, Text(text))
        return table

    def figures(self) -> list[dict[str, Any]]:
        """Return figures for `monitoring.view`: the advantages in order of size, and numbers by step."""
        pairs = [sorted(values) for values in zip(*(one.advantage for one in self.samples), strict=True)]
        share = [100 * (i + 0.5) / len(self.samples) for i in range(len(self.samples))]
        found = [_figure("Advantages in order of size", "advantage", "share of samples, %", share, pairs)]
        steps = [float(one.step) for one in self.steps]
        if len(steps) > 1:
            signs = [one.sign_changes / max(len(one.samples), 1) for one in self.steps]
            found.append(_figure("Samples whose advantage changes sign", "share", "step", steps, [signs], "percent"))
            spread = [list(values) for values in zip(*(one.group_spread for one in self.steps), strict=True)]
            found.append(_figure("Spread within groups", "standard deviation", "step", steps, spread))
        return found


def correlation(before: Tensor, now: Tensor) -> float:
    """Return Pearson's correlation of two [N]; NaN where one has no spread, or with fewer than two values."""
    if len(before) < 2 or any(float(one.double().std()) <= ZERO for one in (before, now)):
        return math.nan
    return float(torch.corrcoef(torch.stack((before, now)).double())[0, 1])


def cosine(before: Tensor, now: Tensor) -> float:
    """Return the cosine between two gradients; NaN where one is 0."""
    before, now = before.double(), now.double()
    sizes = float(before.norm() * now.norm())
    return float(before @ now) / sizes if sizes else math.nan


def shown(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _size(one: SampleChange) -> float:
    return abs(one.advantage[1] - one.advantage[0])


def _pair(values: Pair, form: str) -> str:
    return " -> ".join(shown(value, form) for value in values)


def _right(name: str) -> Column:
    least = 0 if name in ("step", "prompt", "sample", "samples", "sign changes") else 8  # of a pair: `0.279 ->`
    return Column(name, justify="right", overflow="fold", min_width=max(least, *map(len, name.split())))


def _figure(
    title: str, unit: str, x: str, at: Sequence[float], lines: Sequence[Sequence[float]], form: str = ""
) -> dict[str, Any]:
    names = ("recorded", "what-if") if len(lines) > 1 else ("what-if",)
    drawn = [{"name": name, "x": at, "y": [y if math.isfinite(y) else None for y in line]}
             for name, line in zip(names, lines, strict=True)]  # fmt: skip
    return {"title": title, "unit": unit, "x": x, "form": form, "lines": drawn}
