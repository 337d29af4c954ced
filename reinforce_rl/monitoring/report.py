"""What a run changed: `run_summary` as text, and `report.html`, one page without scripts or network access.

`python -m reinforce_rl.monitoring.report RUN_DIR` writes the page, also during the run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from omegaconf import OmegaConf

from reinforce_rl.errors import ReinforceError
from reinforce_rl.monitoring.charts import MAX_POINTS, Series, area_chart, legend, line_chart
from reinforce_rl.monitoring.progress import PHASES, clock
from reinforce_rl.monitoring.rollouts import RolloutRow
from reinforce_rl.monitoring.run_folder import REST, RunFolder, mean
from reinforce_rl.runtime.settings import flatten
from reinforce_rl.utils.files import write_atomically

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
TEMPLATES.filters["known"] = math.isfinite
TEMPLATES.filters["number"] = lambda value: f"{value:.3f}" if math.isfinite(value) else "failed"
_EVEN_SAMPLES = 6
_EXTREME_SAMPLES = 3
# Keys of the configuration that the page shows at once, where they are set; the whole file is one click away.
_FACTS = (
    "trainer.reinforce",
    "trainer.devices",
    "trainer.num_nodes",
    "pretrained_checkpoint.restore_from_path",
    "model.tensor_model_parallel_size",
    "model.global_batch_size",
    "model.micro_batch_size",
    "model.optim.name",
    "model.optim.lr",
    "model.seed",
)


@dataclass(frozen=True)
class PairedComparison:
    n: int  # prompts compared
    mean_before: float  # NaN if n is 0
    mean_after: float
    mean_difference: float  # after - before
    standard_error: float  # of the n differences; NaN if n < 2
    z: float  # infinite if all differences are equal and not 0; NaN if undefined


def compare_validation(before: Sequence[RolloutRow], after: Sequence[RolloutRow]) -> PairedComparison:
    """Compare two validations' rewards, paired by `prompt_id`.

    Samples of a prompt count as their mean. Prompts absent or failed (NaN) on either side are dropped.
    """
    first, last = rewards_by_prompt(before), rewards_by_prompt(after)
    shared = sorted(first.keys() & last.keys())
    if not shared:
        return PairedComparison(0, *[math.nan] * 5)
    differences = [last[prompt] - first[prompt] for prompt in shared]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(shared)) if len(shared) > 1 else math.nan
    z = mean / error if error else math.copysign(math.inf, mean) if mean else math.nan
    old, new = (statistics.fmean(rewards[prompt] for prompt in shared) for rewards in (first, last))
    return PairedComparison(len(shared), old, new, mean, error, z)


def rewards_by_prompt(rows: Sequence[RolloutRow]) -> dict[int, float]:
    """Return the mean reward of each prompt whose samples were all scored."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row.reward)
    return {prompt: statistics.fmean(found) for prompt, found in groups.items() if all(map(math.isfinite, found))}


def comparison(run: RunFolder) -> PairedComparison | None:
    """Compare the first validation with the last; None with fewer than two."""
    return None if run.validations is None else compare_validation(*run.validations)


@dataclass(frozen=True)
class SummaryRow:
    """One quantity before and after; NaN if unknown."""

    name: str  # with its unit
    basis: str  # what it was measured on
    before: float
    after: float
    digits: int = 3  # decimals
    percent: bool = False
    standard_error: float = math.nan  # of the change

    def show(self, value: float, signed: bool = False) -> str:
        """Format `value` for this row; "-" if unknown."""
        if not math.isfinite(value):
            return "-"
        sign = "+" if signed else ""
        return f"{value:{sign}.1%}" if self.percent else f"{value:{sign}.{self.digits}f}"

    @property
    def change(self) -> str:
        """Format after - before, with its standard error if there is one."""
        error = f" ± {self.show(self.standard_error)}" if math.isfinite(self.standard_error) else ""
        return self.show(self.after - self.before, signed=True) + error


