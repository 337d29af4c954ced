"""Measure what rollouts that are k steps old cost RLOO, and what each generator_correction repairs.

python benchmarks/staleness.py

Takes about a minute of one core and rewrites benchmarks/results/staleness.md.

Bias and variance of the gradient are exact: the script sums over every group of G sequences of the
tests' enumerable policy. Learning is simulated with Adam, many seeds at once. Advantages and loss
are the package's own. Not covered: a real model, long responses, another engine's rounding,
several optimizer steps on a batch.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.choices import GENERATOR_CORRECTIONS
from helpers.enumeration import BETA, MAX_LENGTH, NUM_SEQUENCES, TREE, VOCABULARY, relative_error
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cosine_similarity

from reinforce_rl.algorithm.advantages import RewardGroups, leave_one_out, no_baseline
from reinforce_rl.algorithm.kl import sequence_kl
from reinforce_rl.algorithm.loss import Denominators, LossInputs, LossSettings, policy_loss

SAMPLES = 4  # G
CAP = 2.0
STALENESS = (0, 1, 2, 4)
STEP_KLS = (0.001, 0.01, 0.03)  # nats a response between neighbouring versions
VERSION = 5  # of the policy whose gradient is estimated, in optimizer steps from the reference
PROBLEMS = 20
SHIFT = 2.0  # added to all rewards, in the table of baselines

GROUPS_PER_STEP = 4
STEPS = 64
SEEDS = 200
FIRST_SEED = 2000  # of learning; no problem of the gradient's
LEARNING_RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
BETAS = (0.9, 0.98)  # Adam's, the default of conf/train_reinforce_actor.yaml

UNCAPPED = "sequence, no cap"
OLD_KL = "K by the generator"
CORRECTIONS = {
    name: LossSettings(generator_correction=name, generator_ratio_cap=CAP)
    for name in GENERATOR_CORRECTIONS
} | {UNCAPPED: LossSettings(generator_correction="sequence", generator_ratio_cap=math.inf)}

# All groups, as sorted ones with the number of their orders: RLOO does not depend on the order.
GROUPS = torch.tensor(list(itertools.combinations_with_replacement(range(NUM_SEQUENCES), SAMPLES)))


def number_of_orders(group: Sequence[int]) -> float:
    counts = Counter(group).values()
    return math.factorial(SAMPLES) / math.prod(map(math.factorial, counts))


ORDERS = torch.tensor([number_of_orders(row) for row in GROUPS.tolist()], dtype=torch.float64)

Rows = list[list[str]]
Credit = Callable[[RewardGroups], Tensor]  # what multiplies the score of a response


@dataclass(frozen=True)
class Problem:
    """Rewards, and version 0 of the policy, which is the reference.

    Attributes:
        parameters: of version 0.
        reference: log-probs of version 0, [sequences, T].
        rewards: [sequences].
    """

    parameters: Tensor
    reference: Tensor
    rewards: Tensor

    @classmethod
    def draw(cls, seed: int) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        shape = (TREE.num_prefixes, VOCABULARY)
        parameters = torch.randn(shape, generator=generator, dtype=torch.float64)
        rewards = torch.randn(NUM_SEQUENCES, generator=generator, dtype=torch.float64)
        reference = TREE.log_probs(parameters)
        return cls(parameters, reference, rewards)

    def objective(self, sequences: Tensor) -> Tensor:
        """E[r] - beta KL, a scalar with gradient, from log-probs [sequences]."""
        kl = sequences - self.reference.sum(1)
        return sequences.exp() @ (self.rewards - BETA * kl)

    def optimum(self) -> Tensor:
        """Log-probs [sequences] of the best policy: the reference times exp(r / beta)."""
        logits = self.reference.sum(1) + self.rewards / BETA
        return logits.log_softmax(0)

    def gradient(self, parameters: Tensor) -> Tensor:
        leaf = parameters.clone().requires_grad_()
        sequences = TREE.log_probs(leaf).sum(1)
        (gradient,) = torch.autograd.grad(self.objective(sequences), leaf)
        return gradient

    def path(self, step_kl: float, versions: int = VERSION) -> list[Tensor]:
        """Parameters of versions 0 to `versions`: exact gradient ascent, `step_kl` nats a step."""
        parameters = [self.parameters]
        for _ in range(versions):
            start = parameters[-1]
            direction = self.gradient(start)
            low = 0.0
            high = 1.0
            while sequence_divergence(start, start + high * direction) < step_kl:
                high *= 2.0
            for _ in range(50):
                middle = (low + high) / 2
                divergence = sequence_divergence(start, start + middle * direction)
                if divergence < step_kl:
                    low = middle
                else:
                    high = middle
            parameters.append(start + low * direction)
        return parameters


def sequence_divergence(left: Tensor, right: Tensor) -> float:
    """KL(left, right) of two policies' responses in nats, from their parameters."""
    log_left = TREE.log_probs(left).sum(1)
    log_right = TREE.log_probs(right).sum(1)
    return float(log_left.exp() @ (log_left - log_right))


