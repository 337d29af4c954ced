"""What generation on GPUs of its own gives: steps simulated from measured phase times.

python benchmarks/async_simulation.py                                      (16 and 64 GPUs, phases of an 8B model)
python benchmarks/async_simulation.py --run results/mine --gpus 8 16       (phases and lengths of a run of one's own)
python benchmarks/async_simulation.py --check                              (beside published asynchronous runs)

Colocated: all GPUs generate, then all train. Apart: some train, the others generate; "in order" is what this project
does (docs/disaggregated.md), "as finished" takes the first groups that are done, as many as a step has prompts, has at
most (k + 1) times as many under way, and draws those anew that got older than k. Splits are the best of at most 15.
docs/disaggregated.md#what-it-gives has the assumptions; `MEASURED` and `PUBLISHED` have their sources.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from simulated_steps import (  # noqa: E402
    STEPS,
    WARM,
    Found,
    Job,
    as_finished,
    best_split,
    colocated,
    generate_seconds,
    in_order,
)

MODES = {"in order": in_order, "as finished": as_finished}
# Of one response, with mean 1.
TAILS: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda source: 1.0,
    "exponential": lambda source: source.expovariate(1.0),
    "log-normal": lambda source: source.lognormvariate(-0.5, 1.0),
}


@dataclass(frozen=True)
class Measured:
    """A colocated step that was measured.

    Attributes:
        gpus, prompts, group: of it; `group` samples a prompt.
        generate, training, fixed, refit, reward: seconds of phases; `training` is what more GPUs make shorter, `fixed`
            is not, `refit` hands over weights, `reward` is waited for.
        send: seconds to hand the weights to other GPUs.
        prompt, response, longest: tokens; mean and bound of responses, before the cut.
        balance: rows that take as long in a decode step as reading the weights does.
        engine, trainer: GPUs of an engine, and of a copy of the model that trains.
    """

    gpus: int
    prompts: int
    group: int
    generate: float
    training: float
    fixed: float
    refit: float
    send: float
    response: float
    longest: int
    balance: float
    prompt: int = 0
    reward: float = 0.0
    engine: int = 1
    trainer: int = 1

    def job(
        self, lengths: Callable[[int], Sequence[int]] | None = None, tail: str = "exponential"
    ) -> Job:
        """The step whose phases take these seconds on these GPUs; its lengths are drawn unless given."""
        lengths = lengths or Drawn(self.response, self.longest, self.group, tail)
        same = {
            name: getattr(self, name)
            for name in ("prompt", "fixed", "refit", "reward", "send", "engine", "trainer")
        }
        raw = Job(self.prompts, lengths, 1.0, 1 / self.balance, 1.0, **{**same, "fixed": 0.0})
        steps = range(WARM, STEPS)
        scale = self.generate / statistics.fmean(
            generate_seconds(raw, self.gpus, step) for step in steps
        )
        whole = statistics.fmean(raw.train_seconds(self.gpus, raw.groups(step)) for step in steps)
        rates = {"decode": scale, "row": scale / self.balance, "training": self.training / whole}
        return replace(raw, **rates, fixed=self.fixed)


class Drawn:
    """Response lengths that are independent of each other."""

    def __init__(
        self, mean: float, longest: int, group: int, tail: str = "exponential", seed: int = 0
    ):
        self._mean = mean
        self._longest = longest
        self._group = group
        self._draw = TAILS[tail]
        self._random = random.Random(seed)
        self._groups = list[list[int]]()

    def __call__(self, number: int) -> list[int]:
        while len(self._groups) <= number:
            drawn = [self._mean * self._draw(self._random) for _ in range(self._group)]
            self._groups.append([max(1, min(self._longest, round(length))) for length in drawn])
        return self._groups[number]


# Llama 3.1 8B Instruct, GRPO, 2,048 samples of at most 4,096 tokens, 8 H100: generation 58 s,
# log-probs 18, training 28, refit 5, whole step 112, 795 tokens a response (NVIDIA's blog on
# NeMo-RL 0.3, nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3; NVIDIA-NeMo/RL#959 has a rerun
# with 116). 64 prompts x 32 are its recipe's. Assumed: prompts of 120 tokens; weights go to other
# GPUs as fast as at the refit. Reading the weights once, 16 GB, takes as long as the caches of 120
# rows, 131 kB a token at some 1,000 tokens.
LLAMA_8B = Measured(8, 64, 32, 58.0, 18.0 + 28.0, 3.0, 5.0, 5.0, 795, 3976, 120.0, prompt=120)


def _verl(
    gpus: int,
    step: float,
    generate: float,
    refit: float,
    log_probs: float,
    update: float,
    longest: int,
) -> Measured:
    """Qwen2.5-Math-7B, DAPO, 16 samples a prompt, H20.

    Assumed, as its documentation does not say: 512 prompts a step in all runs, responses of 3,000 tokens, weights sent
    in 0.3 s ("under 300 ms"); 30 rows balance, as an H20's products are slow beside its memory.
    """
    rest = step - generate - refit - log_probs - update
    return Measured(
        gpus, 512, 16, generate, log_probs + update, rest, refit, 0.3, 3000, longest, 30.0
    )


@dataclass(frozen=True)
class Published:
    """An asynchronous run beside the colocated one, as published; seconds of a step."""

    name: str
    of: Measured
    gpus: int
    trainers: int
    mode: str
    together: float
    apart: float
    # mean tokens of both runs, where they differ from `of`
    responses: tuple[float, float] | None = None
    log_probs: float = 0.0  # seconds of `of` that the asynchronous run does without


# NeMo-RL: docs/about/performance-summary.md, v0.4 (mean sequences 1,060 and 1,129 tokens);
# async-grpo-llama3.1-8b- instruct-2n8g.yaml has 8 GPUs that generate. verl:
# docs/advance/one_step_off.md and fully_async.md; the latter's runs have staleness 0.5 and
# responses that go on under newer weights, and no log-prob pass.
PUBLISHED = [
    Published(
        "NeMo-RL 0.4, 8B, one step off", LLAMA_8B, 16, 8, "in order", 97.7, 74.6, (940, 1009)
    ),
    Published(
        "verl, one step off, FSDP2",
        _verl(16, 749, 247, 74, 88, 286, 20480),
        16,
        12,
        "in order",
        749,
        520,
    ),
    Published(
        "verl, one step off, Megatron",
        _verl(16, 699, 162, 45, 119, 344, 8192),
        16,
        12,
        "in order",
        699,
        566,
    ),
    *(
        Published(
            f"verl, fully async, {gpus}",
            of,
            gpus,
            gpus // 2,
            "as finished",
            step,
            apart,
            None,
            log_probs,
        )
        for gpus, step, generate, log_probs, update, apart in [
            (32, 790.1, 357.4, 107.7, 313.8, 294.8),
            (64, 365.3, 150.7, 70.3, 133.4, 189.3),
            (128, 356.3, 177.9, 53.9, 113.8, 150.6),
        ]
        for of in [_verl(gpus, step, generate, 0.0, log_probs, update, 28672)]
    ),
]


def check_rows(tail: str) -> Iterator[list[str]]:
    """Head, and a row for each published run: simulated, and published."""
    yield [
        "run",
        "train + generate",
        "colocated, s",
        "published",
        "apart, s",
        "published",
        "gain",
        "published",
    ]
    for case in PUBLISHED:
        of = case.of
        job = case.of.job(tail=tail)
        both = [job, job]
        if case.responses is not None:
            both = [
                replace(job, lengths=Drawn(mean, of.longest, of.group, tail))
                for mean in case.responses
            ]
        both[1] = replace(both[1], training=both[1].training * (1 - case.log_probs / of.training))
        generators = case.gpus - case.trainers
        found = (
            colocated(both[0], case.gpus),
            MODES[case.mode](both[1], case.trainers, generators, 1),
        )
        seconds = [found[0].seconds, case.together, found[1].seconds, case.apart]
        gains = [f"{seconds[0] / seconds[2]:.2f}", f"{seconds[1] / seconds[3]:.2f}"]
        yield [
            case.name,
            f"{case.trainers} + {generators}",
            *(f"{value:.0f}" for value in seconds),
            *gains,
        ]


@dataclass(frozen=True)
class Row:
    gpus: int
    samples: int  # a step
    placement: str
    k: int | None
    trainers: int
    generators: int
    found: Found
    gain: float  # colocated seconds over these


def rows_of(job: Job, group: int, gpus: int, lags: Sequence[int]) -> Iterator[Row]:
    base = colocated(job, gpus)
    yield Row(gpus, job.prompts * group, "colocated", None, gpus, gpus, base, 1.0)
    for name, simulate in MODES.items():
        for k in lags:
            trainers, generators, found = best_split(job, gpus, simulate, k)
            gain = base.seconds / found.seconds
            yield Row(gpus, job.prompts * group, name, k, trainers, generators, found, gain)


def read_run(folder: Path, send: float) -> tuple[Measured, Callable[[int], Sequence[int]]]:
    """Medians of a colocated run's phases after its first step, and the lengths of its groups, again and again."""
    from omegaconf import OmegaConf

    from reinforce_rl.config.load import read_config
    from reinforce_rl.monitoring.run_folder import RunFolder

    run = RunFolder(folder)
    cfg, _ = read_config(OmegaConf.create(run.configuration().text))  # type: ignore[arg-type]
    if cfg.placement != "colocated":
        sys.exit(
            f"{folder}: its ranks have generated apart; expected a run with placement=colocated"
        )
    lines = [line for line in run.lines if "timers/step_time" in line][1:]
    phases = ("generate", "reward_wait", "logprobs", "init_logprobs", "train_time", "step_time")
    median = {
        name: statistics.median(line.get(f"timers/{name}", 0.0) for line in lines)
        for name in phases
    }
    groups: dict[tuple[int, int], list[int]] = {}
    for step in run.sample_steps():
        for row in run.samples(step):
            groups.setdefault((step, row.prompt_id), []).append(row.response_length)
    drawn = list(groups.values())
    rl = cfg.trainer.reinforce
    block = cfg.model.block_size
    engine = cfg.engine.tensor_parallel_size or block
    lengths = [length for group in drawn for length in group]
    training = median["logprobs"] + median["init_logprobs"] + median["train_time"]
    fixed = max(0.0, median["step_time"] - median["generate"] - median["reward_wait"] - training)
    sizes = (
        cfg.trainer.devices * cfg.trainer.num_nodes,
        cfg.model.reinforce.num_rollout_samples,
        rl.num_rollouts_per_prompt,
    )
    seconds = median["generate"], training, fixed, 0.0, send
    tokens = statistics.fmean(lengths), max(lengths), LLAMA_8B.balance
    measured = Measured(
        *sizes, *seconds, *tokens, reward=median["reward_wait"], engine=engine, trainer=block
    )
    return measured, lambda number: drawn[number % len(drawn)]


