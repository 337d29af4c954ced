"""Simulate steps with generation on separate GPUs, from measured phase times.

python benchmarks/async_simulation.py                   (16 and 64 GPUs, phases of an 8B model)
python benchmarks/async_simulation.py --run results/mine --gpus 8 16    (phases of your run)
python benchmarks/async_simulation.py --check           (beside published asynchronous runs)

Colocated: all GPUs generate, then all train. Apart: some train, the others generate. "In order" is
this project's schedule (docs/generation.md). "As finished" trains on the first finished groups,
as many as a step has prompts; at most (k + 1) times as many are in flight, and groups older than k
are drawn again. The split is the best of at most 15. benchmarks/results/generation.md has the
assumptions; `LLAMA_8B` and `PUBLISHED` have their sources.
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
    Job,
    StepTimes,
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
    """Phases of a measured colocated step.

    Attributes:
        gpus, prompts, group: of the step; `group` samples a prompt.
        generate: seconds.
        training, fixed: seconds that more GPUs shorten, and seconds that they do not.
        refit: seconds to hand the weights over on the same GPUs.
        send: seconds to hand the weights to other GPUs.
        response, longest: tokens, mean and bound, before the cut.
        balance: rows that take as long in a decode step as reading the weights does.
        prompt: tokens.
        reward: seconds of waiting for rewards.
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
        """A job whose phases take these seconds on these GPUs.

        Lengths are drawn unless they are given.
        """
        lengths = lengths or Drawn(self.response, self.longest, self.group, tail)
        # One second for a decode step and for a token of training, to be scaled below.
        unscaled = Job(
            prompts=self.prompts,
            lengths=lengths,
            decode=1.0,
            row=1 / self.balance,
            training=1.0,
            prompt=self.prompt,
            reward=self.reward,
            refit=self.refit,
            send=self.send,
            engine=self.engine,
            trainer=self.trainer,
        )
        generating = []
        training = []
        for step in range(WARM, STEPS):
            generating.append(generate_seconds(unscaled, self.gpus, step))
            training.append(unscaled.train_seconds(self.gpus, unscaled.groups(step)))
        decode = self.generate / statistics.fmean(generating)
        return replace(
            unscaled,
            decode=decode,
            row=decode / self.balance,
            training=self.training / statistics.fmean(training),
            fixed=self.fixed,
        )


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
            group = [self._length() for _ in range(self._group)]
            self._groups.append(group)
        return self._groups[number]

    def _length(self) -> int:
        length = round(self._mean * self._draw(self._random))
        return max(1, min(self._longest, length))