def scores_of(parameters: Tensor) -> Tensor:
    """The gradient of each token's log-prob: [sequences, T, parameters]."""
    jacobian = torch.autograd.functional.jacobian(TREE.log_probs, parameters)
    assert isinstance(jacobian, Tensor)
    return jacobian.view(NUM_SEQUENCES, MAX_LENGTH, -1)


def rloo_advantage(groups: RewardGroups) -> Tensor:
    return leave_one_out(groups).values


def rloo_baseline(groups: RewardGroups) -> Tensor:
    return leave_one_out(groups).baseline


def plain_reward(groups: RewardGroups) -> Tensor:
    return no_baseline(groups).values


class Estimate:
    """Exact mean and variance of a group's gradient at `now`, sampled with `behaviour`.

    The variance is the trace of the covariance.

    Args:
        now, behaviour: parameters of both policies.
        scores: `scores_of(now)`.
        kl_of_behaviour: take K from the generator's log-probs instead of the trainer's own.
    """

    def __init__(
        self,
        problem: Problem,
        now: Tensor,
        behaviour: Tensor,
        settings: LossSettings,
        scores: Tensor,
        credit: Credit = rloo_advantage,
        kl_of_behaviour: bool = False,
    ):
        log_probs = TREE.log_probs(now)
        drawn_with = TREE.log_probs(behaviour)
        kl_policy = drawn_with if kl_of_behaviour else log_probs
        kl = sequence_kl(kl_policy, problem.reference, TREE.mask)
        rows = GROUPS.flatten()
        ids = torch.arange(len(GROUPS)).repeat_interleave(SAMPLES)
        leaf = log_probs[rows].requires_grad_()
        less_kl = problem.rewards - BETA * kl
        loss = rloo_loss(
            leaf, drawn_with[rows], less_kl[rows], ids, rows, SAMPLES, settings, credit
        )
        # Each token's term depends on its own log-prob only, so this is every group's gradient by
        # its log-probs.
        (by_token,) = torch.autograd.grad(-loss, leaf)
        by_token = by_token.view(*GROUPS.shape, MAX_LENGTH)
        gradients = torch.einsum("ngt,ngtd->nd", by_token, scores[GROUPS])
        log_probability = drawn_with.sum(1)[GROUPS].sum(1)
        probability = ORDERS * log_probability.exp()
        self.mean = probability @ gradients
        deviations = gradients - self.mean
        self.variance = float(probability @ deviations.square().sum(1))


def rloo_loss(
    log_probs: Tensor,
    generator_log_probs: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    sequences: Tensor,
    samples: int,
    settings: LossSettings,
    credit: Credit = rloo_advantage,
) -> Tensor:
    """The trainer's loss, summed over batches of `samples` samples.

    Args:
        log_probs, generator_log_probs: [N, T], of N samples in all.
        rewards: [N], less beta K.
        group_ids: [N].
        sequences: [N], the places in the tree.
    """
    mask = TREE.mask[sequences]
    groups = RewardGroups.of(rewards, group_ids)
    advantages = credit(groups)[:, None]
    inputs = LossInputs(
        mask,
        advantages.where(mask, 0.0),
        torch.ones(len(mask), dtype=torch.bool),
        generator_log_probs=generator_log_probs,
    )
    denominators = Denominators(float(samples), 0.0, 0.0)
    loss, _ = policy_loss(log_probs, None, inputs, denominators, settings)
    return loss


@dataclass(frozen=True)
class Measured:
    """An estimate beside the true gradient and the on-policy variance."""

    bias: float  # relative to the true gradient's norm
    cosine: float
    variance: float  # relative to on-policy
    groups: float  # groups a step at which the squared bias is as large as the variance


