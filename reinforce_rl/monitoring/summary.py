"""Summary of a run: paired comparison of two validations, and metrics before and after."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforce_rl.monitoring.loggers import read_metrics
from reinforce_rl.monitoring.rollouts import RolloutRow, read_rollouts, rollout_files


@dataclass(frozen=True)
class PairedComparison:
    n: int  # prompts compared
    mean_before: float  # NaN if n is 0
    mean_after: float
    mean_difference: float  # after - before
    standard_error: float  # of the n differences; NaN if n < 2
    z: float  # infinite if all differences are equal and not 0; NaN if undefined

    def __str__(self) -> str:
        if self.n == 0:
            return "no prompt was scored both before and after"
        head = f"{self.mean_before:.3f} -> {self.mean_after:.3f}, {self.mean_difference:+.3f}"
        if math.isnan(self.standard_error):
            return f"{head} (1 prompt)"
        return f"{head} ± {self.standard_error:.3f} ({self.z:.1f} standard errors, {self.n} prompts)"


def compare_validation(before: Sequence[RolloutRow], after: Sequence[RolloutRow]) -> PairedComparison:
    """Compare two validations' rewards, paired by `prompt_id`.

    Samples of a prompt count as their mean. Prompts absent or failed (NaN) on either side are dropped.
    """
    first, last = rewards_by_prompt(before), rewards_by_prompt(after)
    shared = sorted(first.keys() & last.keys())
    n = len(shared)
    if n == 0:
        return PairedComparison(0, *[math.nan] * 5)
    differences = [last[prompt] - first[prompt] for prompt in shared]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.nan
    z = mean / error if error else math.copysign(math.inf, mean) if mean else math.nan
    return PairedComparison(
        n=n,
        mean_before=statistics.fmean(first[prompt] for prompt in shared),
        mean_after=statistics.fmean(last[prompt] for prompt in shared),
        mean_difference=mean,
        standard_error=error,
        z=z,
    )


def rewards_by_prompt(rows: Sequence[RolloutRow]) -> dict[int, float]:
    """Return the mean reward of each prompt, without prompts that have a failed reward."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row.reward)
    return {
        prompt: statistics.fmean(rewards) for prompt, rewards in groups.items() if all(map(math.isfinite, rewards))
    }


@dataclass(frozen=True)
class RunRecord:
    metrics: tuple[Mapping[str, Any], ...]  # lines of metrics.jsonl, by ascending step
    first_validation: tuple[int, list[RolloutRow]] | None  # step and samples
    last_validation: tuple[int, list[RolloutRow]] | None  # None if there is only one
    last_rollouts: tuple[int, list[RolloutRow]] | None

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) of the lines that have `key`; null becomes NaN."""
        return [
            (line["step"], math.nan if line[key] is None else float(line[key])) for line in self.metrics if key in line
        ]

    @property
    def comparison(self) -> PairedComparison | None:
        """First against last validation; None with fewer than two."""
        if self.first_validation is None or self.last_validation is None:
            return None
        return compare_validation(self.first_validation[1], self.last_validation[1])


@dataclass(frozen=True)
class SummaryRow:
    """One quantity before and after; NaN if unknown."""

    name: str  # with its unit
    basis: str  # what it was measured on
    before: float
    after: float
    digits: int = 3  # decimals
    percent: bool = False
    comparison: PairedComparison | None = None

    def show(self, value: float, signed: bool = False) -> str:
        """Format `value` for this row; "-" if unknown."""
        if not math.isfinite(value):
            return "-"
        sign = "+" if signed else ""
        return f"{value:{sign}.1%}" if self.percent else f"{value:{sign}.{self.digits}f}"

    @property
    def change(self) -> str:
        """Format after - before, with its standard error if there is one."""
        text = self.show(self.after - self.before, signed=True)
        if self.comparison is not None and math.isfinite(self.comparison.standard_error):
            text += f" ± {self.show(self.comparison.standard_error)}"
        return text


def load_run(run_dir: str | Path) -> RunRecord:
    """Read `metrics.jsonl`, the first and last validation, and the last rollouts of a run's folder.

    Raises:
        DataError: an existing file cannot be read.
    """
    run_dir = Path(run_dir)
    path = run_dir / "metrics.jsonl"
    metrics = sorted(read_metrics(path), key=lambda line: line["step"]) if path.exists() else []
    validations = list(rollout_files(run_dir, "validation").items())
    rollouts = list(rollout_files(run_dir, "rollouts").items())
    return RunRecord(
        metrics=tuple(metrics),
        first_validation=_read(validations[0]) if validations else None,
        last_validation=_read(validations[-1]) if len(validations) > 1 else None,
        last_rollouts=_read(rollouts[-1]) if rollouts else None,
    )


def summarize(run: RunRecord) -> list[SummaryRow]:
    """Return quantities before and after, from validations and the first and last training steps."""
    rows = []
    comparison = run.comparison
    if comparison is not None and comparison.n:
        basis = f"validation, the same {comparison.n} prompts"
        rows.append(SummaryRow("Reward", basis, comparison.mean_before, comparison.mean_after, comparison=comparison))
    rows.append(_training_row(run, "Reward", "rewards"))
    rows.append(_training_row(run, "Reward with KL", "rewards_with_kl"))
    rows.append(_training_row(run, "KL, nats a response", "init_policy_kl"))
    rows += _pair(run, "Response length, tokens", "response_lengths", lambda row: row.response_length, digits=1)
    rows += _pair(run, "Ended by itself", "fraction_of_samples_properly_ended", lambda row: row.is_end, percent=True)
    return [row for row in rows if math.isfinite(row.before) or math.isfinite(row.after)]


def run_summary(run_dir: str | Path, places: Mapping[str, str | Path] | None = None) -> str:
    """Return a script's last lines: what changed, and paths. `places` adds paths, e.g. {"checkpoint": path}."""
    run = load_run(run_dir)
    rows = summarize(run)
    lines = [verdict(run)]
    name_width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        numbers = f"{row.show(row.before):>8} -> {row.show(row.after):>8}  {row.change:<16}"
        lines.append(f"  {row.name:<{name_width}}  {numbers} ({row.basis})")
    named = {"run folder": run_dir, **(places or {})}
    place_width = max(len(name) for name in named)
    lines += [f"  {name:<{place_width}}  {place}" for name, place in named.items()]
    return "\n".join(lines)


