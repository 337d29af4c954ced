"""How soon do the alerts fire in a run that goes wrong, and how often in one that does not?

python benchmarks/alerts.py            (about half an hour on one core; runs that are there are not made again)

The task and the trainer are those of `papers_findings.py`. Healthy runs are that benchmark's, with its seeds, and
so are some that collapse; in others a failure is planted. Every run writes its folder, and the rules read
metrics.jsonl afterwards, as `reinforce-rl report` does. `--write` puts the tables into results/alerts.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
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
from reinforce_rl.run import build_trainer  # noqa: E402

FROM_STEP = 13  # the first step with a planted failure of the reward
RESULTS = HERE / "results" / "alerts.md"
BEGIN = "<!-- tables -->\n"
END = "<!-- end -->"
TABLE = "|---"


@dataclass(frozen=True)
class Plan:
    """A kind of run.

    Attributes:
        name: of its folders.
        title: in the table.
        cell: of `papers_findings.py`.
        seeds: one run each.
        lr: learning rate.
        reward: (step, prompt, response, true reward) to reward; None: the true one.
        rules: those of which one must speak; empty: none may, or it is not known whether it should.
        since: the step with which the failure begins.
    """

    name: str
    title: str
    cell: str
    seeds: range
    lr: float
    reward: Callable[[int, str, float], float] | None = None
    rules: tuple[str, ...] = ()
    since: int = 1
    options: tuple[str, ...] = ()


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
EVALUATED, PLANTED = range(101, 111), range(201, 203)
PLANS = [
    Plan("healthy", "healthy: RLOO, G=4, lr 1.5e-4", "rloo4", EVALUATED, 1.5e-4),
    Plan(
        "constant",
        "the reward is 0.5 for everything",
        "rloo4",
        PLANTED,
        1.5e-4,
        constant,
        ("constant_reward",),
    ),
    Plan(
        "dead",
        f"from step {FROM_STEP} on the server scores 0",
        "rloo4",
        PLANTED,
        1.5e-4,
        dead,
        ("changed_scorer", "constant_reward"),
        FROM_STEP,
    ),
    Plan(
        "scale",
        f"from step {FROM_STEP} on another scorer, 5 r + 10",
        "rloo4",
        PLANTED,
        1.5e-4,
        other_scale,
        ("changed_scorer",),
        FROM_STEP,
    ),
    Plan(
        "length",
        "the reward is the number of words, lr 3e-4",
        "rloo4",
        PLANTED,
        3e-4,
        by_length,
        ("length", "cut"),
    ),
    Plan(
        "repetition",
        "the reward is the number of words that occur again, lr 3e-4",
        "rloo4",
        PLANTED,
        3e-4,
        by_repetition,
        ("repetition", "length", "cut"),
    ),
    Plan(
        "huge_lr",
        "learning rate 1e-2: the policy breaks down",
        "rloo4",
        PLANTED,
        1e-2,
        None,
        ("entropy",),
    ),
    Plan(
        "kl",
        "no KL penalty, lr 1.2e-3: the KL runs away",
        "vanilla_plus4",
        PLANTED,
        1.2e-3,
        None,
        ("kl",),
        1,
        BETA_0,
    ),
    Plan("plus4", "vanilla, reward + 4, lr 1.2e-3", "vanilla_plus4", EVALUATED, 1.2e-3),
    Plan("raft", "RAFT, G=4, lr 1.2e-3", "raft4", EVALUATED, 1.2e-3),
    Plan("beta", "RLOO, G=4, beta 0.001, lr 6e-4", "rloo4_beta0.001", EVALUATED, 6e-4),
    Plan("noise", "RLOO, G=4, noise 2, lr 6e-4", "rloo4_noise2", EVALUATED, 6e-4),
    Plan("brink", "RLOO, G=4, lr 6e-4", "rloo4", EVALUATED, 6e-4),
]


class PlannedReward:
    """A reward source with the noise and the constants of a cell, and the planted failure, in training."""

    def __init__(self, plan: Plan, cell: Cell, seed: int):
        self._plan, self._cell, self._random = plan, cell, random.Random(seed)
        self.trainer: Any = None

    def infer_rm(self, request: RewardRequest) -> ReadyRewards:
        step = self.trainer.step + 1
        values = [
            self._of(step, response)
            + self._cell.offset
            + self._cell.noise * self._random.gauss(0.0, 1.0)
            for response in request.responses
        ]
        return ReadyRewards(
            Rewards(torch.tensor(values), torch.full((len(values),), STATUS_OK, dtype=torch.int32))
        )

    def _of(self, step: int, response: str) -> float:
        true = reward(response)
        return true if self._plan.reward is None else self._plan.reward(step, response, true)

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
    trainer = source.trainer = build_trainer(
        config, mesh, tokenizer, build_datasets(config, tokenizer), source, monitor
    )
    trainer.ckpt_callback = NoCheckpoints()  # type: ignore[assignment]
    trainer.save = lambda **_: None
    trainer.fit()
    unfinished.rename(folder)


@dataclass(frozen=True)
class Found:
    """What one run's metrics.jsonl says.

    Attributes:
        low: the step of the first validation from which on all are low: more than 0.5 below the best before, or less
            than 0.5 above the reward of the first step; None: the run ended well.
        said: (rule, step) of every alert, in order.
    """

    plan: Plan
    seed: int
    steps: int
    first: float
    best: float
    last: float
    low: int | None
    said: list[tuple[str, int]]

    @property
    def caught(self) -> tuple[str, int] | None:
        """The first alert of the plan's rules from its failure on."""
        return next(
            (one for one in self.said if one[1] >= self.plan.since and one[0] in self.plan.rules),
            None,
        )