def measure(
    problem: Problem,
    path: Sequence[Tensor],
    staleness: int,
    corrections: dict[str, LossSettings],
    **options,
) -> dict[str, Measured]:
    """Measure corrections at the last version of `path`, sampled `staleness` versions before.

    `options` are those of `Estimate`.
    """
    now = path[-1]
    behaviour = path[-1 - staleness]
    scores = scores_of(now)
    true = problem.gradient(now).flatten()
    on_policy = Estimate(problem, now, now, LossSettings(), scores)
    measured = {}
    for name, settings in corrections.items():
        estimate = Estimate(problem, now, behaviour, settings, scores, **options)
        cosine = cosine_similarity(estimate.mean, true, dim=0)
        squared_bias = (estimate.mean - true).square().sum()
        measured[name] = Measured(
            bias=relative_error(estimate.mean, true),
            cosine=float(cosine),
            variance=estimate.variance / on_policy.variance,
            groups=estimate.variance / float(squared_bias),
        )
    return measured


def median(values: Sequence[float]) -> float:
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(tensor.quantile(0.5))


def gradient_tables() -> dict[str, Rows]:
    """Medians over problems of each field of `Measured`, by step length, k and correction."""
    heads = ["KL a step", "k", "KL(sampled with, trained)", *CORRECTIONS]
    tables: dict[str, Rows] = {name: [list(heads)] for name in FORMATS}
    tables["bias"][0] += [
        f"{UNCAPPED}, {OLD_KL}",
        "sequence, worst problem",
        "cap matters in",
        "sequence below none",
    ]
    problems = [Problem.draw(seed) for seed in range(PROBLEMS)]
    for step_kl in STEP_KLS:
        paths = [problem.path(step_kl) for problem in problems]
        for k in STALENESS:
            add_gradient_rows(tables, problems, paths, step_kl, k)
    return tables


def add_gradient_rows(
    tables: dict[str, Rows],
    problems: Sequence[Problem],
    paths: Sequence[list[Tensor]],
    step_kl: float,
    k: int,
) -> None:
    pairs = list(zip(problems, paths, strict=True))
    measured = [measure(*pair, k, CORRECTIONS) for pair in pairs]
    divergence = median([sequence_divergence(path[-1 - k], path[-1]) for path in paths])
    first = [f"{step_kl:g}", str(k), f"{divergence:.2g}"]
    for name, rows in tables.items():
        row = list(first)
        for correction in CORRECTIONS:
            values = [getattr(each[correction], name) for each in measured]
            row.append(FORMATS[name](median(values)))
        rows.append(row)
    # The uncapped correction, with the K of the policy that sampled.
    uncapped = {OLD_KL: CORRECTIONS[UNCAPPED]}
    old_kl = []
    for pair in pairs:
        by_name = measure(*pair, k, uncapped, kl_of_behaviour=True)
        old_kl.append(by_name[OLD_KL].bias)
    capped = [each["sequence"].bias for each in measured]
    uncorrected = [each["none"].bias for each in measured]
    less = sum(with_cap < none for with_cap, none in zip(capped, uncorrected, strict=True))
    matters = sum(bias > 1e-12 for bias in capped)
    tables["bias"][-1] += [
        f"{median(old_kl):.2g}",
        f"{max(capped):.2g}",
        f"{matters} of {PROBLEMS}",
        f"{less} of {PROBLEMS}" if k else "",
    ]


FORMATS: dict[str, Callable[[float], str]] = {
    "bias": lambda value: f"{value:.2g}",
    "cosine": lambda value: f"{value:.3f}",
    "variance": lambda value: f"{value:.2f}",
    "groups": lambda value: f"{value:.2g}" if value < 1e6 else "-",
}


