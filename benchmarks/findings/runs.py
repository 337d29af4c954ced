"""The cells of the benchmark, and one run of a cell with the project's own trainer."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from helpers.rewards import ReadyRewards
from helpers.tiny_run import compose

from findings.language import reward
from findings.pretraining import MAX_POSITIONS, MAX_RESPONSE, NUM_VALIDATION
from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.load import load_config
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.records import RolloutRow, Samples
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel
from reinforce_rl.rewards.base import STATUS_OK, RewardRequest, Rewards
from reinforce_rl.rollout.generator_pool import GeneratorPool
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.runtime.control import RunControl
from reinforce_rl.runtime.roles import RankRole
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.trainer.run import build_trainer, result_bounds

BETA = 0.05
SAMPLES_PER_STEP = 32
STEPS = 32
VALIDATE_EVERY = 8
LEARNING_RATES = (1.5e-4, 3e-4, 6e-4, 1.2e-3)


@dataclass(frozen=True)
class Cell:
    """A setting that is run with several seeds.

    Attributes:
        name: on the command line and in files.
        title: in tables.
        estimator: `trainer.reinforce.advantage_estimator`.
        group: G, samples a prompt; a step has `SAMPLES_PER_STEP` samples in all cells.
        beta: `trainer.reinforce.initial_policy_kl_penalty`.
        noise: standard deviation of the noise added to every reward in training.
        offset: constant added to every reward in training.
        spread: deviation over prompts of a constant added to a prompt's rewards in training.
        tuned_as: the cell whose learning rate it takes; empty: its own is tuned.
        lr: a fixed learning rate instead; 0: none.
        staleness: `max_staleness` of a run with a separate generator; None: a colocated run.
        correction: `trainer.reinforce.generator_correction`; empty: the default.
        sleep: seconds that the generation of a step sleeps in addition, and its update too.
        against: cells that it is compared with, seed by seed.
    """

    name: str
    title: str
    estimator: str
    group: int
    beta: float = BETA
    noise: float = 0.0
    offset: float = 0.0
    spread: float = 0.0
    tuned_as: str = ""
    lr: float = 0.0
    staleness: int | None = None
    correction: str = ""
    sleep: float = 0.0
    against: tuple[str, ...] = ()


METHODS = [
    Cell("rloo4", "RLOO, G=4", "rloo", 4),
    Cell("rloo2", "RLOO, G=2", "rloo", 2, against=("rloo4",)),
    Cell("raft4", "RAFT, G=4", "raft", 4, against=("rloo4",)),
    Cell("running_mean", "REINFORCE, running mean", "running_mean", 1, against=("rloo4",)),
    Cell("vanilla", "vanilla, no baseline", "none", 1, against=("rloo4", "running_mean")),
]
# Constants that no policy can change; RLOO and RAFT compare samples of one prompt, so their runs
# stay the same.
OFFSETS = [
    Cell(
        "vanilla_plus1", "vanilla, reward + 1", "none", 1, offset=1.0, against=("rloo4", "vanilla")
    ),
    Cell(
        "vanilla_plus4", "vanilla, reward + 4", "none", 1, offset=4.0, against=("rloo4", "vanilla")
    ),
    Cell(
        "running_mean_spread2",
        "REINFORCE, running mean, prompts differ by 2",
        "running_mean",
        1,
        spread=2.0,
        against=("rloo4", "running_mean"),
    ),
]
BETAS = [
    Cell(
        "rloo4_beta0.001",
        "RLOO, G=4, beta 0.001",
        "rloo",
        4,
        0.001,
        tuned_as="rloo4",
        against=("rloo4",),
    ),
    Cell(
        "rloo4_beta0.2", "RLOO, G=4, beta 0.2", "rloo", 4, 0.2, tuned_as="rloo4", against=("rloo4",)
    ),
    Cell(
        "raft4_beta0.2",
        "RAFT, G=4, beta 0.2",
        "raft",
        4,
        0.2,
        tuned_as="raft4",
        against=("raft4", "rloo4_beta0.2"),
    ),
]
NOISES = [
    Cell(
        "rloo4_noise2",
        "RLOO, G=4, noise 2",
        "rloo",
        4,
        noise=2.0,
        tuned_as="rloo4",
        against=("rloo4",),
    ),
    Cell(
        "raft4_noise2",
        "RAFT, G=4, noise 2",
        "raft",
        4,
        noise=2.0,
        tuned_as="raft4",
        against=("raft4", "rloo4_noise2"),
    ),
]
# RLOO at the learning rate that was chosen for most others: how much of a difference is the
# learning rate's?
SAME_RATE = [
    Cell(
        "rloo4_lr",
        "RLOO, G=4, lr 3e-4",
        "rloo",
        4,
        lr=3e-4,
        against=("raft4", "running_mean", "vanilla"),
    ),
    Cell("rloo2_lr", "RLOO, G=2, lr 3e-4", "rloo", 2, lr=3e-4, against=("rloo4_lr", "vanilla")),
    Cell(
        "rloo4_noise2_lr",
        "RLOO, G=4, noise 2, lr 3e-4",
        "rloo",
        4,
        noise=2.0,
        lr=3e-4,
        against=("raft4_noise2",),
    ),
]
PAPERS = {cell.name: cell for cell in [*METHODS, *OFFSETS, *BETAS, *NOISES, *SAME_RATE]}
LAGS = (0, 1, 2, 4)


def lagging(lr: float, sleep: float = 0.0) -> list[Cell]:
    """RLOO in one process, and with rollouts that a generator draws k steps ahead."""
    name = f"_{lr:g}"
    title = f", lr {lr:g}"
    if sleep:
        name += "_sleep"
        title += ", sleeping"
    base = Cell(f"colocated{name}", f"colocated{title}", "rloo", 4, lr=lr, sleep=sleep)
    kept = replace(base, against=(base.name,))
    cells = [
        base,
        *(replace(kept, name=f"k{k}{name}", title=f"k = {k}{title}", staleness=k) for k in LAGS),
    ]
    if not sleep:
        last = cells[-1]
        uncorrected = replace(
            kept, name=f"k4_none{name}", title=f"k = 4, no correction{title}", staleness=4
        )
        cells.append(replace(uncorrected, correction="none", against=(base.name, last.name)))
    return cells


# RLOO's own rate of the papers' cells and two below. Sleeping takes longer than what is computed,
# so that seconds show the overlap and not how two processes share the cores.
LAGGING = [lagging(1.5e-4), lagging(3e-4), lagging(6e-4), lagging(6e-4, sleep=0.5)]
STALENESS = {cell.name: cell for cells in LAGGING for cell in cells}
CELLS = PAPERS | STALENESS


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        cell: a name of `CELLS`.
        seed: `model.seed`: order of the prompts, sampling, noise.
        lr: `model.optim.lr`.
        steps: optimizer steps.
    """

    cell: str
    seed: int
    lr: float
    steps: int = STEPS