def summarize(run: RunFolder) -> list[SummaryRow]:
    """Return quantities before and after, from validations and the first and last training steps."""
    rows = []
    if (found := comparison(run)) is not None and found.n:
        basis = f"validation, the same {found.n} prompts"
        error = found.standard_error
        rows.append(SummaryRow("Reward", basis, found.mean_before, found.mean_after, standard_error=error))
    rows += _before_and_after(run, "Reward", "rewards")
    rows += _before_and_after(run, "Reward with KL", "rewards_with_kl")
    rows += _before_and_after(run, "KL, nats a response", "init_policy_kl")
    rows += _before_and_after(run, "Response length, tokens", "response_lengths", "response_length", digits=1)
    ended = "fraction_of_samples_properly_ended"
    rows += _before_and_after(run, "Ended by itself", ended, "is_end", percent=True)
    return [row for row in rows if math.isfinite(row.before) or math.isfinite(row.after)]


def _before_and_after(run: RunFolder, name: str, key: str, field: str = "", **look: Any) -> list[SummaryRow]:
    """Return a row of the validations' `field`, if given, and one of the training metric `key`."""
    rows = []
    if field and run.validations is not None:
        before, after = (mean([getattr(row, field) for row in validation]) for validation in run.validations)
        rows.append(SummaryRow(name, "validation", before, after, **look))
    values = [value for _, value in run.series(f"train/{key}")]
    window = min(10, len(values) // 2)  # the first and the last steps must not overlap
    if window == 0:
        return [*rows, SummaryRow(name, "training, one step", mean(values), math.nan, **look)]
    basis = f"training, first and last {window} steps" if window > 1 else "training, first and last step"
    return [*rows, SummaryRow(name, basis, mean(values[:window]), mean(values[-window:]), **look)]


def verdict(run: RunFolder) -> str:
    """Describe the change of the validation reward in one sentence."""
    found = comparison(run)
    if found is None:
        return "The reward has not been compared: that needs a validation before and one after."
    if found.n == 0:
        return "The reward cannot be compared: no validation prompt was scored both before and after."
    moved = "rose" if found.mean_difference > 0 else "fell" if found.mean_difference < 0 else "changed"
    text = f"The mean validation reward {moved} by {abs(found.mean_difference):.3f}"
    if math.isnan(found.standard_error):
        return f"{text} on the one prompt that was compared."
    text += f" ± {found.standard_error:.3f} on {found.n} prompts"
    if math.isfinite(found.z):
        text += f", {abs(found.z):.1f} standard errors" + (": within noise" if abs(found.z) < 2 else "")
    return text + "."


def run_summary(run_dir: str | Path, places: Mapping[str, str | Path] | None = None) -> str:
    """Return a script's last lines: what changed, and paths. `places` adds paths, e.g. {"checkpoint": path}."""
    run = RunFolder(run_dir)
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


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` from the files of `run_dir` that exist; return its path.

    Raises:
        DataError: `run_dir` is absent, or a file of it cannot be read.
    """
    run_dir = Path(run_dir)
    run = RunFolder(run_dir)
    config = run.configuration()
    even, extremes = _validation_samples(run)
    best, worst = _best_and_worst(run.last_rollouts)
    page = TEMPLATES.get_template("report.html").render(
        name=run_dir.resolve().name,
        span=_span(run),
        verdict=verdict(run),
        tone=_tone(comparison(run)),
        summary=summarize(run),
        facts=_facts(config.text),
        config=config.text,
        changes=config.changes,
        charts=_charts(run),
        slowest_rank=_slowest_rank(run),
        max_points=MAX_POINTS,
        even=even,
        extremes=extremes,
        best=best,
        worst=worst,
    )
    path = run_dir / "report.html"
    write_atomically(path, page)
    return path


def _charts(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return title, legend and SVG of each chart."""

    def train(key: str, name: str = "training", colour: int = 1) -> Series:
        return Series(name, run.series(f"train/{key}"), colour, smooth=True)

    def validation(key: str) -> Series:
        return Series("validation", run.series(f"val/{key}"), 3, markers=True)

    ended = "fraction_of_samples_properly_ended"
    reward = [train("rewards"), train("rewards_with_kl", "training, with KL", 2), validation("rewards")]
    lines: list[tuple[str, list[Series], dict[str, Any]]] = [
        ("Reward", reward, {}),
        ("KL to the initial policy, nats a response", [train("init_policy_kl")], {}),
        ("Response length, tokens", [train("response_lengths"), validation("response_lengths")], {"zero": True}),
        ("Share of responses that ended by themselves", [train(ended), validation(ended)], {"percent": True}),
        ("Gradient norm", [train("grad_norm")], {"zero": True}),
        ("Loss of the actor", [train("actor_loss")], {}),
        ("Learning rate", [Series("learning rate", run.series("train/lr"), 1)], {"zero": True}),
    ]
    charts = [
        (title, legend(series) if len(series) > 1 else "", line_chart(series, **look)) for title, series, look in lines
    ]
    colours = {name: i for i, name in enumerate((*PHASES, REST), 1)}
    phases = [Series(name, points, colours[name]) for name, points in run.phases().items()]
    return [*charts, ("Seconds a step, by phase", legend(phases), area_chart(phases))]


def _slowest_rank(run: RunFolder) -> str | None:
    """Describe the phase in which the slowest rank cost most; None for a single rank."""
    found = []
    for key in dict.fromkeys(key for line in run.lines for key in line if key.startswith("timing/")):
        if key.endswith("/rank"):
            phase = key.split("/")[1]
            ranks, most, median = (
                [value for _, value in run.series(f"timing/{phase}/{name}")] for name in ("rank", "max", "median")
            )
            found.append((mean(most) - mean(median), phase, mean(most), mean(median), ranks))
    if not found:
        return None
    _, phase, most, median, ranks = max(found)
    rank = statistics.mode(ranks)
    return (
        f"The ranks lost most to the slowest one in {phase}: it took {most:.1f} s a step there, the median rank "
        f"{median:.1f} s. In {ranks.count(rank)} of {len(ranks)} steps it was rank {rank:.0f}; the log's straggler "
        "lines name its host."
    )


def _validation_samples(run: RunFolder) -> tuple[list, list]:
    """Return pairs (before, after) of the same prompt: evenly spaced ones, and those with extreme differences."""
    if run.validations is None:
        return [], []
    first, last = ({(row.prompt_id, row.sample_id): row for row in rows} for rows in run.validations)
    pairs = [(first[key], last[key]) for key in sorted(first.keys() & last.keys())]
    count = min(_EVEN_SAMPLES, len(pairs))
    even = [pairs[index * len(pairs) // count] for index in range(count)]
    shown = {before.prompt_id for before, _ in even}
    moved = [(after.reward - before.reward, (before, after)) for before, after in pairs]
    moved = [(by, pair) for by, pair in moved if math.isfinite(by) and pair[0].prompt_id not in shown]
    extremes = [pair for _, pair in sorted(moved, key=lambda one: one[0])]
    return even, [extremes[-1], extremes[0]] if len(extremes) > 1 else extremes


def _best_and_worst(rows: Sequence[RolloutRow]) -> tuple[list[RolloutRow], list[RolloutRow]]:
    ordered = sorted((row for row in rows if math.isfinite(row.reward)), key=lambda row: -row.reward)
    half = min(_EXTREME_SAMPLES, (len(ordered) + 1) // 2)  # so that no sample is both
    return ordered[:half], ordered[half:][-half:][::-1]


def _facts(text: str) -> list[tuple[str, str]]:
    """Return what to show at once of a configuration."""
    flat = dict(flatten(OmegaConf.to_container(OmegaConf.create(text), resolve=False))) if text else {}
    shown = [key for fact in _FACTS for key in flat if key == fact or key.startswith(f"{fact}.")]
    return [(key.removeprefix("trainer.reinforce."), str(flat[key])) for key in shown or list(flat)[:24]]


def _span(run: RunFolder) -> str:
    times = [line["time"] for line in run.lines if line.get("time") is not None]
    if not times:
        return "No step has been logged yet."
    first_step = run.lines[0].get("timers/step_time") or 0.0  # the first line was written at the end of its step
    start, end = min(times) - first_step, max(times)
    begin, finish = (datetime.fromtimestamp(t, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S") for t in (start, end))
    steps = sum(any(key.startswith("train/") for key in line) for line in run.lines)
    counted = "1 training step" if steps == 1 else f"{steps} training steps"
    return f"{begin} to {finish} UTC, {clock(end - start)} from start to end, {counted}"


def _tone(comparison: PairedComparison | None) -> str:
    if comparison is None or not abs(comparison.z) >= 2:
        return ""
    return "good" if comparison.z > 0 else "bad"


def main(
    arguments: Sequence[str],
    program: str = "reinforce_rl.monitoring.report",
    write: Callable[[str], Path] = write_report,
) -> int:
    """Write the report of the run folder given as the only argument; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="Write the report of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder")
    try:
        print(write(parser.parse_args(arguments).run_dir))
    except ReinforceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