def baseline_table(step_kl: float = 0.01, staleness: int = 4) -> Rows:
    """Does a baseline of other samples of the old policy still leave the gradient's mean alone?"""
    heads = [
        "correction",
        "baseline's part",
        "rloo",
        "no baseline",
        f"rloo, all rewards + {SHIFT:g}",
        f"no baseline, all rewards + {SHIFT:g}",
    ]
    numbers: dict[str, list[list[float]]] = {name: [] for name in CORRECTIONS}
    for seed in range(PROBLEMS):
        problem = Problem.draw(seed)
        shifted = replace(problem, rewards=problem.rewards + SHIFT)
        path = problem.path(step_kl)
        now = path[-1]
        behaviour = path[-1 - staleness]
        scores = scores_of(now)
        true = problem.gradient(now).flatten()
        for name, settings in CORRECTIONS.items():
            part = Estimate(problem, now, behaviour, settings, scores, rloo_baseline).mean
            row = [float(part.norm() / true.norm())]
            for rewarded in (problem, shifted):
                for credit in (rloo_advantage, plain_reward):
                    estimate = Estimate(rewarded, now, behaviour, settings, scores, credit)
                    row.append(relative_error(estimate.mean, true))
            numbers[name].append(row)
    rows = [heads]
    for name, of_problems in numbers.items():
        medians = [median(column) for column in zip(*of_problems, strict=True)]
        rows.append([name, *(f"{value:.2g}" for value in medians)])
    return rows


@dataclass(frozen=True)
class Learnt:
    share: Tensor  # [seeds], of the gain from the reference's objective to the optimum's
    entropy: Tensor  # [seeds], of responses, less the optimum's, in nats
    step_kl: float  # mean KL between neighbouring versions, nats a response