def table_of(rows: Sequence[Row]) -> Table:
    heads = (
        "GPUs",
        "samples",
        "placement",
        "k",
        "train + generate",
        "step, s",
        "gain",
        "trainers wait",
        "age",
    )
    table = Table(*heads, "too old")
    for row in rows:
        first = str(row.gpus), str(row.samples), row.placement
        apart = ("", "all") if row.k is None else (str(row.k), f"{row.trainers} + {row.generators}")
        cells = f"{row.found.waiting:.0%}", f"{row.found.age:.2f}", f"{row.found.dropped:.1%}"
        last = () if row.k is None else cells
        table.add_row(*first, *apart, f"{row.found.seconds:.1f}", f"{row.gain:.2f}", *last)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, help="folder of a colocated run, in place of the published phases"
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[16, 64], help="in all (16 64)")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2], metavar="K", help="0 1 2")
    parser.add_argument(
        "--tail", choices=TAILS, default="exponential", help="of response lengths (%(default)s)"
    )
    parser.add_argument(
        "--send", type=float, default=1.0, help="seconds to send weights, with --run (%(default)s)"
    )
    parser.add_argument(
        "--check", action="store_true", help="published runs beside the simulation instead"
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()
    console = Console(width=119)
    if args.check:
        head, *body = check_rows(args.tail)
        table = Table(*head)
        for cells in body:
            table.add_row(*cells)
        console.print(table)
        return
    measured = LLAMA_8B
    lengths = None
    if args.run is not None:
        measured, lengths = read_run(args.run, args.send)
    console.print(measured, highlight=False)
    job = measured.job(lengths, args.tail)
    rows = list[Row]()
    for gpus in args.gpus:
        for times in sorted({1, max(1, gpus // args.gpus[0])}):
            # the same step, and one that grows with the GPUs
            rows += rows_of(
                replace(job, prompts=job.prompts * times), measured.group, gpus, args.lags
            )
    console.print(table_of(rows))
    if args.json is not None:
        content = {
            "measured": asdict(measured),
            "tail": args.tail,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
