"""Do the findings of "Back to Basics" (Ahmadian et al. 2024, arXiv:2402.14740) show at small scale?

python benchmarks/papers_findings.py --processes 2        (about half an hour on 2 cores)

A policy of 1M parameters is pre-trained, then trained by the project's own trainer: RLOO, RAFT, REINFORCE with and
without a baseline at equal numbers of samples, several beta, a constant and noise added to the reward. Each method's
learning rate is chosen with seeds of its own. A run that has been made is not made again, so a stopped benchmark goes
on where it was.

python benchmarks/papers_findings.py --staleness --processes 1

What rollouts that are k steps old cost RLOO in learning and give in time: runs with a generator of their own, which
are two processes each, beside the same run in one process. Each `--out` has one kind of runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
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
from findings.runs import CELLS, LEARNING_RATES, PAPERS, STALENESS, STEPS, Job, Outcome  # noqa: E402
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
# of cells that sleep: for seconds alone, as they learn what those without sleep do
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
    args, console = arguments(), Console()
    # its policy has learnt next to nothing
    args.out = args.out / "quick" if args.quick else args.out
    with console.status("pre-training the policy (one or two minutes, once)"):
        prepare(args.out, QUICK_PRETRAINING if args.quick else PRETRAINING_STEPS)
    tuning = []
    failures = []
    rates = dict.fromkeys(CELLS, LEARNING_RATES[0])
    if not args.quick:
        tuned = list(
            dict.fromkeys(CELLS[cell].tuned_as or cell for cell in args.cells if not CELLS[cell].lr)
        )
        jobs = [
            Job(cell, seed, lr) for seed in TUNING_SEEDS for cell in tuned for lr in LEARNING_RATES
        ]
        tuning, failures = finish("tuning", jobs, args, console)
        rates = best_rates(tuning)
    seeds = range(FIRST_SEED, FIRST_SEED + (2 if args.quick else args.seeds))
    steps = QUICK_STEPS if args.quick else STEPS
    jobs = [
        Job(cell, seed, rate, steps)
        for seed in seeds  # outermost, so that a run that is stopped has all cells
        for cell in args.cells
        if (rate := CELLS[cell].lr or rates.get(CELLS[cell].tuned_as or cell)) is not None
        and (not CELLS[cell].sleep or seed < FIRST_SEED + SLEEPING_SEEDS)
    ]
    evaluation, failed = finish("evaluation", jobs, args, console)
    for job, reason in [*failures, *failed]:
        console.print(f"[red]no result[/red]: {job}: {reason}", markup=True, highlight=False)
    write_up(args.out, tuning, evaluation, console)
    return 1 if failures or failed else 0


def finish(
    name: str, jobs: list[Job], args: argparse.Namespace, console: Console
) -> tuple[list[Outcome], list[tuple[Job, str]]]:
    """The outcomes of all jobs, from `NAME.jsonl` where it has them, and the jobs that failed with the reasons."""
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
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    outcomes = []
    for values in map(json.loads, lines):
        validation = [(samples, value) for samples, value in values.pop("validation")]
        outcomes.append(Outcome(Job(**values.pop("job")), validation, **values))
    return outcomes


def write_up(out: Path, tuning: list[Outcome], evaluation: list[Outcome], console: Console) -> None:
    """Tables on the terminal, `summary.md` and `curves.svg`."""
    outcomes = {cell: [o for o in evaluation if o.job.cell == cell] for cell in CELLS}
    tables = {
        "Tuning: reward less beta times KL": tuning_rows(tuning) if tuning else [],
        "Means over seeds, with standard errors": cell_rows(outcomes),
        "Paired differences, with standard errors": difference_rows(outcomes),
        "How far behind, how fast, and where it is when half of the colocated steps are done": lag_rows(
            outcomes
        ),
    }
    text = "# The papers' findings at small scale\n"
    for title, rows in tables.items():
        if len(rows) > 1:
            console.print(rich_table(rows, title))
            text += f"\n## {title}\n\n{markdown_table(rows)}"
    if evaluation:
        seconds = statistics.fmean(o.seconds for o in [*tuning, *evaluation])
        text += f"\n{len(tuning)} runs of tuning, {len(evaluation)} of evaluation; {seconds:.1f} s a run.\n"
        (out / "curves.svg").write_text(charts(outcomes), encoding="utf-8")
    (out / "summary.md").write_text(text, encoding="utf-8")
    console.print(
        f"Written to {out}: summary.md, curves.svg, tuning.jsonl, evaluation.jsonl", highlight=False
    )


if __name__ == "__main__":
    sys.exit(main())