def learn(
    rate: float,
    staleness: int,
    settings: LossSettings,
    *,
    kl_of_behaviour: bool = False,
    seeds: int = SEEDS,
    steps: int = STEPS,
) -> Learnt:
    """Train `seeds` policies, each on its own problem.

    A seed gets the same noise in every cell.
    """
    problems = [Problem.draw(FIRST_SEED + seed) for seed in range(seeds)]
    reference = torch.stack([problem.reference for problem in problems])
    rewards = torch.stack([problem.rewards for problem in problems])
    parameters = torch.stack([problem.parameters for problem in problems])
    parameters.requires_grad_()
    # Adam is elementwise, so the seeds do not affect each other.
    optimizer = torch.optim.Adam([parameters], rate, betas=BETAS)
    samples = GROUPS_PER_STEP * SAMPLES
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(steps, seeds, samples, generator=generator, dtype=torch.float64)
    group_ids = torch.arange(seeds * GROUPS_PER_STEP).repeat_interleave(SAMPLES)
    seed_ids = torch.arange(seeds).repeat_interleave(samples)
    log_probs_of = torch.vmap(TREE.log_probs)
    # Step s, from 1, samples with version max(0, s - 1 - k): the oldest of the last k + 1.
    versions: deque[Tensor] = deque(maxlen=staleness + 1)
    moved = []
    for uniform in noise:
        log_probs = log_probs_of(parameters)
        if versions:
            before = versions[-1].sum(2)
            after = log_probs.detach().sum(2)
            divergences = (before.exp() * (before - after)).sum(1)
            moved.append(float(divergences.mean()))
        versions.append(log_probs.detach())
        behaviour = versions[0]
        cumulative = behaviour.sum(2).exp().cumsum(1)
        sequences = torch.searchsorted(cumulative, uniform)
        sequences = sequences.clamp(max=NUM_SEQUENCES - 1).flatten()
        policy = log_probs[seed_ids, sequences]
        drawn_with = behaviour[seed_ids, sequences]
        kl_policy = drawn_with if kl_of_behaviour else policy
        kl = sequence_kl(kl_policy, reference[seed_ids, sequences], TREE.mask[sequences])
        less_kl = rewards[seed_ids, sequences] - BETA * kl
        loss = rloo_loss(policy, drawn_with, less_kl, group_ids, sequences, samples, settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shares = []
    entropies = []
    learnt = log_probs_of(parameters.detach()).sum(2)
    for problem, at_end in zip(problems, learnt, strict=True):
        best = problem.optimum()
        start = problem.objective(problem.reference.sum(1))
        end = problem.objective(at_end)
        top = problem.objective(best)
        shares.append((end - start) / (top - start))
        entropies.append(best.exp() @ best - at_end.exp() @ at_end)
    step_kl = sum(moved) / len(moved)
    return Learnt(torch.stack(shares), torch.stack(entropies), step_kl)


def with_error(values: Tensor) -> str:
    mean = float(values.mean())
    error = float(values.std() / math.sqrt(len(values)))
    return f"{mean:.3f} ± {error:.3f}"


def learning_tables() -> tuple[Rows, Rows]:
    """The part of the gain, and the entropy at the end, by learning rate, k and correction."""
    cells = {name: (name, False) for name in CORRECTIONS}
    for name in ("none", "sequence"):
        cells[f"{name}, {OLD_KL}"] = (name, True)
    heads = ["learning rate", "KL a step", "k", *cells]
    shares = [[*heads, "sequence - none", "sequence - k = 0"]]
    entropies = [heads]
    for rate in LEARNING_RATES:
        on_policy = learn(rate, 0, LossSettings())
        for k in STALENESS:
            # At k = 0 every weight is 1, so all cells are the same run.
            runs = dict.fromkeys(cells, on_policy)
            if k:
                for title, (name, old_kl) in cells.items():
                    runs[title] = learn(rate, k, CORRECTIONS[name], kl_of_behaviour=old_kl)
            first = [f"{rate:g}", f"{runs['none'].step_kl:.1e}", str(k)]
            differences = ["", ""]
            if k:
                share = runs["sequence"].share
                differences = [
                    with_error(share - runs["none"].share),
                    with_error(share - on_policy.share),
                ]
            share_cells = [with_error(run.share) for run in runs.values()]
            entropy_cells = [f"{float(run.entropy.mean()):.2f}" for run in runs.values()]
            shares.append([*first, *share_cells, *differences])
            entropies.append([*first, *entropy_cells])
    return shares, entropies


HEAD = f"""# Rollouts that are some steps old

What samples of a policy k optimizer steps back cost RLOO, by
`trainer.reinforce.generator_correction`. All numbers come from one command, in a clone, which
writes this page too;
[docs/algorithms.md](../../docs/algorithms.md#rollouts-that-are-some-steps-old) says what they mean.

```bash
python benchmarks/staleness.py
```

**The gradient** is exact, in float64: every group of G = {SAMPLES} of a policy with {NUM_SEQUENCES}
sequences of at most {MAX_LENGTH} tokens is summed. β = {BETA:g}, cap {CAP:g}. {PROBLEMS} problems
have random rewards and a random reference, which is version 0. Exact gradient ascent leads to
version {VERSION}; each step is as long as gives the stated KL, in nats a response, and version
{VERSION} - k samples. Numbers are medians over the problems, unless it says otherwise. `{UNCAPPED}`
must have no bias: it checks the sums. "{OLD_KL}" takes the K of the reward from the log-probs of
the policy that sampled, all else from the trainer's own.

**Learning** uses samples of the same policy: {SEEDS} seeds, each with its own rewards and
reference, {STEPS} steps of {GROUPS_PER_STEP} groups of {SAMPLES}, Adam with betas {BETAS}; step s
samples with version max(0, s - 1 - k). A seed gets the same noise in every cell. The score is the
share of the possible gain in E[r] - β KL that the samples brought, by enumeration: 0 is the
reference, 1 the optimum. `±` is the standard error over seeds; differences are seed by seed.
"""

TITLES = {
    "bias": "Bias: norm of (expected gradient - true gradient) / norm of the true gradient",
    "cosine": "Cosine of expected and true gradient",
    "variance": "Variance: trace of the covariance, as a share of on-policy",
    "groups": (
        "Groups of G a step at which the squared bias is as large as the variance; "
        "- is more than a million"
    ),
}
BASELINE = (
    "The baseline: its part in the expected gradient, and the bias with and without it; "
    "KL 0.01 a step, k = 4"
)
LEARNING = (
    f"Learning: part of the possible gain after {STEPS * GROUPS_PER_STEP * SAMPLES:,} samples"
)
ENTROPY = "Entropy of responses at the end, less the optimum's, in nats"


def markdown(rows: Rows) -> str:
    head, *body = rows
    rule = ["---"] * len(head)
    lines = ["| " + " | ".join(row) + " |\n" for row in [head, rule, *body]]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/staleness.md")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    tables = {TITLES[name]: rows for name, rows in gradient_tables().items()}
    tables[BASELINE] = baseline_table()
    tables[LEARNING], tables[ENTROPY] = learning_tables()
    console = Console(width=200)
    for title, rows in tables.items():
        table = Table(*rows[0], title=title)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    text = HEAD
    for title, rows in tables.items():
        text += f"\n**{title}**\n\n{markdown(rows)}"
    out.write_text(text, encoding="utf-8")
    console.print(f"Written to {out}", highlight=False)


if __name__ == "__main__":
    main()
