"""What an evaluation found: numbers of each model and comparisons of two, as a table and as JSON."""

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
    metrics: dict[str, float]  # as of the trainer's validation

    @classmethod
    def of(
        cls, name: str, model: str, rows: Sequence[RolloutRow], metrics: dict[str, float]
    ) -> ModelResult:
        columns = {"reward": [row.reward for row in rows]}
        for source in dict.fromkeys(source for row in rows for source in row.source_rewards):
            columns[f"reward/{source}"] = [row.source_rewards.get(source, math.nan) for row in rows]
        sets = dict.fromkeys(row.set_name for row in rows)
        for one in sets if len(sets) > 1 else ():
            columns[f"reward of {one}"] = [
                row.reward if row.set_name == one else math.nan for row in rows
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
        numbers = {column: estimate(found) for column, found in groups.items()}
        # summed as in training
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
    """A model against the first one, over the prompts that both have a reward, or the pair a judgement, for."""

    model: str
    baseline: str
    by: str  # "reward", or "judge NAME"
    wins: WinRate
    difference: Difference | None = None  # of the mean rewards, paired by prompt
    # by prompt: 1, 0.5 or 0, or why there is none
    judgements: Mapping[int, float | str] = field(default_factory=dict)

    @classmethod
    def by_reward(
        cls, name: str, rows: Sequence[RolloutRow], baseline: str, first: Sequence[RolloutRow]
    ) -> Comparison:
        own = by_prompt(rows)
        other = by_prompt(first)
        shared = [
            prompt for prompt in own if math.isfinite(own[prompt] - other.get(prompt, math.nan))
        ]
        preferences = [0.5 + 0.5 * ((own[p] > other[p]) - (own[p] < other[p])) for p in shared]
        return cls(
            name,
            baseline,
            "reward",
            WinRate.of(preferences, len(own) - len(shared)),
            paired(other, own),
        )

    def __str__(self) -> str:
        wins, (low, high) = self.wins, self.wins.interval
        text = f"{self.model} against {self.baseline}, by {self.by}: "
        if wins.count:
            text += f"wins {wins.rate:.1%} ({low:.1%} to {high:.1%}), {wins.wins}:{wins.losses} and {wins.ties} ties"
        if self.difference is not None:
            return f"{text}; reward {self.difference.sentence()}"
        if wins.count:
            text += (
                ": indistinguishable from noise"
                if low <= 0.5 <= high
                else ": a real preference at the 5 % level"
            )
        return text + (f"; {wins.failed} prompts without a result" if wins.failed else "")


@dataclass(frozen=True)
class Results:
    models: list[ModelResult]
    comparisons: list[Comparison]

    def as_json(self) -> dict[str, Any]:
        """Return all numbers; what is unknown is null."""
        comparisons = [
            {
                **asdict(one),
                "win_rate": one.wins.rate,
                "interval_95": one.wins.interval,
                **_tested(one.difference),
            }
            for one in self.comparisons
        ]
        found = {"version": VERSION, "models": self.models, "comparisons": comparisons}
        return json.loads(to_json(found, inf_nan_mode="null"))

    def table(self) -> RenderableType:
        """Return a table of the models and a line for each comparison and each reason of a failure."""
        names = list(dict.fromkeys(name for one in self.models for name in one.numbers))
        columns = (Column(name, justify="right", no_wrap=True) for name in names)
        table = Table("model", *columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for one in self.models:
            table.add_row(one.name, *(_shown(name, one.numbers.get(name)) for name in names))
        failed = [
            f"{one.name}: {n} not scored: {text}"
            for one in self.models
            for text, n in one.failures.items()
        ]
        return Group(
            table,
            *map(Text, map(str, self.comparisons)),
            *(Text(line, style="yellow") for line in failed),
        )


def _tested(found: Difference | None) -> dict[str, Any]:
    if found is None:
        return {"difference": None, "standard_error": None}
    tested = {name: getattr(found, name) for name in ("standard_error", "p", "smallest_gain")}
    of_all = {
        "difference": found.mean_difference,
        "difference_interval_95": found.interval,
        "prompts": found.n,
    }
    return {**of_all, **tested, "sentence": found.sentence()}


def _shown(name: str, found: Estimate | None) -> str:
    if found is None or not math.isfinite(found.mean):
        return "-"
    if name == ENDED:
        return f"{found.mean:.1%}"
    digits = 1 if name == LENGTH else 3
    error = f" ± {found.standard_error:.{digits}f}" if math.isfinite(found.standard_error) else ""
    return f"{found.mean:.{digits}f}{error}"
