"""Measure how soon alerts fire in a run that goes wrong, and how often in a healthy one.

python benchmarks/alerts.py            (about half an hour on one core)

Runs that exist already are not made again. Task and trainer come from `papers_findings.py`. Healthy
runs repeat that benchmark, with its seeds, and so do some runs that collapse; in others a failure
is planted. Every run writes its folder, and the rules read metrics.jsonl afterwards, as
`reinforce-rl report` does. `--write` puts the tables into results/alerts.md.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported anywhere
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

import torch  # noqa: E402
from findings.language import reward  # noqa: E402
from findings.pretraining import prepare  # noqa: E402
from findings.runs import CELLS, STEPS, Cell, Job, NoCheckpoints, overrides  # noqa: E402
from helpers.rewards import ReadyRewards  # noqa: E402
from helpers.tiny_run import compose  # noqa: E402

from reinforce_rl.config.load import load_config  # noqa: E402
from reinforce_rl.data.tokenizer import load_tokenizer  # noqa: E402
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh  # noqa: E402
from reinforce_rl.monitoring.alerts import AlertRules, is_training  # noqa: E402
from reinforce_rl.monitoring.loggers import JsonlLogger, Loggers  # noqa: E402
from reinforce_rl.monitoring.progress import TrainingProgress  # noqa: E402
from reinforce_rl.monitoring.run import RunMonitor  # noqa: E402
from reinforce_rl.monitoring.run_folder import RunFolder  # noqa: E402
from reinforce_rl.rewards.base import STATUS_OK, RewardRequest, Rewards  # noqa: E402
from reinforce_rl.rollout.prompts import build_datasets  # noqa: E402
from reinforce_rl.trainer.run import build_trainer  # noqa: E402

FROM_STEP = 13  # the first step with a planted failure of the reward
RESULTS = HERE / "results" / "alerts.md"
BEGIN = "<!-- tables -->\n"
END = "<!-- end -->"
RULE = "|---" * 5 + "|\n"  # below a table's head


EVALUATED = range(101, 111)
PLANTED = range(201, 203)


@dataclass(frozen=True)
class Plan:
    """A kind of run.

    Attributes:
        name: of its folders.
        title: in the table.
        lr: learning rate.
        cell: of `papers_findings.py`.
        seeds: one run each.
        reward: (step, response, true reward) to reward; None: the true one.
        rules: at least one of these must fire; empty: none may, or it is unknown whether it should.
        since: the first step with the failure.
        options: command-line overrides.
    """

    name: str
    title: str
    lr: float
    cell: str = "rloo4"
    seeds: range = EVALUATED
    reward: Callable[[int, str, float], float] | None = None
    rules: tuple[str, ...] = ()
    since: int = 1
    options: tuple[str, ...] = ()

    def reward_of(self, step: int, response: str) -> float:
        true = reward(response)
        if self.reward is None:
            return true
        return self.reward(step, response, true)


def constant(step: int, response: str, true: float) -> float:
    return 0.5


def dead(step: int, response: str, true: float) -> float:
    return 0.0 if step >= FROM_STEP else true


def other_scale(step: int, response: str, true: float) -> float:
    return 5 * true + 10 if step >= FROM_STEP else true


def by_length(step: int, response: str, true: float) -> float:
    return len(response.split()) / 5


def by_repetition(step: int, response: str, true: float) -> float:
    words = response.split()
    return (len(words) - len(set(words))) / 4


BETA_0 = ("trainer.reinforce.initial_policy_kl_penalty=0.000001",)  # the KL is still measured
PLANS = [
    Plan("healthy", "healthy: RLOO, G=4, lr 1.5e-4", 1.5e-4),
    Plan(
        "constant",
        "the reward is 0.5 for everything",
        1.5e-4,
        seeds=PLANTED,
        reward=constant,
        rules=("constant_reward",),
    ),
    Plan(
        "dead",
        f"from step {FROM_STEP} on the server scores 0",
        1.5e-4,
        seeds=PLANTED,
        reward=dead,
        rules=("reward_jump", "constant_reward"),
        since=FROM_STEP,
    ),
    Plan(
        "scale",
        f"from step {FROM_STEP} on another scorer, 5 r + 10",
        1.5e-4,
        seeds=PLANTED,
        reward=other_scale,
        rules=("reward_jump",),
        since=FROM_STEP,
    ),
    Plan(
        "length",
        "the reward is the number of words, lr 3e-4",
        3e-4,
        seeds=PLANTED,
        reward=by_length,
        rules=("length", "truncated"),
    ),
    Plan(
        "repetition",
        "the reward is the number of words that occur again, lr 3e-4",
        3e-4,
        seeds=PLANTED,
        reward=by_repetition,
        rules=("repetition", "length", "truncated"),
    ),
    Plan(
        "huge_lr",
        "learning rate 1e-2: the policy breaks down",
        1e-2,
        seeds=PLANTED,
        rules=("entropy",),
    ),
    Plan(
        "kl",
        "no KL penalty, lr 1.2e-3: the KL runs away",
        1.2e-3,
        cell="vanilla_plus4",
        seeds=PLANTED,
        rules=("kl",),
        options=BETA_0,
    ),
    Plan("plus4", "vanilla, reward + 4, lr 1.2e-3", 1.2e-3, cell="vanilla_plus4"),
    Plan("raft", "RAFT, G=4, lr 1.2e-3", 1.2e-3, cell="raft4"),
    Plan("beta", "RLOO, G=4, beta 0.001, lr 6e-4", 6e-4, cell="rloo4_beta0.001"),
    Plan("noise", "RLOO, G=4, noise 2, lr 6e-4", 6e-4, cell="rloo4_noise2"),
    Plan("brink", "RLOO, G=4, lr 6e-4", 6e-4),
]


class PlannedReward:
    """A reward source with a cell's noise and constants, and the planted failure, in training."""

    def __init__(self, plan: Plan, cell: Cell, seed: int):
        self._plan = plan
        self._cell = cell
        self._random = random.Random(seed)
        self.trainer: Any = None

    def infer_rm(self, request: RewardRequest) -> ReadyRewards:
        step = self.trainer.step + 1
        values = []
        for response in request.responses:
            noise = self._cell.noise * self._random.gauss(0.0, 1.0)
            planned = self._plan.reward_of(step, response) + self._cell.offset
            values.append(planned + noise)
        status = torch.full((len(values),), STATUS_OK, dtype=torch.int32)
        return ReadyRewards(Rewards(torch.tensor(values), status))

    def close(self) -> None:
        pass


