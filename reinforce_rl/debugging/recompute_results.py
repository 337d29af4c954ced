"""Effects of other settings on stored rollouts, as a table, as JSON and as figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

VERSION = 1  # of the JSON
ZERO = 1e-6  # advantages of at most this size have no sign: rounding
_SAMPLES_SHOWN = 8
_CHARACTERS_SHOWN = 48  # of a response
_NARROW_COLUMNS = ("step", "prompt", "sample", "samples", "sign changes")
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
        return min(self.advantage) < -ZERO and max(self.advantage) > ZERO


@dataclass(frozen=True)
class StepChange:
    step: int
    samples: list[SampleChange]
    sign_changes: int  # samples above 0 with one and below with the other
    # Of the advantages of samples that are valid in either; NaN where one has no spread.
    correlation: float
    # Mean standard deviation, within groups, of the rewards that the baseline is subtracted from.
    group_spread: Pair
    groups_with_zero_std: Pair  # share
    without_advantage: Pair  # share of samples
    clipped: Pair  # share of valid samples with a reward beyond reward_shaping.clip
    # Share of tokens with a weight against the generator beyond generator_ratio_cap.
    capped: Pair | None = None
    cosine: float | None = None  # between the gradients


@dataclass(frozen=True)
class Recomputation:
    run: str
    # the settings that differ, by key: as recorded, and with the overrides
    settings: dict[str, tuple[Any, Any]]
    steps: list[StepChange]
    checkpoint: int | None = None  # step of the weights for the gradients
    # Between recorded and recomputed advantages, with the run's own settings.
    largest_difference: float = 0.0
    notes: list[str] = field(default_factory=list)

    exit_code: ClassVar[int] = 0
    is_empty: ClassVar[bool] = False

    @property
    def samples(self) -> list[SampleChange]:
        return [sample for step in self.steps for sample in step.samples]

    def as_json(self) -> dict[str, Any]:
        content = {"version": VERSION, **vars(self)}
        content["steps"] = [_without_samples(step) for step in self.steps]
        content["samples"] = [_of_sample(sample) for sample in self.samples]
        return content

    def table(self) -> RenderableType:
        """Return a row for each step, and the samples whose advantages changed most."""
        head: list[str] = []
        for key, (before, after) in self.settings.items():
            head.append(f"{key}: {json.dumps(before)} -> {json.dumps(after)}")
        if not head:
            head.append("no setting differs: the record alone was checked")
        difference = f"differences of {self.largest_difference:.0e} at most"
        head.append(f"recomputed with the run's own settings: {difference}")
        if self.checkpoint is not None:
            head.append(f"gradients on the weights after step {self.checkpoint}")
        notes = map(Text, self.notes)
        return Group(*map(Text, head), "", self._step_table(), "", self._sample_table(), *notes)

    def _step_table(self) -> Table:
        columns: dict[str, Callable[[StepChange], str]] = {
            "step": lambda step: str(step.step),
            "samples": lambda step: str(len(step.samples)),
            "sign changes": lambda step: str(step.sign_changes),
            "correlation": lambda step: shown(step.correlation, ".4f"),
            "group std": lambda step: _shown_pair(step.group_spread, ".3f"),
            "zero-std groups": lambda step: _shown_pair(step.groups_with_zero_std, ".0%"),
            "zero advantage": lambda step: _shown_pair(step.without_advantage, ".0%"),
            "clipped": lambda step: _shown_pair(step.clipped, ".0%"),
        }
        if any(step.cosine is not None for step in self.steps):
            no_pair = (math.nan, math.nan)
            columns["capped"] = lambda step: _shown_pair(step.capped or no_pair, ".0%")
            columns["gradient cosine"] = _shown_cosine
        table = _table([_right(name) for name in columns])
        for step in self.steps:
            table.add_row(*(text_of(step) for text_of in columns.values()))
        return table

    def _sample_table(self) -> Table:
        columns = [_right(name) for name in ("step", "prompt", "sample", "reward", "advantage")]
        columns.append(Column("response", overflow="ellipsis", no_wrap=True))
        table = _table(columns)
        by_change = sorted(self.samples, key=_change, reverse=True)
        # The sort is stable: samples that change sign come first, each part ordered by size.
        by_change.sort(key=lambda sample: not sample.changes_sign)
        for sample in by_change[:_SAMPLES_SHOWN]:
            if _change(sample) <= ZERO:
                continue
            response = json.dumps(sample.response, ensure_ascii=False)[:_CHARACTERS_SHOWN]
            table.add_row(
                str(sample.step),
                str(sample.prompt_id),
                str(sample.sample_id),
                _shown_pair(sample.reward, ".3f"),
                _shown_pair(sample.advantage, "+.3f"),
                Text(response),
            )
        return table

    def figures(self) -> list[dict[str, Any]]:
        """Return figures for `monitoring.view`: sorted advantages, and numbers by step."""
        count = len(self.samples)
        before = sorted(sample.advantage[0] for sample in self.samples)
        after = sorted(sample.advantage[1] for sample in self.samples)
        figures = [
            _figure(
                "Advantages in order of size",
                unit="advantage",
                x_name="share of samples, %",
                x=[100 * (i + 0.5) / count for i in range(count)],
                lines={"recorded": before, "with the overrides": after},
            )
        ]
        if len(self.steps) < 2:
            return figures
        steps = [float(step.step) for step in self.steps]
        signs = [step.sign_changes / max(len(step.samples), 1) for step in self.steps]
        figures.append(
            _figure(
                "Samples whose advantage changes sign",
                unit="share",
                x_name="step",
                x=steps,
                lines={"with the overrides": signs},
                form="percent",
            )
        )
        figures.append(
            _figure(
                "Reward std within groups",
                unit="standard deviation",
                x_name="step",
                x=steps,
                lines={
                    "recorded": [step.group_spread[0] for step in self.steps],
                    "with the overrides": [step.group_spread[1] for step in self.steps],
                },
            )
        )
        return figures


def correlation(before: Tensor, after: Tensor) -> float:
    """Return Pearson's correlation of two [N]; NaN without a spread or with fewer than 2 values."""
    if len(before) < 2:
        return math.nan
    if float(before.double().std()) <= ZERO or float(after.double().std()) <= ZERO:
        return math.nan
    return float(torch.corrcoef(torch.stack((before, after)).double())[0, 1])


