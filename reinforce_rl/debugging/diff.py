"""`reinforce-rl diff`: the first difference of two runs, by step, phase, prompt and token.

Validation results are compared too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
_PLACES = (
    "exp_manager.explicit_log_dir",
    "exp_manager.name",
    "exp_manager.wandb_logger_kwargs.name",
)


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
    settings: dict[str, str]  # by key, both values in the first step of both runs
    facts: list[str]  # versions, machine, layout, data, reward functions
    steps: list[int]  # compared
    # by phase (weights, update): number of steps in which all its values could be compared
    of_phases: dict[str, int]
    exact: dict[str, Parting]  # by phase, in order
    beyond_rounding: dict[str, Parting]
    tables: list[dict[str, Any]]  # of `monitoring.compare`

    @property
    def parts(self) -> bool:
        return bool(self.exact)

    @property
    def exit_code(self) -> int:
        """Return 0 for equal bits, 1 for a difference.

        2 if the compared values are equal, but not all could be compared.
        """
        return 1 if self.parts else int(min(self.of_phases.values()) < len(self.steps)) * 2

    @property
    def sentence(self) -> str:
        if not self.exact:
            text = (
                f"The two runs are the same bit for bit in all {len(self.steps)} steps that both "
                "have"
            )
            if self.exit_code == 0:
                return f"{text}."
            counts = " and ".join(f"{phase} in {count}" for phase, count in self.of_phases.items())
            why = "both need a record of the step (exp_manager.record=full), and tensors one layout"
            return (
                f"{text}, as far as they were compared: samples in all, {counts} of these steps "
                f"({why})."
            )
        earliest = _earliest(self.exact)
        text = f"They diverge at step {earliest.step}, in {earliest.phase}: {earliest.difference}"
        if not self.beyond_rounding:
            return f"{text}. All differences are within rounding ({ROUNDING.absolute:g})."
        other = _earliest(self.beyond_rounding)
        beyond = f". Beyond rounding at step {other.step}, in {other.phase}: {other.difference}"
        return text if other == earliest else text + beyond

    def rows(self) -> list[list[str]]:
        """Return a row for each phase: its first difference in bits, and beyond rounding."""
        rows = []
        for phase in PHASES:
            count = self.of_phases.get(phase, len(self.steps))
            same = (
                "same"
                if count == len(self.steps)
                else f"same in {count} of {len(self.steps)} steps"
            )
            sides = self.exact.get(phase), self.beyond_rounding.get(phase)
            texts = [
                str(parting) if parting else same if count else "not compared" for parting in sides
            ]
            if phase == "weights" and sides[0]:
                texts[1] = "-"  # checksums know no rounding
            rows.append([phase, *texts])
        return rows

    def table(self) -> RenderableType:
        head = [f"{self.first} and {self.second}, {len(self.steps)} steps of both compared"]
        head += [f"setting {key}: {values}" for key, values in self.settings.items()] or [
            "no setting differs"
        ]
        table = Table(*_COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="bold")
        for row in self.rows():
            table.add_row(*map(Text, row))
        return Group(*map(Text, [*head, *self.facts]), "", table, "", Text(self.sentence))


_COLUMNS = ("phase", "first different bits", "first beyond rounding")


def diff(first: str | Path, second: str | Path) -> RunDiff:
    """Compare the records of two runs in the steps that both have, in order.

    Raises DataError: a folder holds no run, the two share no recorded step, or a file cannot be
    read.
    """
    runs = open_run(first), open_run(second)
    steps = sorted(set(runs[0].sample_steps()) & set(runs[1].sample_steps()))
    if not steps:
        texts = [f"{run.path / 'rollouts'} has {_range(run.sample_steps())}" for run in runs]
        raise DataError(
            f"the two runs have no recorded step in common: {'; '.join(texts)}",
            key="diff.steps.none_in_common",
        )
    files = [record_files(run.path) for run in runs]
    records = {
        step: (read_record(runs[0].path, step), read_record(runs[1].path, step))
        for step in steps
        if all(step in of for of in files)
    }
    names = _names(runs)
    exact = dict[str, Parting]()
    beyond = dict[str, Parting]()
    for step in steps:
        for phase, bounds, difference in _differences(runs, step, records.get(step)):
            (exact if bounds == EQUAL_BITS else beyond).setdefault(
                phase, Parting(step, phase, difference)
            )
        if len(beyond) >= len(PHASES) - 1:  # checksums know no rounding
            break
    facts = dict[str, str]()
    for step, pair in records.items():
        for fact in fact_differences(*pair):
            if not fact.startswith("setting "):
                facts.setdefault(
                    fact, fact if step == min(records) else f"{fact}, from step {step} on"
                )
    of_tensors = sum(_have_same_tensors(*pair) for pair in records.values())
    return RunDiff(
        *names,
        settings=_settings(runs, steps),
        facts=list(facts.values()),
        steps=steps,
        of_phases={"weights": of_tensors, "update": of_tensors},
        exact={phase: exact[phase] for phase in PHASES if phase in exact},
        beyond_rounding={phase: beyond[phase] for phase in PHASES if phase in beyond},
        tables=tables(dict(zip(names, runs, strict=True))),
    )


def write(
    run_diff: RunDiff,
    first: str | Path,
    second: str | Path,
    json_file: Path | None,
    html: Path | None,
) -> None:
    """Write the differences as JSON, and a page of both runs' curves and the differences."""
    if json_file is not None:
        summary = {"sentence": run_diff.sentence, "exit_code": run_diff.exit_code}
        write_json(json_file, {"version": 1, **asdict(run_diff), **summary})
    if html is not None:
        runs = {run_diff.first: open_run(first), run_diff.second: open_run(second)}
        parting = {
            "title": "Where they diverge",
            "note": run_diff.sentence,
            "columns": list(_COLUMNS),
            "rows": run_diff.rows(),
        }
        shown = {name: (run, overview(run)) for name, run in runs.items()}
        write_atomically(html, frozen_page(shown, [parting, *run_diff.tables]))