def run(plan: Plan, seed: int, mesh: Mesh, data: Path, folder: Path) -> None:
    """Train once; the run's folder is whole or absent."""
    torch.set_num_threads(1)
    job = Job(plan.cell, seed, plan.lr, STEPS)
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    config = load_config(compose(*overrides(job, data), *plan.options))
    tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
    metrics = JsonlLogger(unfinished / "metrics.jsonl")
    monitor = RunMonitor(unfinished, Loggers([metrics]), TrainingProgress(STEPS, enabled=False))
    source = PlannedReward(plan, CELLS[plan.cell], seed)
    datasets = build_datasets(config, tokenizer)
    trainer = build_trainer(config, mesh, tokenizer, datasets, source, monitor)
    source.trainer = trainer
    trainer.ckpt_callback = NoCheckpoints()  # type: ignore[assignment]
    trainer.save = lambda **_: None
    trainer.fit()
    unfinished.rename(folder)


@dataclass(frozen=True)
class RunAlerts:
    """The alerts and rewards in one run's metrics.jsonl.

    Attributes:
        low: the step of the first validation from which on all are low: more than 0.5 below the
            best before, or less than 0.5 above the reward of the first step; None: the run ended
            well.
        alerts: (rule, step) of every alert, in order.
    """

    plan: Plan
    seed: int
    steps: int
    first: float
    best: float
    last: float
    low: int | None
    alerts: list[tuple[str, int]]

    @property
    def caught(self) -> tuple[str, int] | None:
        """The first alert of the plan's rules after its failure began."""
        for rule, step in self.alerts:
            if step >= self.plan.since and rule in self.plan.rules:
                return rule, step
        return None


