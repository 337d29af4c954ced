"""Tables and charts of outcomes: means over seeds with standard errors, differences by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from findings.charts import Curve, Panel, Point, figure
from findings.runs import (
    BETAS,
    CELLS,
    LAGGING,
    METHODS,
    NOISES,
    OFFSETS,
    SAMPLES_PER_STEP,
    Cell,
    Outcome,
)


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error over `count` seeds."""

    mean: float
    error: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        sample = list(values)
        count = len(sample)
        error = math.nan
        if count > 1:
            error = statistics.stdev(sample) / math.sqrt(count)
        return cls(statistics.fmean(sample), error, count)

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.mean:{spec}} ± {self.error:{spec}}"

    @property
    def bar(self) -> float:
        """The error in a chart: 0 for a single seed."""
        return 0.0 if math.isnan(self.error) else self.error


BROKEN = 0.5  # a reward at the end below this
SAMPLES_LABEL = "true reward of the validation prompts against samples"
Outcomes = dict[str, list[Outcome]]  # of each cell, one a seed
Value = Callable[[Outcome], float]


def final_reward(outcome: Outcome) -> float:
    return outcome.final_reward


def mean_reward(outcome: Outcome) -> float:
    return outcome.mean_reward


def final_kl(outcome: Outcome) -> float:
    return outcome.final_kl


def objective(outcome: Outcome) -> float:
    return outcome.objective


def difference(outcomes: Outcomes, cell: str, other: str, value: Value) -> Estimate | None:
    """`cell` minus `other` over the seeds that both have; None where there is none."""
    left = _by_seed(outcomes, cell, value)
    right = _by_seed(outcomes, other, value)
    shared = left.keys() & right.keys()
    if not shared:
        return None
    return Estimate.of(left[seed] - right[seed] for seed in sorted(shared))


def _by_seed(outcomes: Outcomes, cell: str, value: Value) -> dict[int, float]:
    return {outcome.job.seed: value(outcome) for outcome in outcomes.get(cell, [])}


def objectives_by_rate(outcomes: Sequence[Outcome]) -> dict[str, dict[float, list[float]]]:
    """The objectives of each cell at each learning rate, one a seed."""
    objectives: dict[str, dict[float, list[float]]] = {}
    for outcome in outcomes:
        job = outcome.job
        by_rate = objectives.setdefault(job.cell, {})
        by_rate.setdefault(job.lr, []).append(outcome.objective)
    return objectives


def best_rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """For each tuned cell the learning rate with the highest mean objective."""
    best = {}
    for cell, by_rate in objectives_by_rate(outcomes).items():
        means = {rate: statistics.fmean(objectives) for rate, objectives in by_rate.items()}
        best[cell] = max(means, key=means.__getitem__)
    return best