# Llama 3.1 8B Instruct, GRPO, 2,048 samples of at most 4,096 tokens, 8 H100: generation 58 s,
# log-probs 18, training 28, refit 5, whole step 112, 795 tokens a response (NVIDIA's blog on
# NeMo-RL 0.3, nvidia-nemo.github.io/blog/2025/07/21/nemo-rl-v0.3; NVIDIA-NeMo/RL#959 has a rerun
# with 116). 64 prompts x 32 are its recipe's. Assumed: prompts of 120 tokens; weights go to other
# GPUs as fast as at the refit. Reading the weights once, 16 GB, takes as long as the caches of 120
# rows, 131 kB a token at some 1,000 tokens.
LLAMA_8B = Measured(
    gpus=8,
    prompts=64,
    group=32,
    generate=58.0,
    training=18.0 + 28.0,
    fixed=3.0,
    refit=5.0,
    send=5.0,
    response=795,
    longest=3976,
    balance=120.0,
    prompt=120,
)


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

    Assumed, as its documentation does not say: 512 prompts a step in all runs, responses of 3,000
    tokens, weights sent in 0.3 s ("under 300 ms"); 30 rows balance, since an H20's products are
    slow beside its memory.
    """
    return Measured(
        gpus=gpus,
        prompts=512,
        group=16,
        generate=generate,
        training=log_probs + update,
        fixed=step - generate - refit - log_probs - update,
        refit=refit,
        send=0.3,
        response=3000,
        longest=longest,
        balance=30.0,
    )


@dataclass(frozen=True)
class Published:
    """An asynchronous run beside the colocated one, as published.

    Attributes:
        colocated: phases of the colocated run.
        gpus, trainers: of the asynchronous run.
        together, apart: seconds of a step of the colocated and of the asynchronous run.
        responses: mean tokens of both runs, where they differ from `colocated`.
        log_probs: seconds of the colocated step that the asynchronous run does without.
    """

    name: str
    colocated: Measured
    gpus: int
    trainers: int
    mode: str
    together: float
    apart: float
    responses: tuple[float, float] | None = None
    log_probs: float = 0.0

    @property
    def generators(self) -> int:
        return self.gpus - self.trainers

    def jobs(self, tail: str) -> tuple[Job, Job]:
        """The work of the colocated and of the asynchronous step."""
        job = self.colocated.job(tail=tail)
        share = 1 - self.log_probs / self.colocated.training
        apart = replace(job, training=job.training * share)
        if self.responses is None:
            return job, apart
        lengths = [
            Drawn(mean, self.colocated.longest, self.colocated.group, tail)
            for mean in self.responses
        ]
        return replace(job, lengths=lengths[0]), replace(apart, lengths=lengths[1])


def _verl_async(
    gpus: int, step: float, generate: float, log_probs: float, update: float, apart: float
) -> Published:
    measured = _verl(gpus, step, generate, 0.0, log_probs, update, 28672)
    return Published(
        name=f"verl, fully async, {gpus}",
        colocated=measured,
        gpus=gpus,
        trainers=gpus // 2,
        mode="as finished",
        together=step,
        apart=apart,
        log_probs=log_probs,
    )


# NeMo-RL: docs/about/performance-summary.md, v0.4 (mean sequences 1,060 and 1,129 tokens);
# async-grpo-llama3.1-8b- instruct-2n8g.yaml has 8 GPUs that generate. verl:
# docs/advance/one_step_off.md and fully_async.md; the latter's runs have staleness 0.5 and
# responses that continue under newer weights, and no log-prob pass.
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
    _verl_async(32, 790.1, 357.4, 107.7, 313.8, 294.8),
    _verl_async(64, 365.3, 150.7, 70.3, 133.4, 189.3),
    _verl_async(128, 356.3, 177.9, 53.9, 113.8, 150.6),
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
        together_job, apart_job = case.jobs(tail)
        simulate = MODES[case.mode]
        together = colocated(together_job, case.gpus).seconds
        apart = simulate(apart_job, case.trainers, case.generators, 1).seconds
        yield [
            case.name,
            f"{case.trainers} + {case.generators}",
            f"{together:.0f}",
            f"{case.together:.0f}",
            f"{apart:.0f}",
            f"{case.apart:.0f}",
            f"{together / apart:.2f}",
            f"{case.together / case.apart:.2f}",
        ]


@dataclass(frozen=True)
class Row:
    gpus: int
    samples: int  # a step
    placement: str
    k: int | None
    trainers: int
    generators: int
    step: StepTimes
    gain: float  # colocated seconds over these

    def cells(self) -> list[str]:
        """As the table shows them, without the columns that a colocated row lacks."""
        cells = [str(self.gpus), str(self.samples), self.placement]
        seconds = f"{self.step.seconds:.1f}"
        gain = f"{self.gain:.2f}"
        if self.k is None:
            return [*cells, "", "all", seconds, gain]
        cells += [str(self.k), f"{self.trainers} + {self.generators}", seconds, gain]
        cells += [f"{self.step.waiting:.0%}", f"{self.step.age:.2f}", f"{self.step.dropped:.1%}"]
        return cells


def rows_of(job: Job, group: int, gpus: int, lags: Sequence[int]) -> Iterator[Row]:
    samples = job.prompts * group
    base = colocated(job, gpus)
    yield Row(gpus, samples, "colocated", None, gpus, gpus, base, 1.0)
    for name, simulate in MODES.items():
        for k in lags:
            trainers, generators, step = best_split(job, gpus, simulate, k)
            gain = base.seconds / step.seconds
            yield Row(gpus, samples, name, k, trainers, generators, step, gain)


def read_run(folder: Path, send: float) -> tuple[Measured, Callable[[int], Sequence[int]]]:
    """Read a colocated run.

    Returns the medians of its phases after the first step, and the lengths of its groups, which
    repeat.
    """
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

    def median(phase: str) -> float:
        return statistics.median(line.get(f"timers/{phase}", 0.0) for line in lines)

    groups: dict[tuple[int, int], list[int]] = {}
    for step in run.sample_steps():
        for row in run.samples(step):
            group = groups.setdefault((step, row.prompt_id), [])
            group.append(row.response_length)
    drawn = list(groups.values())
    lengths = [length for group in drawn for length in group]
    block = cfg.model.block_size
    generate = median("generate")
    reward = median("reward_wait")
    training = median("logprobs") + median("init_logprobs") + median("train_time")
    fixed = median("step_time") - generate - reward - training
    measured = Measured(
        gpus=cfg.trainer.devices * cfg.trainer.num_nodes,
        prompts=cfg.model.reinforce.num_rollout_samples,
        group=cfg.trainer.reinforce.num_rollouts_per_prompt,
        generate=generate,
        training=training,
        fixed=max(0.0, fixed),
        refit=0.0,
        send=send,
        response=statistics.fmean(lengths),
        longest=max(lengths),
        balance=LLAMA_8B.balance,
        reward=reward,
        engine=cfg.engine.tensor_parallel_size or block,
        trainer=block,
    )
    return measured, lambda number: drawn[number % len(drawn)]


def table_of(rows: Sequence[Row]) -> Table:
    heads = ["GPUs", "samples", "placement", "k", "train + generate", "step, s", "gain"]
    heads += ["trainers wait", "age", "too old"]
    table = Table(*heads)
    for row in rows:
        table.add_row(*row.cells())
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
        for row in body:
            table.add_row(*row)
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
        growth = max(1, gpus // args.gpus[0])
        # The same step, and a step that grows with the GPUs.
        for times in sorted({1, growth}):
            grown = replace(job, prompts=job.prompts * times)
            rows += rows_of(grown, measured.group, gpus, args.lags)
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