def read(plan: Plan, seed: int, folder: Path) -> RunAlerts:
    run = RunFolder(folder)
    alert_rules = AlertRules()
    alerts = []
    for line in run.lines:
        alerts += [(alert.kind, alert.first) for alert in alert_rules.look(line)]
    _, first = run.series("train/rewards")[0]
    low = None
    best = -math.inf
    last = math.nan
    for step, last in run.series("val/rewards"):
        best = max(best, last)
        is_low = last < max(best - 0.5, first + 0.5)
        # Step 0 is the validation before training.
        low = (low or step) if is_low else None
    steps = sum(is_training(line) for line in run.lines)
    return RunAlerts(plan, seed, steps, first, best, last, low, alerts)


def listed(alerts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"`{rule}` {step}" for rule, step in alerts) or "-"


def line_of(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def planted_table(runs: Iterable[RunAlerts]) -> str:
    head = ["planted failure", "seed", "caught", "steps after it began"]
    text = line_of(*head, "all that was said: rule and step") + RULE
    for run in runs:
        caught = "no"
        steps = "-"
        if run.caught is not None:
            rule, step = run.caught
            caught = f"`{rule}`"
            steps = str(step - run.plan.since + 1)
        text += line_of(run.plan.title, run.seed, caught, steps, listed(run.alerts))
    return text


def false_alarm_table(runs: Sequence[RunAlerts]) -> str:
    head = ["runs without a planted failure", "ended well", "with an alert"]
    text = line_of(*head, "alerts in 1,000 steps", "of what") + RULE
    for plan in dict.fromkeys(run.plan for run in runs):
        of_plan = [run for run in runs if run.plan == plan]
        well = [run for run in of_plan if run.low is None]
        alerts = Counter(rule for run in well for rule, _ in run.alerts)
        rate = "-"
        if well:
            steps = sum(run.steps for run in well)
            rate = f"{1000 * alerts.total() / steps:.1f}"
        with_alert = sum(bool(run.alerts) for run in well)
        ended_well = f"{len(well)} of {len(of_plan)}"
        text += line_of(plan.title, ended_well, with_alert, rate, listed(alerts.most_common()))
    return text


def collapse_table(runs: Iterable[RunAlerts]) -> str:
    head = ["runs that collapsed", "seed", "reward: first, best, last"]
    text = line_of(*head, "low from validation of step", "all that was said") + RULE
    for run in runs:
        if run.low is None:
            continue
        rewards = f"{run.first:.2f}, {run.best:.2f}, {run.last:.2f}"
        text += line_of(run.plan.title, run.seed, rewards, run.low, listed(run.alerts))
    return text


def tables(runs: Iterable[RunAlerts]) -> str:
    planted = []
    others = []
    for run in runs:
        if run.plan.rules:
            planted.append(run)
        else:
            others.append(run)
    parts = [planted_table(planted), false_alarm_table(others), collapse_table(others)]
    return "\n".join(parts)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("results/alerts"), help="folder of the runs (%(default)s)"
    )
    parser.add_argument("--runs", type=int, help="make no more than this many (all)")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write the tables to {RESULTS.relative_to(HERE.parent)}",
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    prepare(args.out)
    runs = args.out / "runs"
    runs.mkdir(exist_ok=True)
    jobs = [(plan, seed, runs / f"{plan.name}_{seed}") for plan, seed in ordered_jobs()]
    missing = [job for job in jobs if not job[2].exists()]
    with parallel_mesh() as mesh:
        for plan, seed, folder in missing[: args.runs]:
            run(plan, seed, mesh, args.out, folder)
            print(folder, flush=True)
    text = tables([read(*job) for job in jobs if job[2].exists()])
    print(text)
    if args.write:
        head, _, rest = RESULTS.read_text("utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        RESULTS.write_text(f"{head}{BEGIN}\n{text}\n{END}{after}", "utf-8")
    return 0


def ordered_jobs() -> list[tuple[Plan, int]]:
    """All seeds of the first, healthy plan, then one seed of each other plan after the other."""
    first, *others = PLANS
    jobs = [(first, seed) for seed in first.seeds]
    for number in range(max(len(plan.seeds) for plan in others)):
        for plan in others:
            if number < len(plan.seeds):
                jobs.append((plan, plan.seeds[number]))
    return jobs


if __name__ == "__main__":
    sys.exit(main())