def verdict(run: RunRecord) -> str:
    """Describe the change of the validation reward in one sentence."""
    comparison = run.comparison
    if comparison is None:
        return "The reward has not been compared: that needs a validation before and one after."
    if comparison.n == 0:
        return "The reward cannot be compared: no validation prompt was scored both before and after."
    error = comparison.standard_error
    moved = "rose" if comparison.mean_difference > 0 else "fell" if comparison.mean_difference < 0 else "changed"
    text = f"The mean validation reward {moved} by {abs(comparison.mean_difference):.3f}"
    if math.isnan(error):
        return f"{text} on the one prompt that was compared."
    text += f" ± {error:.3f} on {comparison.n} prompts"
    if math.isfinite(comparison.z):
        text += f", {abs(comparison.z):.1f} standard errors"
        if abs(comparison.z) < 2:
            text += ": within noise"
    return text + "."


def slowest_rank(run: RunRecord) -> str | None:
    """Describe the phase in which the slowest rank cost most; None for a single rank."""
    found = []
    for key in dict.fromkeys(key for line in run.metrics for key in line if key.startswith("timing/")):
        if key.endswith("/rank"):
            phase = key.split("/")[1]
            ranks, most, median = (
                [value for _, value in run.series(f"timing/{phase}/{name}")] for name in ("rank", "max", "median")
            )
            rank = statistics.mode(ranks)
            found.append(
                (_mean(most) - _mean(median), phase, _mean(most), _mean(median), rank, ranks.count(rank), len(ranks))
            )
    if not found:
        return None
    _, phase, most, median, rank, times, steps = max(found)
    return (
        f"The ranks lost most to the slowest one in {phase}: it took {most:.1f} s a step there, the median rank "
        f"{median:.1f} s. In {times} of {steps} steps it was rank {rank:.0f}; the log's straggler lines name its host."
    )


def _read(item: tuple[int, Path]) -> tuple[int, list[RolloutRow]]:
    return item[0], read_rollouts(item[1])


def _mean(values: Sequence[float]) -> float:
    finite = [float(value) for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def _training_row(run: RunRecord, name: str, key: str, digits: int = 3, percent: bool = False) -> SummaryRow:
    values = [value for _, value in run.series(f"train/{key}")]
    window = min(10, len(values) // 2)  # the first and the last steps must not overlap
    if window == 0:
        return SummaryRow(name, "training, one step", _mean(values), math.nan, digits, percent)
    basis = f"training, first and last {window} steps" if window > 1 else "training, first and last step"
    return SummaryRow(name, basis, _mean(values[:window]), _mean(values[-window:]), digits, percent)


def _pair(
    run: RunRecord,
    name: str,
    key: str,
    value_of: Callable[[RolloutRow], float],
    digits: int = 3,
    percent: bool = False,
) -> list[SummaryRow]:
    rows = []
    if run.first_validation is not None and run.last_validation is not None:
        before = _mean([value_of(row) for row in run.first_validation[1]])
        after = _mean([value_of(row) for row in run.last_validation[1]])
        rows.append(SummaryRow(name, "validation", before, after, digits, percent))
    rows.append(_training_row(run, name, key, digits, percent))
    return rows
