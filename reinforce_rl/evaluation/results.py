"""Results of an evaluation: each model's numbers and comparisons, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic_core import to_json
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from reinforce_rl.monitoring.paired import by_prompt
from reinforce_rl.monitoring.records import RolloutRow
from reinforce_rl.utils.statistics import Difference, Estimate, WinRate, estimate, paired, pass_at_k

VERSION = 1  # of the JSON
LENGTH = "length"
ENDED = "ended"
KL = "KL"


@dataclass(frozen=True)
class ModelResult:
    name: str
    model: str  # its folder
    # reward, reward/SOURCE, pass@K, KL (nats a response), length (tokens), ended (share)
    numbers: dict[str, Estimate]
    failures: dict[str, int]  # samples without a reward, by reason
    metrics: dict[str, float]  # the trainer's metrics of a validation

    @classmethod
    def of(
        cls, name: str, model: str, rows: Sequence[RolloutRow], metrics: dict[str, float]
    ) -> ModelResult:
        columns = {"reward": [row.reward for row in rows]}
        for source in dict.fromkeys(source for row in rows for source in row.source_rewards):
            columns[f"reward/{source}"] = [row.source_rewards.get(source, math.nan) for row in rows]
        sets = dict.fromkeys(row.set_name for row in rows)
        for set_name in sets if len(sets) > 1 else ():
            columns[f"reward of {set_name}"] = [
                row.reward if row.set_name == set_name else math.nan for row in rows
            ]
        columns |= {
            KL: [row.kl for row in rows],
            LENGTH: [float(row.response_length) for row in rows],
        }
        columns[ENDED] = [float(row.is_end) for row in rows]
        groups: dict[str, dict[int, list[float]]] = {
            column: defaultdict(list) for column in columns
        }
        for column, values in columns.items():
            for row, value in zip(rows, values, strict=True):
                groups[column][row.prompt_id].append(value)
        numbers = {column: estimate(by_prompt_id) for column, by_prompt_id in groups.items()}
        # The trainer sums in another order; its mean keeps the digits equal.
        numbers["reward"] = replace(numbers["reward"], mean=metrics["rewards"])
        if set(filter(math.isfinite, columns["reward"])) <= {0.0, 1.0}:
            most = max(map(len, groups["reward"].values()), default=1)
            for k in sorted({*(2**i for i in range(1, most.bit_length())), most} - {1}):
                numbers[f"pass@{k}"] = pass_at_k(groups["reward"], k)
        failures = Counter(row.score_fault for row in rows if row.score_fault is not None)
        return cls(
            name, model, {k: v for k, v in numbers.items() if v.count}, dict(failures), metrics
        )


@dataclass(frozen=True)
class Comparison:
    """A model against the first model.

    It counts the prompts with a reward of both models, or with judged responses.
    """

    model: str
    baseline: str
    by: str  # "reward", or "judge NAME"
    wins: WinRate
    difference: Difference | None = None  # of the mean rewards, paired by prompt
    # by prompt: 1, 0.5 or 0, or the reason of a failure
    judgements: Mapping[int, float | str] = field(default_factory=dict)

    @classmethod
    def by_reward(
        cls, name: str, rows: Sequence[RolloutRow], baseline: str, first: Sequence[RolloutRow]
    ) -> Comparison:
        means = by_prompt(rows)
        baseline_means = by_prompt(first)
        shared = [
            prompt
            for prompt in means
            if math.isfinite(means[prompt] - baseline_means.get(prompt, math.nan))
        ]
        preferences = [
            0.5 + 0.5 * ((means[p] > baseline_means[p]) - (means[p] < baseline_means[p]))
            for p in shared
        ]
        return cls(
            name,
            baseline,
            "reward",
            WinRate.of(preferences, len(means) - len(shared)),
            paired(baseline_means, means),
        )

    def __str__(self) -> str:
        wins = self.wins
        low, high = wins.interval
        text = f"{self.model} against {self.baseline}, by {self.by}: "
        if wins.count:
            text += (
                f"wins {wins.rate:.1%} ({low:.1%} to {high:.1%}), "
                f"{wins.wins}:{wins.losses} and {wins.ties} ties"
            )
        if self.difference is not None:
            return f"{text}; reward {self.difference.sentence()}"
        if wins.count:
            text += (
                ": indistinguishable from noise"
                if low <= 0.5 <= high
                else ": a significant preference at the 5 % level"
            )
        return text + (f"; {wins.failed} prompts without a result" if wins.failed else "")


@dataclass(frozen=True)
class Results:
    models: list[ModelResult]
    comparisons: list[Comparison]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers; unknown numbers are null."""
        comparisons = [
            {
                **asdict(comparison),
                "win_rate": comparison.wins.rate,
                "interval_95": comparison.wins.interval,
                **_tested(comparison.difference),
            }
            for comparison in self.comparisons
        ]
        results = {"version": VERSION, "models": self.models, "comparisons": comparisons}
        return json.loads(to_json(results, inf_nan_mode="null"))

    def table(self) -> RenderableType:
        """Return a table of the models, and a line for each comparison and each kind of failure."""
        names = list(dict.fromkeys(name for model in self.models for name in model.numbers))
        columns = (Column(name, justify="right", no_wrap=True) for name in names)
        table = Table("model", *columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for model in self.models:
            table.add_row(model.name, *(_shown(name, model.numbers.get(name)) for name in names))
        failed = [
            f"{model.name}: {n} not scored: {text}"
            for model in self.models
            for text, n in model.failures.items()
        ]
        return Group(
            table,
            *map(Text, map(str, self.comparisons)),
            *(Text(line, style="yellow") for line in failed),
        )


def _tested(difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        return {"difference": None, "standard_error": None}
    tested = {name: getattr(difference, name) for name in ("standard_error", "p", "smallest_gain")}
    of_all = {
        "difference": difference.mean_difference,
        "difference_interval_95": difference.interval,
        "prompts": difference.n,
    }
    return {**of_all, **tested, "sentence": difference.sentence()}


def _shown(name: str, estimated: Estimate | None) -> str:
    if estimated is None or not math.isfinite(estimated.mean):
        return "-"
    if name == ENDED:
        return f"{estimated.mean:.1%}"
    digits = 1 if name == LENGTH else 3
    error = (
        f" ± {estimated.standard_error:.{digits}f}"
        if math.isfinite(estimated.standard_error)
        else ""
    )
    return f"{estimated.mean:.{digits}f}{error}"
