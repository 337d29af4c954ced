"""`reinforce-rl diff`: where two runs part, by step, phase, prompt and token, and what their validations say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reinforce_rl.debugging.differences import (
    COLUMNS,
    EQUAL_BITS,
    ROUNDING,
    Bounds,
    FirstDifference,
    fact_differences,
    missing_samples,
    sample_differences,
    tensor_differences,
    update_differences,
)
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.compare import tables
from reinforce_rl.monitoring.records import read_table, rollout_files
from reinforce_rl.monitoring.report import overview
from reinforce_rl.monitoring.run_folder import RunFolder, open_run
from reinforce_rl.monitoring.step_record import StepRecord, read_record, record_files
from reinforce_rl.monitoring.view import frozen_page
from reinforce_rl.runtime.settings import compare, settings_of
from reinforce_rl.utils.files import write_atomically, write_json

PHASES = ("prompts", "weights", "generate", "score", "logprobs", "advantages", "update")
_PLACES = ("exp_manager.explicit_log_dir", "exp_manager.name", "exp_manager.wandb_logger_kwargs.name")


@dataclass(frozen=True)
class Parting:
    """The first step at which a phase differs."""

    step: int
    phase: str
    difference: FirstDifference

    def __str__(self) -> str:
        return f"step {self.step}, {self.difference}"


@dataclass(frozen=True)
class RunDiff:
    first: str
    second: str
    settings: dict[str, str]  # by key, both values; of the first step that has both
    facts: list[str]  # versions, machine, layout, data, reward functions
    steps: list[int]  # compared
    exact: dict[str, Parting]  # by phase, in order
    beyond_rounding: dict[str, Parting]
    tables: list[dict[str, Any]]  # of `monitoring.compare`

    @property
    def parts(self) -> bool:
        return bool(self.exact)

    @property
    def sentence(self) -> str:
        if not self.exact:
            return f"The two runs are the same bit for bit in all {len(self.steps)} steps that both have."
        one = _earliest(self.exact)
        text = f"They part at step {one.step}, in {one.phase}: {one.difference}"
        if not self.beyond_rounding:
            return f"{text}. All differences are within rounding ({ROUNDING.absolute:g})."
        other = _earliest(self.beyond_rounding)
        more = f". Beyond rounding at step {other.step}, in {other.phase}: {other.difference}"
        return text if other == one else text + more

    def rows(self) -> list[list[str]]:
        """A row a phase: where it first differs, in bits and beyond rounding."""
        found = []
        for phase in PHASES:
            exact, beyond = self.exact.get(phase), self.beyond_rounding.get(phase)
            found.append([phase, str(exact) if exact else "same", str(beyond) if beyond else "same"])
        return found

    def table(self) -> RenderableType:
        head = [f"{self.first} and {self.second}, {len(self.steps)} steps of both compared"]
        head += [f"setting {key}: {values}" for key, values in self.settings.items()] or ["no setting differs"]
        table = Table(*_COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for row in self.rows():
            table.add_row(*map(Text, row))
        return Group(*map(Text, [*head, *self.facts]), "", table, "", Text(self.sentence))


_COLUMNS = ("phase", "first different bits", "first beyond rounding")


def diff(first: str | Path, second: str | Path) -> RunDiff:
    """Compare what two runs recorded of the steps that both have, in order.

    Raises DataError: a folder holds no run, the two share no recorded step, or a file cannot be read.
    """
    runs = open_run(first), open_run(second)
    steps = sorted(set(runs[0].sample_steps()) & set(runs[1].sample_steps()))
    if not steps:
        texts = [f"{run.path / 'rollouts'} has {_range(run.sample_steps())}" for run in runs]
        raise DataError(f"the two runs have no recorded step in common: {'; '.join(texts)}")
    records = [record_files(run.path) for run in runs]
    both = sorted(records[0].keys() & records[1].keys())
    facts = []
    if both:
        facts = fact_differences(*(read_record(run.path, both[0]) for run in runs))
    before, now = (settings_of(run.path, steps[0])[0] for run in runs)
    settings = compare(before, now) if before and now else {}
    names = _names(runs)
    exact, beyond = dict[str, Parting](), dict[str, Parting]()
    for step in steps:
        for phase, bounds, difference in _differences(runs, step, set(both)):
            (exact if bounds == EQUAL_BITS else beyond).setdefault(phase, Parting(step, phase, difference))
        if len(beyond) >= len(PHASES) - 1:  # checksums know no rounding
            break
    return RunDiff(
        *names,
        settings={key: values for key, values in settings.items() if key not in _PLACES},
        facts=[fact for fact in facts if not fact.startswith("setting ")],
        steps=steps,
        exact={phase: exact[phase] for phase in PHASES if phase in exact},
        beyond_rounding={phase: beyond[phase] for phase in PHASES if phase in beyond},
        tables=tables(dict(zip(names, runs, strict=True))),
    )


def write(found: RunDiff, first: str | Path, second: str | Path, json_file: Path | None, html: Path | None) -> None:
    """Write the findings as JSON, and a page that overlays the curves with the tables of differences below."""
    if json_file is not None:
        write_json(json_file, {"version": 1, **asdict(found), "sentence": found.sentence})
    if html is not None:
        runs = {found.first: open_run(first), found.second: open_run(second)}
        parting = {"title": "Where they part", "note": found.sentence, "columns": list(_COLUMNS), "rows": found.rows()}
        shown = {name: (run, overview(run)) for name, run in runs.items()}
        write_atomically(html, frozen_page(shown, [parting, *found.tables]))


def _differences(
    runs: tuple[RunFolder, RunFolder], step: int, recorded: set[int]
) -> Iterator[tuple[str, Bounds, FirstDifference]]:
    first, second = (_sorted(read_table(rollout_files(run.path)[step])) for run in runs)
    if (missing := missing_samples(first, second)) is not None:
        yield from (("prompts", bounds, missing) for bounds in (EQUAL_BITS, ROUNDING))
        return
    for bounds in (EQUAL_BITS, ROUNDING):
        for phase, columns in COLUMNS.items():
            if found := sample_differences(first, second, columns, bounds):
                yield phase, bounds, found[0]
    if step in recorded:
        sides = [read_record(run.path, step) for run in runs]
        yield from _of_records(sides[0], sides[1])


def _of_records(one: StepRecord, other: StepRecord) -> Iterator[tuple[str, Bounds, FirstDifference]]:
    for bounds in (EQUAL_BITS, ROUNDING):
        if found := update_differences(one, other, bounds):
            yield "update", bounds, found[0]
    if one.layout == other.layout:  # else the tensors are others
        for phase, kind in (("weights", "before"), ("update", "after"), ("update", "optimizer")):
            if found := tensor_differences(one.ranks, other.ranks, kind):
                yield phase, EQUAL_BITS, found[0]


def _sorted(table: pa.Table) -> pa.Table:
    """Other numbers of ranks write the samples in another order."""
    return table.sort_by([("prompt_id", "ascending"), ("sample_id", "ascending")])


def _earliest(found: dict[str, Parting]) -> Parting:
    return min(found.values(), key=lambda one: (one.step, PHASES.index(one.phase)))


def _names(runs: tuple[RunFolder, RunFolder]) -> tuple[str, str]:
    first, second = (run.name for run in runs)
    return (first, second) if first != second else (str(runs[0].path), str(runs[1].path))


def _range(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