def _settings(runs: Sequence[RunFolder], steps: Sequence[int]) -> dict[str, str]:
    """Return the settings that differ in any step, with the values of both runs in it."""
    changes = dict[str, str]()
    known = set[tuple[str, ...]]()
    for step in steps:
        before, now = (settings_of(run.path, step)[0] for run in runs)
        if (before, now) in known or not (before and now):
            continue
        known.add((before, now))
        since = "" if step == steps[0] else f", from step {step} on"
        for key, values in compare(before, now).items():
            if key not in _PLACES:
                changes.setdefault(key, values + since)
    return changes


def _have_same_tensors(first: StepRecord, second: StepRecord) -> bool:
    return first.layout == second.layout and len(first.ranks) == len(second.ranks) > 0


def _differences(
    runs: tuple[RunFolder, RunFolder], step: int, records: tuple[StepRecord, StepRecord] | None
) -> Iterator[tuple[str, Bounds, FirstDifference]]:
    first, second = (
        _with_weight_versions(_sorted(read_table(rollout_files(run.path)[step])), step)
        for run in runs
    )
    if (missing := missing_samples(first, second)) is not None:
        yield from (("prompts", bounds, missing) for bounds in (EQUAL_BITS, ROUNDING))
        return
    for bounds in (EQUAL_BITS, ROUNDING):
        for phase, columns in COLUMNS.items():
            if differences := sample_differences(first, second, columns, bounds):
                yield phase, bounds, differences[0]
    if records is not None:
        yield from _of_records(*records)


def _of_records(
    first: StepRecord, second: StepRecord
) -> Iterator[tuple[str, Bounds, FirstDifference]]:
    for bounds in (EQUAL_BITS, ROUNDING):
        if differences := update_differences(first, second, bounds):
            yield "update", bounds, differences[0]
    if _have_same_tensors(first, second):
        for phase, kind in (("weights", "before"), ("update", "after"), ("update", "optimizer")):
            if differences := tensor_differences(first.ranks, second.ranks, kind):
                yield phase, EQUAL_BITS, differences[0]


def _sorted(table: pa.Table) -> pa.Table:
    """Sort by prompt and sample: the recorded order depends on the number of ranks."""
    return table.sort_by([("prompt_id", "ascending"), ("sample_id", "ascending")])


def _with_weight_versions(table: pa.Table, step: int) -> pa.Table:
    """Fill in missing `weight_versions` with step - 1 for each token.

    A run does not record them if its training ranks generate.
    """
    responses = table["response_tokens"].to_pylist()
    has_versions = "weight_versions" in table.column_names
    recorded = table["weight_versions"].to_pylist() if has_versions else [None] * len(responses)
    versions = []
    for response, of_tokens in zip(responses, recorded, strict=True):
        if of_tokens is None and response is not None:
            of_tokens = [step - 1] * len(response)
        versions.append(of_tokens)
    if has_versions:
        table = table.drop_columns("weight_versions")
    return table.append_column("weight_versions", pa.array(versions, pa.list_(pa.int32())))


def _earliest(partings: dict[str, Parting]) -> Parting:
    return min(partings.values(), key=lambda parting: (parting.step, PHASES.index(parting.phase)))


def _names(runs: tuple[RunFolder, RunFolder]) -> tuple[str, str]:
    first, second = (run.name for run in runs)
    return (first, second) if first != second else (str(runs[0].path), str(runs[1].path))


def _range(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"
