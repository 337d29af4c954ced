"""Do the findings of "Back to Basics" (Ahmadian et al. 2024, arXiv:2402.14740) show at small scale?

python benchmarks/papers_findings.py --processes 2        (about half an hour on 2 cores)

Pre-trains a policy of 1M parameters, then trains it with the project's trainer: RLOO, RAFT,
REINFORCE with and without a baseline at equal numbers of samples, several beta, a constant and
noise added to the reward. Separate seeds choose each method's learning rate. Finished runs are not
made again, so a stopped benchmark continues.

python benchmarks/papers_findings.py --staleness --processes 1

Measures what rollouts that are k steps old cost RLOO in learning and give in time: runs with a
separate generator, two processes each, beside the same run in one process. Each `--out` has one
kind of runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# one core a worker; before torch is imported anywhere
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from findings.pool import run_all  # noqa: E402
from findings.pretraining import STEPS as PRETRAINING_STEPS  # noqa: E402
from findings.pretraining import prepare  # noqa: E402
from findings.runs import (  # noqa: E402
    CELLS,
    LEARNING_RATES,
    PAPERS,
    STALENESS,
    STEPS,
    Job,
    Outcome,
)
from findings.summary import (  # noqa: E402
    best_rates,
    cell_rows,
    charts,
    difference_rows,
    lag_rows,
    markdown_table,
    rich_table,
    tuning_rows,
)
from rich.console import Console  # noqa: E402
from rich.progress import (  # noqa: E402
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

TUNING_SEEDS = (1, 2, 3)
FIRST_SEED = 101  # of the evaluation
# Of cells that sleep: they give seconds only, since they learn the same as cells without sleep.
SLEEPING_SEEDS = 3
JOB_SECONDS = 300.0
QUICK_STEPS = 4
QUICK_PRETRAINING = 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="evaluation seeds a cell (10)")
    parser.add_argument(
        "--staleness", action="store_true", help="the cells with a generator of their own instead"
    )
    parser.add_argument("--cells", nargs="+", choices=CELLS, metavar="CELL", help=", ".join(CELLS))
    parser.add_argument(
        "--out", type=Path, help="folder (results/papers_findings; results/staleness)"
    )
    parser.add_argument(
        "--processes", type=int, default=2, help="runs at once, of one core or two each (2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 seeds, few steps, no tuning: does it work at all?"
    )
    args = parser.parse_args()
    args.cells = args.cells or list(STALENESS if args.staleness else PAPERS)
    args.out = args.out or Path("results", "staleness" if args.staleness else "papers_findings")
    return args


def main() -> int:
    args = arguments()
    console = Console()
    pretraining_steps = PRETRAINING_STEPS
    if args.quick:
        # A separate policy, since so few steps teach it next to nothing.
        args.out = args.out / "quick"
        pretraining_steps = QUICK_PRETRAINING
    with console.status("pre-training the policy (one or two minutes, once)"):
        prepare(args.out, pretraining_steps)
    tuning = []
    failures = []
    rates = dict.fromkeys(CELLS, LEARNING_RATES[0])
    if not args.quick:
        jobs = tuning_jobs(args.cells)
        tuning, failures = finish("tuning", jobs, args, console)
        rates = best_rates(tuning)
    jobs = evaluation_jobs(args, rates)
    evaluation, failed = finish("evaluation", jobs, args, console)
    failures += failed
    for job, reason in failures:
        console.print(f"[red]no result[/red]: {job}: {reason}", markup=True, highlight=False)
    write_up(args.out, tuning, evaluation, console)
    return 1 if failures else 0


def tuning_jobs(cells: Sequence[str]) -> list[Job]:
    names = [CELLS[cell].tuned_as or cell for cell in cells if not CELLS[cell].lr]
    tuned = list(dict.fromkeys(names))
    jobs = []
    for seed in TUNING_SEEDS:
        for cell in tuned:
            jobs += [Job(cell, seed, lr) for lr in LEARNING_RATES]
    return jobs


def evaluation_jobs(args: argparse.Namespace, rates: dict[str, float]) -> list[Job]:
    num_seeds = 2 if args.quick else args.seeds
    steps = QUICK_STEPS if args.quick else STEPS
    jobs = []
    # Seeds are the outer loop, so that a stopped benchmark has all cells.
    for number in range(num_seeds):
        for name in args.cells:
            cell = CELLS[name]
            if cell.sleep and number >= SLEEPING_SEEDS:
                continue
            rate = cell.lr or rates.get(cell.tuned_as or name)
            if rate is not None:
                jobs.append(Job(name, FIRST_SEED + number, rate, steps))
    return jobs


def finish(
    name: str, jobs: list[Job], args: argparse.Namespace, console: Console
) -> tuple[list[Outcome], list[tuple[Job, str]]]:
    """Return the outcomes of all jobs, and the failed jobs with the reasons.

    Outcomes that `NAME.jsonl` has already are read from it.
    """
    path = args.out / f"{name}.jsonl"
    done = {outcome.job: outcome for outcome in read_outcomes(path)}
    missing = [job for job in jobs if job not in done]
    failed = []
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress, path.open("a", encoding="utf-8") as file:
        task = progress.add_task(name, total=len(jobs), completed=len(jobs) - len(missing))
        for job, answer in run_all(missing, args.out, args.processes, JOB_SECONDS):
            if isinstance(answer, str):
                failed.append((job, answer))
            else:
                done[job] = answer
                file.write(json.dumps(dataclasses.asdict(answer)) + "\n")
                file.flush()
            progress.advance(task)
    return [done[job] for job in jobs if job in done], failed


def read_outcomes(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    outcomes = []
    for line in path.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        job = Job(**values.pop("job"))
        validation = [(samples, value) for samples, value in values.pop("validation")]
        outcomes.append(Outcome(job, validation, **values))
    return outcomes


def write_up(out: Path, tuning: list[Outcome], evaluation: list[Outcome], console: Console) -> None:
    """Tables on the terminal, `summary.md` and `curves.svg`."""
    outcomes: dict[str, list[Outcome]] = {cell: [] for cell in CELLS}
    for outcome in evaluation:
        outcomes[outcome.job.cell].append(outcome)
    lag_title = (
        "How far behind, how fast, and where it is when half of the colocated steps are done"
    )
    tables = {
        "Tuning: reward less beta times KL": tuning_rows(tuning) if tuning else [],
        "Means over seeds, with standard errors": cell_rows(outcomes),
        "Paired differences, with standard errors": difference_rows(outcomes),
        lag_title: lag_rows(outcomes),
    }
    text = "# The papers' findings at small scale\n"
    for title, rows in tables.items():
        if len(rows) > 1:
            console.print(rich_table(rows, title))
            text += f"\n## {title}\n\n{markdown_table(rows)}"
    if evaluation:
        seconds = statistics.fmean(outcome.seconds for outcome in [*tuning, *evaluation])
        text += f"\n{len(tuning)} runs of tuning, {len(evaluation)} of evaluation; "
        text += f"{seconds:.1f} s a run.\n"
        (out / "curves.svg").write_text(charts(outcomes), encoding="utf-8")
    (out / "summary.md").write_text(text, encoding="utf-8")
    console.print(
        f"Written to {out}: summary.md, curves.svg, tuning.jsonl, evaluation.jsonl", highlight=False
    )


if __name__ == "__main__":
    sys.exit(main())
