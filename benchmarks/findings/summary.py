"""From outcomes to tables and charts: means over seeds with standard errors, and differences seed by seed."""

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
        found = list(values)
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
        return cls(statistics.fmean(found), error, len(found))

    def __str__(self) -> str:
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec or '.2f'}} ± {self.error:{spec or '.2f'}}"


BROKEN = 0.5  # a reward at the end below this
SAMPLES_LABEL = "true reward of the validation prompts against samples"
Outcomes = dict[str, list[Outcome]]  # of each cell, one a seed


def difference(
    outcomes: Outcomes, cell: str, other: str, value: Callable[[Outcome], float]
) -> Estimate | None:
    """`cell` minus `other` over the seeds that both have; None where there is none."""
    left, right = ({o.job.seed: value(o) for o in outcomes.get(name, [])} for name in (cell, other))
    shared = left.keys() & right.keys()
    return Estimate.of(left[seed] - right[seed] for seed in sorted(shared)) if shared else None


def best_rates(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """For each tuned cell the learning rate with the highest mean objective."""
    found: dict[str, dict[float, list[float]]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.job.cell, {}).setdefault(outcome.job.lr, []).append(
            outcome.objective
        )
    return {
        cell: max(by_rate, key=lambda rate: statistics.fmean(by_rate[rate]))
        for cell, by_rate in found.items()
    }


def tuning_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Head, and for each tuned cell the mean objective and KL at each learning rate."""
    rates = sorted({o.job.lr for o in outcomes})
    rows = [["cell", *(f"lr {rate:g}" for rate in rates), "chosen"]]
    for cell, chosen in best_rates(outcomes).items():
        means = [
            Estimate.of(o.objective for o in outcomes if (o.job.cell, o.job.lr) == (cell, rate))
            for rate in rates
        ]
        rows.append([CELLS[cell].title, *map(str, means), f"{chosen:g}"])
    return rows


def cell_rows(outcomes: Outcomes) -> list[list[str]]:
    """Head, and a row a cell; the last column counts the runs that `Outcome.fell`."""
    rows = [
        [
            "cell",
            "lr",
            "seeds",
            "reward at the end",
            "mean over the run",
            "KL, nats",
            "reward - beta KL",
            "fell",
        ]
    ]
    for name, cell in CELLS.items():
        if found := outcomes.get(name):
            values = [
                Estimate.of(map(value, found))
                for value in (
                    lambda o: o.final_reward,
                    lambda o: o.mean_reward,
                    lambda o: o.final_kl,
                    lambda o: o.objective,
                )
            ]
            rows.append(
                [
                    cell.title,
                    f"{found[0].job.lr:g}",
                    str(len(found)),
                    *map(str, values),
                    str(sum(o.fell for o in found)),
                ]
            )
    return rows


def difference_rows(outcomes: Outcomes) -> list[list[str]]:
    """Head, and a row a comparison; the last column is the difference of rewards at the end in its standard errors."""
    rows = [
        [
            "cell",
            "minus",
            "reward at the end",
            "mean over the run",
            "reward - beta KL",
            "end, in errors",
        ]
    ]
    for name, cell in CELLS.items():
        for other in cell.against:
            end = difference(outcomes, name, other, lambda o: o.final_reward)
            run = difference(outcomes, name, other, lambda o: o.mean_reward)
            aim = difference(outcomes, name, other, lambda o: o.objective)
            if end:
                ratio = f"{end.mean / end.error:+.1f}" if end.error else ""
                rows.append([cell.title, CELLS[other].title, str(end), str(run), str(aim), ratio])
    return rows


def lag_rows(outcomes: Outcomes) -> list[list[str]]:
    """Head, and a row for each cell with rollouts some steps old and for what it is compared with.

    "broke" counts runs that end below `BROKEN`. The last three columns are of the time when half of the colocated
    steps are done: steps, reward, less colocated.
    """
    head = ["cell", "seeds", "broke", "moved, nats", "capped", "s a step", "of colocated"]
    rows = [[*head, "steps", "reward", "less colocated"]]
    for base, *cells in LAGGING:
        if not (of_base := outcomes.get(base.name)):
            continue
        pace = statistics.fmean(o.step_seconds for o in of_base)
        half = pace * len(of_base[0].training) / 2
        for cell in [base, *cells]:
            if found := outcomes.get(cell.name):
                seconds = Estimate.of(o.step_seconds for o in found)
                by_then = Estimate.of(o.reward_after(half) for o in found)
                less = difference(
                    outcomes, cell.name, base.name, lambda o, at=half: o.reward_after(at)
                )
                drift = ("", "")  # of runs that did not keep it
                if moved := [nats for o in found for nats in o.moved]:
                    capped = statistics.fmean(share for o in found for share in o.capped)
                    drift = f"{statistics.median(moved):.2g}", f"{capped:.1%}"
                figures = (
                    f"{seconds:.2f}",
                    f"{seconds.mean / pace:.2f}",
                    f"{half / seconds.mean:.0f}",
                    str(by_then),
                )
                counts = str(len(found)), str(sum(o.final_reward < BROKEN for o in found))
                rows.append(
                    [cell.title, *counts, *drift, *figures, "" if cell is base else str(less)]
                )
    return rows


def rich_table(rows: Sequence[Sequence[str]], title: str) -> Table:
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
        + "\n"
    )


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
        curves = [_curve(cell, outcomes[cell.name]) for cell in cells if outcomes.get(cell.name)]
        if curves:
            panels.append(Panel(title, SAMPLES_LABEL, curves))
    for cells in LAGGING:
        there = [cell for cell in cells if outcomes.get(cell.name)]
        if there:
            title = f"Rollouts that are k steps old, lr {there[0].lr:g}" + ", sleeping" * bool(
                there[0].sleep
            )
            panels.append(
                Panel(title, SAMPLES_LABEL, [_curve(cell, outcomes[cell.name]) for cell in there])
            )
            paced = [_curve(cell, outcomes[cell.name], of_time=True) for cell in there]
            panels.append(Panel(title, "the same against seconds of steps", paced))
    frontier = [
        Curve(cell.title, [_end(outcomes[cell.name])])
        for cell in [base, raft, *BETAS]
        if outcomes.get(cell.name)
    ]
    if frontier:
        panels.append(
            Panel(
                "Beta: reward at the end against KL",
                "KL of training samples, nats a response",
                frontier,
                bands=False,
            )
        )
    return figure(panels)


def _curve(cell: Cell, found: Sequence[Outcome], *, of_time: bool = False) -> Curve:
    scale = statistics.fmean(o.step_seconds for o in found) / SAMPLES_PER_STEP if of_time else 1.0
    points = []
    for column in zip(*(outcome.validation for outcome in found), strict=True):
        estimate = Estimate.of(value for _, value in column)
        error = 0.0 if math.isnan(estimate.error) else estimate.error
        points.append(Point(column[0][0] * scale, estimate.mean, error))
    return Curve(cell.title, points)


def _end(found: Sequence[Outcome]) -> Point:
    reward, kl = Estimate.of(o.final_reward for o in found), Estimate.of(o.final_kl for o in found)
    return Point(
        kl.mean, reward.mean, *(0.0 if math.isnan(e.error) else e.error for e in (reward, kl))
    )