def tuning_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Head, and for each tuned cell the mean objective at each learning rate."""
    rates = sorted({outcome.job.lr for outcome in outcomes})
    objectives = objectives_by_rate(outcomes)
    rows = [["cell", *(f"lr {rate:g}" for rate in rates), "chosen"]]
    for cell, chosen in best_rates(outcomes).items():
        row = [CELLS[cell].title]
        for rate in rates:
            estimate = Estimate.of(objectives[cell][rate])
            row.append(str(estimate))
        rows.append([*row, f"{chosen:g}"])
    return rows


def cell_rows(outcomes: Outcomes) -> list[list[str]]:
    """Head, and a row a cell; the last column counts the runs that `Outcome.fell`."""
    head = ["cell", "lr", "seeds", "reward at the end", "mean over the run", "KL, nats"]
    head += ["reward - beta KL", "fell"]
    rows = [head]
    for name, cell in CELLS.items():
        runs = outcomes.get(name)
        if not runs:
            continue
        row = [cell.title, f"{runs[0].job.lr:g}", str(len(runs))]
        for value in (final_reward, mean_reward, final_kl, objective):
            row.append(str(Estimate.of(map(value, runs))))
        fallen = sum(outcome.fell for outcome in runs)
        rows.append([*row, str(fallen)])
    return rows


def difference_rows(outcomes: Outcomes) -> list[list[str]]:
    """Head, and a row a comparison.

    The last column is the difference of rewards at the end over its standard error.
    """
    head = ["cell", "minus", "reward at the end", "mean over the run", "reward - beta KL"]
    rows = [[*head, "end, in errors"]]
    for name, cell in CELLS.items():
        for other in cell.against:
            end = difference(outcomes, name, other, final_reward)
            if not end:
                continue
            row = [cell.title, CELLS[other].title, str(end)]
            for value in (mean_reward, objective):
                row.append(str(difference(outcomes, name, other, value)))
            row.append(f"{end.mean / end.error:+.1f}" if end.error else "")
            rows.append(row)
    return rows


def lag_rows(outcomes: Outcomes) -> list[list[str]]:
    """Head, and a row for each cell with rollouts some steps old and for what it is compared with.

    "broke" counts runs that end below `BROKEN`. The last three columns hold at the time when half
    of the colocated steps are done: steps, reward, difference from colocated.
    """
    head = ["cell", "seeds", "broke", "moved, nats", "capped", "s a step", "of colocated"]
    rows = [[*head, "steps", "reward", "less colocated"]]
    for cells in LAGGING:
        if outcomes.get(cells[0].name):
            rows += _rows_beside_the_first(outcomes, cells)
    return rows


def _rows_beside_the_first(outcomes: Outcomes, cells: Sequence[Cell]) -> list[list[str]]:
    base = cells[0]
    base_runs = outcomes[base.name]
    pace = statistics.fmean(outcome.step_seconds for outcome in base_runs)
    half = pace * len(base_runs[0].training) / 2

    def reward_at_half(outcome: Outcome) -> float:
        return outcome.reward_after(half)

    rows = []
    for cell in cells:
        runs = outcomes.get(cell.name)
        if not runs:
            continue
        broken = sum(outcome.final_reward < BROKEN for outcome in runs)
        moved = [nats for outcome in runs for nats in outcome.moved]
        drift = ["", ""]  # of runs that did not record it
        if moved:
            capped = statistics.fmean(share for outcome in runs for share in outcome.capped)
            drift = [f"{statistics.median(moved):.2g}", f"{capped:.1%}"]
        seconds = Estimate.of(outcome.step_seconds for outcome in runs)
        steps_at_half = half / seconds.mean
        less = ""
        if cell is not base:
            less = str(difference(outcomes, cell.name, base.name, reward_at_half))
        row = [cell.title, str(len(runs)), str(broken), *drift]
        row += [f"{seconds:.2f}", f"{seconds.mean / pace:.2f}", f"{steps_at_half:.0f}"]
        row += [str(Estimate.of(map(reward_at_half, runs))), less]
        rows.append(row)
    return rows


def rich_table(rows: Sequence[Sequence[str]], title: str) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    rule = ["---"] * len(head)
    lines = ["| " + " | ".join(row) + " |\n" for row in [head, rule, *body]]
    return "".join(lines)


def charts(outcomes: Outcomes) -> str:
    """An SVG with the curves of each family of cells, and the frontier of KL and reward."""
    base = CELLS["rloo4"]
    raft = CELLS["raft4"]
    vanilla = CELLS["vanilla"]
    families = {
        "Methods": METHODS,
        "A constant added to the reward": [base, vanilla, *OFFSETS],
        "Beta": [base, raft, *BETAS],
        "Noise added to the reward": [base, raft, *NOISES],
    }
    panels = []
    for title, cells in families.items():
        curves = _curves(outcomes, cells)
        if curves:
            panels.append(Panel(title, SAMPLES_LABEL, curves))
    for cells in LAGGING:
        curves = _curves(outcomes, cells)
        if not curves:
            continue
        title = f"Rollouts that are k steps old, lr {cells[0].lr:g}"
        if cells[0].sleep:
            title += ", sleeping"
        panels.append(Panel(title, SAMPLES_LABEL, curves))
        paced = _curves(outcomes, cells, of_time=True)
        panels.append(Panel(title, "the same against seconds of steps", paced))
    frontier = []
    for cell in [base, raft, *BETAS]:
        if runs := outcomes.get(cell.name):
            frontier.append(Curve(cell.title, [_end(runs)]))
    if frontier:
        title = "Beta: reward at the end against KL"
        x_label = "KL of training samples, nats a response"
        panels.append(Panel(title, x_label, frontier, bands=False))
    return figure(panels)


def _curves(outcomes: Outcomes, cells: Sequence[Cell], *, of_time: bool = False) -> list[Curve]:
    """The curves of the cells that have outcomes."""
    curves = []
    for cell in cells:
        if runs := outcomes.get(cell.name):
            curves.append(_curve(cell, runs, of_time=of_time))
    return curves


def _curve(cell: Cell, runs: Sequence[Outcome], *, of_time: bool) -> Curve:
    scale = 1.0
    if of_time:
        pace = statistics.fmean(outcome.step_seconds for outcome in runs)
        scale = pace / SAMPLES_PER_STEP
    points = []
    for column in zip(*(outcome.validation for outcome in runs), strict=True):
        estimate = Estimate.of(value for _, value in column)
        samples, _ = column[0]
        points.append(Point(samples * scale, estimate.mean, estimate.bar))
    return Curve(cell.title, points)


def _end(runs: Sequence[Outcome]) -> Point:
    reward = Estimate.of(map(final_reward, runs))
    kl = Estimate.of(map(final_kl, runs))
    return Point(kl.mean, reward.mean, reward.bar, kl.bar)