def read(plan: Plan, seed: int, folder: Path) -> Found:
    run = RunFolder(folder)
    alert_rules = AlertRules()
    said = [(alert.kind, alert.first) for line in run.lines for alert in alert_rules.look(line)]
    validated, first = run.series("val/rewards"), run.series("train/rewards")[0][1]
    tops = itertools.accumulate((value for _, value in validated), max)
    low = None
    for (step, value), top in zip(validated, tops, strict=True):
        low = (low or step) if value < max(top - 0.5, first + 0.5) else None
    steps = sum(is_training(line) for line in run.lines)
    values = [value for _, value in validated]
    return Found(plan, seed, steps, first, max(values), values[-1], low, said)


def listed(said: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"`{rule}` {step}" for rule, step in said) or "-"


def tables(found: list[Found]) -> str:
    planted = [one for one in found if one.plan.rules]
    lines = [
        "| planted failure | seed | caught | steps after it began | all that was said: rule and step |",
        TABLE * 5,
    ]
    for one in planted:
        rule, step = one.caught or ("", 0)
        caught = [f"`{rule}`", str(step - one.plan.since + 1)] if rule else ["no", "-"]
        lines.append(
            f"| {one.plan.title} | {one.seed} | {' | '.join(caught)} | {listed(one.said)} |"
        )
    others = [one for one in found if not one.plan.rules]
    head = "| runs without a planted failure | ended well | with an alert | alerts in 1,000 steps | of what |"
    lines += ["", head, TABLE * 5]
    for plan in dict.fromkeys(one.plan for one in others):
        well = [one for one in others if one.plan == plan and one.low is None]
        said = Counter(rule for one in well for rule, _ in one.said)
        rate = f"{1000 * sum(said.values()) / sum(one.steps for one in well):.1f}" if well else "-"
        names = ", ".join(f"`{rule}` {count}" for rule, count in said.most_common()) or "-"
        of = sum(one.plan == plan for one in others)
        lines.append(
            f"| {plan.title} | {len(well)} of {of} | {sum(bool(one.said) for one in well)} | {rate} | {names} |"
        )
    columns = ["runs that collapsed", "seed", "reward: first, best, last"]
    columns += ["low from validation of step", "all that was said"]
    head = f"| {' | '.join(columns)} |"
    lines += ["", head, TABLE * 5]
    for one in others:
        if one.low is not None:
            rewards = f"{one.first:.2f}, {one.best:.2f}, {one.last:.2f}"
            lines.append(
                f"| {one.plan.title} | {one.seed} | {rewards} | {one.low} | {listed(one.said)} |"
            )
    return "\n".join(line if line[-1:] in ("|", "") else line + "|" for line in lines) + "\n"


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
    # The healthy ones of the first plan, then a seed of each plan after the other.
    jobs = [
        (bool(index) * round_, index, plan, seed)
        for index, plan in enumerate(PLANS)
        for round_, seed in enumerate(plan.seeds)
    ]
    jobs = [
        (plan, seed, args.out / "runs" / f"{plan.name}_{seed}")
        for *_, plan, seed in sorted(jobs, key=lambda job: job[:2])
    ]
    (args.out / "runs").mkdir(exist_ok=True)
    missing = [job for job in jobs if not job[2].exists()][: args.runs]
    with parallel_mesh() as mesh:
        for plan, seed, folder in missing:
            run(plan, seed, mesh, args.out, folder)
            print(folder, flush=True)
    text = tables([read(*job) for job in jobs if job[2].exists()])
    print(text)
    if args.write:
        head, _, rest = RESULTS.read_text("utf-8").partition(BEGIN)
        RESULTS.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