def cosine(before: Tensor, after: Tensor) -> float:
    """Return the cosine between two gradients; NaN where one is 0."""
    norms = float(before.double().norm() * after.double().norm())
    return float(before.double() @ after.double()) / norms if norms else math.nan


def shown(value: float, form: str) -> str:
    return f"{value:{form}}" if math.isfinite(value) else "-"


def _without_samples(step: StepChange) -> dict[str, Any]:
    return {name: value for name, value in vars(step).items() if name != "samples"}


def _of_sample(sample: SampleChange) -> dict[str, Any]:
    return {**asdict(sample), "changes_sign": sample.changes_sign}


def _shown_cosine(step: StepChange) -> str:
    return shown(math.nan if step.cosine is None else step.cosine, ".4f")


def _change(sample: SampleChange) -> float:
    before, after = sample.advantage
    return abs(after - before)


def _shown_pair(values: Pair, form: str) -> str:
    return " -> ".join(shown(value, form) for value in values)


def _table(columns: Sequence[Column]) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")


def _right(name: str) -> Column:
    # A pair such as `0.279 ->` breaks after its arrow.
    width = 0 if name in _NARROW_COLUMNS else 8
    longest_word = max(len(word) for word in name.split())
    return Column(name, justify="right", overflow="fold", min_width=max(width, longest_word))


def _figure(
    title: str,
    *,
    unit: str,
    x_name: str,
    x: Sequence[float],
    lines: dict[str, Sequence[float]],
    form: str = "",
) -> dict[str, Any]:
    drawn = [
        {"name": name, "x": x, "y": [value if math.isfinite(value) else None for value in values]}
        for name, values in lines.items()
    ]
    return {"title": title, "unit": unit, "x": x_name, "form": form, "lines": drawn}