@dataclass(frozen=True)
class Outcome:
    """What a run gave; all rewards are the true ones, without offset and noise.

    Attributes:
        job: what was run.
        validation: (samples drawn so far, mean reward of the validation prompts).
        training: mean reward of the samples of each step.
        kl: nats a response from the first policy, of the samples of each step.
        seconds: the run took, on one core; on two processes with a generator.
        steps: seconds of each step, without validation.
        moved: nats a response from the policy that sampled to the one that trains, of each step.
        capped: share of the tokens of each step whose weight reached the cap.
    """

    job: Job
    validation: list[tuple[int, float]]
    training: list[float]
    kl: list[float]
    seconds: float
    steps: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    capped: list[float] = field(default_factory=list)

    @property
    def final_reward(self) -> float:
        return self.validation[-1][1]

    @property
    def mean_reward(self) -> float:
        """Over the validations after the first: how fast it learnt."""
        return statistics.fmean(value for _, value in self.validation[1:])

    @property
    def step_seconds(self) -> float:
        """Of the median step: the first ones wait for the generator to begin."""
        return statistics.median(self.steps) if self.steps else math.nan

    def reward_after(self, seconds: float) -> float:
        """By then, at the pace of the median step, on a line between two validations."""
        before = self.validation[0]
        for samples, value in self.validation[1:]:
            missing = seconds - before[0] / SAMPLES_PER_STEP * self.step_seconds
            whole = (samples - before[0]) / SAMPLES_PER_STEP * self.step_seconds
            if missing < whole:
                return before[1] + (value - before[1]) * missing / whole
            before = samples, value
        return before[1]

    @property
    def fell(self) -> bool:
        """Whether it ended over half a deviation of the first policy's rewards below its best."""
        return max(value for _, value in self.validation) - self.final_reward > 0.5

    @property
    def objective(self) -> float:
        """Reward less beta times KL, what a run maximises."""
        return self.final_reward - CELLS[self.job.cell].beta * self.final_kl

    @property
    def final_kl(self) -> float:
        """Over the samples of the last eighth of the steps."""
        return statistics.fmean(self.kl[-max(1, len(self.kl) // 8) :])


class ReviewReward:
    """A reward source with the noise and the constants of a cell."""

    def __init__(self, cell: Cell, seed: int):
        self._cell = cell
        self._random = random.Random(seed)

    def infer_rm(self, request: RewardRequest) -> ReadyRewards:
        pairs = zip(request.prompts, request.responses, strict=True)
        values = [reward(response) + self._added(prompt) for prompt, response in pairs]
        return ReadyRewards(
            Rewards(torch.tensor(values), torch.full((len(values),), STATUS_OK, dtype=torch.int32))
        )

    def _added(self, prompt: str) -> float:
        constant = self._cell.offset + self._cell.spread * random.Random(prompt).gauss(0.0, 1.0)
        return constant + self._cell.noise * self._random.gauss(0.0, 1.0)

    def close(self) -> None:
        pass


class Recorder(SilentMonitor):
    """Keeps the true rewards and the KL of a run."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.validation: list[tuple[int, float]] = []
        self.training: list[float] = []
        self.kl: list[float] = []
        self.steps: list[float] = []
        self.moved: list[float] = []
        self.capped: list[float] = []

    def log_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        timings: Mapping[str, float],
        samples: Samples,
        memory: Mapping[str, float],
    ) -> None:
        self.training.append(true_mean(samples.rows))
        self.kl.append(metrics["init_policy_kl"])
        self.steps.append(round(timings["step_time"], 4))
        self.moved.append(metrics.get("generator_kl", 0.0) * metrics["response_lengths"])
        self.capped.append(metrics.get("generator_capped", 0.0))

    def log_validation(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        self.validation.append((step * SAMPLES_PER_STEP, true_mean(samples.rows)))


class NoCheckpoints:
    """A checkpointer that writes nothing: the save at the end takes longer than a step."""

    is_writing = False

    def save(self, step: int, state: dict, **options: Any) -> None:
        pass

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        pass


def true_mean(rows: Sequence[RolloutRow]) -> float:
    return statistics.fmean(reward(row.response) for row in rows)


def run(job: Job, mesh: Mesh, folder: Path, role: RankRole | None = None) -> Outcome:
    """Train once.

    Args:
        job: what to run.
        mesh: of this process.
        folder: that `pretraining.prepare` has filled.
        role: of this process, which trains, beside a generator; None: it generates too.
    """
    started = time.perf_counter()
    config = configuration(job, folder)
    tokenizer = load_tokenizer(config.pretrained_checkpoint.restore_from_path)
    recorder = Recorder(folder)
    source = ReviewReward(CELLS[job.cell], job.seed)
    pool = None
    with contextlib.ExitStack() as stack:
        if role is not None:
            control = RunControl(folder, StopRequest())
            # The scores are this file's, and no configured function's.
            bounds = replace(result_bounds(config), sources=None)
            pool = GeneratorPool(config, mesh.device, bounds, control, print, role)
            stack.enter_context(contextlib.closing(pool))
        trainer = build_trainer(
            config, mesh, tokenizer, build_datasets(config, tokenizer), source, recorder, pool=pool
        )
        trainer.ckpt_callback = NoCheckpoints()  # type: ignore[assignment]
        lengthen_generation(trainer.model, job)
        slow_training = _after(CELLS[job.cell].sleep, trainer.run_training)
        trainer.run_training = slow_training  # type: ignore[method-assign]
        trainer.fit()
    seconds = round(time.perf_counter() - started, 2)
    if not all(map(math.isfinite, [*recorder.kl, *recorder.training])):
        raise FloatingPointError(f"{job} gave a KL or a reward that is not finite")
    return Outcome(
        job=job,
        validation=recorder.validation,
        training=recorder.training,
        kl=recorder.kl,
        seconds=seconds,
        steps=recorder.steps,
        moved=recorder.moved,
        capped=recorder.capped,
    )


def lengthen_generation(model: MegatronGPTReinforceActorModel, job: Job) -> None:
    """Let each generation of a step sleep first, as the cell says."""
    infer = model.infer
    slow_infer = _after(CELLS[job.cell].sleep, model.infer)

    def infer_at_a_pace(*args: Any, validation: bool = False) -> Any:
        return (infer if validation else slow_infer)(*args, validation=validation)

    model.infer = infer_at_a_pace  # type: ignore[method-assign]


def _after(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
    def later(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **options)

    return later if seconds else function


def configuration(job: Job, folder: Path) -> TrainConfig:
    return load_config(compose(*overrides(job, folder)))


def overrides(job: Job, folder: Path) -> list[str]:
    """The command line of `examples/train_reinforce_actor.py` that a run amounts to."""
    cell = CELLS[job.cell]
    prompts = SAMPLES_PER_STEP // cell.group
    return [
        f"pretrained_checkpoint.restore_from_path={folder / 'model'}",
        f"model.data.data_prefix.train={folder / 'train.jsonl'}",
        f"model.data.data_prefix.validation={folder / 'validation.jsonl'}",
        f"exp_manager.explicit_log_dir={folder / 'unused'}",
        f"trainer.reinforce.advantage_estimator={cell.estimator}",
        f"trainer.reinforce.num_rollouts_per_prompt={cell.group}",
        f"trainer.reinforce.initial_policy_kl_penalty={cell.beta}",
        f"trainer.reinforce.max_steps={job.steps}",
        "trainer.reinforce.max_epochs=1000",
        f"trainer.reinforce.val_check_interval={VALIDATE_EVERY}",
        "trainer.reinforce.save_interval=0",
        f"model.seed={job.seed}",
        f"model.encoder_seq_length={MAX_POSITIONS}",
        f"model.micro_batch_size={SAMPLES_PER_STEP}",
        f"model.reinforce.num_rollout_samples={prompts}",
        f"model.reinforce.rollout_micro_batch_size={prompts}",
        f"model.reinforce.val_rollout_micro_batch_size={NUM_VALIDATION}",
        f"model.reinforce.length_params.max_length={MAX_RESPONSE}",
        "model.reinforce.val_sampling_params.use_greedy=false",
        f"model.optim.lr={job.lr}",
        "model.optim.weight_decay=0",
        *_of_generator(cell),
    ]


def _of_generator(cell: Cell) -> list[str]:
    if cell.staleness is None:
        return []
    options = [
        "trainer.devices=2",
        "placement=disaggregated",
        "generation_ranks=1",
        f"max_staleness={cell.staleness}",
    ]
    if cell.correction:
        options.append(f"trainer.reinforce.generator_correction={cell.correction}")
    if cell.correction == "none":
        options.append("model.reinforce.allow_biased_sampling=true")
    return options
