"""What do rollouts that are k optimizer steps old cost RLOO, and how much does each generator_correction repair?

python benchmarks/staleness.py        (about a minute of one core; rewrites benchmarks/results/staleness.md)

Bias and variance of the gradient are exact: every group of G sequences of the enumerable policy of the tests is
summed. Learning is simulated with Adam, many seeds at once. Advantages and loss are the package's own. Not here: a
real model, long responses, another engine's rounding, several optimizer steps on a batch.
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
ORDERS = torch.tensor(
    [
        math.factorial(SAMPLES) / math.prod(map(math.factorial, Counter(row).values()))
        for row in GROUPS.tolist()
    ],
    dtype=torch.float64,
)

Rows = list[list[str]]


@dataclass(frozen=True)
class Problem:
    """Rewards [sequences]; parameters and log-probs [sequences, T] of version 0, which is the reference."""

    parameters: Tensor
    reference: Tensor
    rewards: Tensor

    @classmethod
    def draw(cls, seed: int) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        parameters = torch.randn(
            TREE.num_prefixes, VOCABULARY, generator=generator, dtype=torch.float64
        )
        rewards = torch.randn(NUM_SEQUENCES, generator=generator, dtype=torch.float64)
        return cls(parameters, TREE.log_probs(parameters), rewards)

    def objective(self, sequences: Tensor) -> Tensor:
        """E[r] - beta KL, a scalar with gradient, from log-probs [sequences]."""
        return sequences.exp() @ (self.rewards - BETA * (sequences - self.reference.sum(1)))

    def optimum(self) -> Tensor:
        """Log-probs [sequences] of the best policy, the reference's times exp(r / beta)."""
        return (self.reference.sum(1) + self.rewards / BETA).log_softmax(0)

    def gradient(self, parameters: Tensor) -> Tensor:
        leaf = parameters.clone().requires_grad_()
        return torch.autograd.grad(self.objective(TREE.log_probs(leaf).sum(1)), leaf)[0]

    def path(self, step_kl: float, versions: int = VERSION) -> list[Tensor]:
        """Parameters of versions 0 to `versions`: exact gradient ascent, each step `step_kl` nats long."""
        found = [self.parameters]
        for _ in range(versions):
            start = found[-1]
            direction = self.gradient(found[-1])
            low = 0.0
            high = 1.0
            while sequence_divergence(start, start + high * direction) < step_kl:
                high *= 2.0
            for _ in range(50):
                middle = (low + high) / 2
                is_short = sequence_divergence(start, start + middle * direction) < step_kl
                low, high = (middle, high) if is_short else (low, middle)
            found.append(start + low * direction)
        return found


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
    """Exact mean and variance (the covariance's trace) of a group's gradient at `now`, sampled with `behaviour`.

    Args:
        now, behaviour: parameters of both policies.
        scores: `scores_of(now)`.
        credit: what multiplies the score of a response.
        kl_of_behaviour: K from the generator's log-probs; the trainer's own otherwise.
    """

    def __init__(
        self,
        problem: Problem,
        now: Tensor,
        behaviour: Tensor,
        settings: LossSettings,
        scores: Tensor,
        credit: Callable[[RewardGroups], Tensor] = rloo_advantage,
        kl_of_behaviour: bool = False,
    ):
        log_probs = TREE.log_probs(now)
        drawn_with = TREE.log_probs(behaviour)
        kl = sequence_kl(drawn_with if kl_of_behaviour else log_probs, problem.reference, TREE.mask)
        rows = GROUPS.flatten()
        ids = torch.arange(len(GROUPS)).repeat_interleave(SAMPLES)
        leaf = log_probs[rows].requires_grad_()
        less_kl = (problem.rewards - BETA * kl)[rows]
        loss = rloo_loss(leaf, drawn_with[rows], less_kl, ids, rows, SAMPLES, settings, credit)
        # Each token's term depends on its own log-prob only, so this is every group's gradient by
        # its log-probs.
        (by_token,) = torch.autograd.grad(-loss, leaf)
        found = torch.einsum(
            "ngt,ngtd->nd", by_token.view(*GROUPS.shape, MAX_LENGTH), scores[GROUPS]
        )
        probability = ORDERS * drawn_with.sum(1)[GROUPS].sum(1).exp()
        self.mean = probability @ found
        self.variance = float(probability @ (found - self.mean).square().sum(1))


def rloo_loss(
    log_probs: Tensor,
    generator_log_probs: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    sequences: Tensor,
    samples: int,
    settings: LossSettings,
    credit: Callable[[RewardGroups], Tensor] = rloo_advantage,
) -> Tensor:
    """The trainer's loss, summed over batches of `samples` samples; N samples in all.

    Log-probs are [N, T], rewards less beta K, group ids and places in the tree [N].
    """
    mask = TREE.mask[sequences]
    inputs = LossInputs(
        mask,
        credit(RewardGroups.of(rewards, group_ids))[:, None].where(mask, 0.0),
        torch.ones(len(mask), dtype=torch.bool),
        generator_log_probs=generator_log_probs,
    )
    return policy_loss(log_probs, None, inputs, Denominators(float(samples), 0.0, 0.0), settings)[0]


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
    """Corrections at the last version of `path`, sampled `staleness` versions before; `options` of `Estimate`."""
    now = path[-1]
    behaviour = path[-1 - staleness]
    scores = scores_of(now)
    true = problem.gradient(now).flatten()
    on_policy = Estimate(problem, now, now, LossSettings(), scores).variance
    found = {}
    for name, settings in corrections.items():
        estimate = Estimate(problem, now, behaviour, settings, scores, **options)
        found[name] = Measured(
            relative_error(estimate.mean, true),
            float(cosine_similarity(estimate.mean, true, dim=0)),
            estimate.variance / on_policy,
            estimate.variance / float((estimate.mean - true).square().sum()),
        )
    return found


def median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def gradient_tables() -> dict[str, Rows]:
    """Medians over problems of each field of `Measured`, by step length, k and correction."""
    tables: dict[str, Rows] = {
        name: [["KL a step", "k", "KL(sampled with, trained)", *CORRECTIONS]] for name in FORMATS
    }
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
            pairs = list(zip(problems, paths, strict=True))
            found = [measure(*pair, k, CORRECTIONS) for pair in pairs]
            divergence = median([sequence_divergence(path[-1 - k], path[-1]) for path in paths])
            for name, rows in tables.items():
                values = [median([getattr(each[c], name) for each in found]) for c in CORRECTIONS]
                rows.append(
                    [f"{step_kl:g}", str(k), f"{divergence:.2g}", *map(FORMATS[name], values)]
                )
            old_kl = [
                measure(*pair, k, {OLD_KL: CORRECTIONS[UNCAPPED]}, kl_of_behaviour=True)[
                    OLD_KL
                ].bias
                for pair in pairs
            ]
            capped = [each["sequence"].bias for each in found]
            less = sum(bias < each["none"].bias for bias, each in zip(capped, found, strict=True))
            matters = sum(bias > 1e-12 for bias in capped)
            tables["bias"][-1] += [
                f"{median(old_kl):.2g}",
                f"{max(capped):.2g}",
                f"{matters} of {PROBLEMS}",
            ]
            tables["bias"][-1].append(f"{less} of {PROBLEMS}" if k else "")
    return tables


FORMATS: dict[str, Callable[[float], str]] = {
    "bias": lambda value: f"{value:.2g}",
    "cosine": lambda value: f"{value:.3f}",
    "variance": lambda value: f"{value:.2f}",
    "groups": lambda value: f"{value:.2g}" if value < 1e6 else "-",
}


def baseline_table(step_kl: float = 0.01, staleness: int = 4) -> Rows:
    """Does a baseline of other samples of the old policy still leave the gradient's mean alone?"""
    heads = (
        "rloo",
        "no baseline",
        f"rloo, all rewards + {SHIFT:g}",
        f"no baseline, all rewards + {SHIFT:g}",
    )
    columns: dict[str, list[list[float]]] = {name: [] for name in CORRECTIONS}
    for problem in map(Problem.draw, range(PROBLEMS)):
        shifted = replace(problem, rewards=problem.rewards + SHIFT)
        path = problem.path(step_kl)
        now = path[-1]
        behaviour = path[-1 - staleness]
        scores = scores_of(now)
        true = problem.gradient(now).flatten()
        for name, settings in CORRECTIONS.items():
            part = Estimate(problem, now, behaviour, settings, scores, rloo_baseline).mean
            estimates = [
                Estimate(where, now, behaviour, settings, scores, credit).mean
                for where in (problem, shifted)
                for credit in (rloo_advantage, plain_reward)
            ]
            errors = [relative_error(estimate, true) for estimate in estimates]
            columns[name].append([float(part.norm() / true.norm()), *errors])
    rows = [["correction", "baseline's part", *heads]]
    for name, found in columns.items():
        rows.append([name, *(f"{median(values):.2g}" for values in zip(*found, strict=True))])
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
    """Train `seeds` policies, each on a problem of its own; the same seed meets the same noise in every cell."""
    problems = [Problem.draw(FIRST_SEED + seed) for seed in range(seeds)]
    reference, rewards = (
        torch.stack([getattr(p, name) for p in problems]) for name in ("reference", "rewards")
    )
    parameters = torch.stack([problem.parameters for problem in problems]).requires_grad_()
    # elementwise, so seeds do not meet
    optimizer = torch.optim.Adam([parameters], rate, betas=BETAS)
    samples = GROUPS_PER_STEP * SAMPLES
    noise = torch.rand(
        steps, seeds, samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    group_ids = torch.arange(seeds * GROUPS_PER_STEP).repeat_interleave(SAMPLES)
    seed_ids = torch.arange(seeds)[:, None].expand(-1, samples).flatten()
    log_probs_of = torch.vmap(TREE.log_probs)
    # Step s, from 1, samples with version max(0, s - 1 - k): the oldest of the last k + 1.
    versions: deque[Tensor] = deque(maxlen=staleness + 1)
    moved = []
    for uniform in noise:
        log_probs = log_probs_of(parameters)
        if versions:
            left = versions[-1].sum(2)
            right = log_probs.detach().sum(2)
            moved.append(float((left.exp() * (left - right)).sum(1).mean()))
        versions.append(log_probs.detach())
        sequences = torch.searchsorted(versions[0].sum(2).exp().cumsum(1), uniform)
        sequences = sequences.clamp(max=NUM_SEQUENCES - 1).flatten()
        own = log_probs[seed_ids, sequences]
        drawn_with = versions[0][seed_ids, sequences]
        kl = sequence_kl(
            drawn_with if kl_of_behaviour else own,
            reference[seed_ids, sequences],
            TREE.mask[sequences],
        )
        less_kl = rewards[seed_ids, sequences] - BETA * kl
        loss = rloo_loss(own, drawn_with, less_kl, group_ids, sequences, samples, settings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shares = []
    entropies = []
    for problem, at_end in zip(problems, log_probs_of(parameters.detach()).sum(2), strict=True):
        best = problem.optimum()
        start, end, top = map(problem.objective, (problem.reference.sum(1), at_end, best))
        shares.append((end - start) / (top - start))
        entropies.append(best.exp() @ best - at_end.exp() @ at_end)
    return Learnt(torch.stack(shares), torch.stack(entropies), sum(moved) / len(moved))


def with_error(values: Tensor) -> str:
    return f"{float(values.mean()):.3f} ± {float(values.std() / math.sqrt(len(values))):.3f}"


def learning_tables() -> tuple[Rows, Rows]:
    """The part of the gain, and the entropy at the end, by learning rate, k and correction."""
    cells = [(name, False) for name in CORRECTIONS] + [("none", True), ("sequence", True)]
    names = [f"{name}, {OLD_KL}" if old_kl else name for name, old_kl in cells]
    heads = ["learning rate", "KL a step", "k", *names]
    shares = [[*heads, "sequence - none", "sequence - k = 0"]]
    entropies = [heads]
    for rate in LEARNING_RATES:
        on_policy = learn(rate, 0, LossSettings())
        for k in STALENESS:
            # At k = 0 every weight is 1, and so all cells are one.
            runs = [
                learn(rate, k, CORRECTIONS[name], kl_of_behaviour=old_kl) if k else on_policy
                for name, old_kl in cells
            ]
            found = dict(zip(names, runs, strict=True))
            first = [f"{rate:g}", f"{found['none'].step_kl:.1e}", str(k)]
            others = (found["none"], on_policy) if k else ()
            differences = [
                with_error(found["sequence"].share - other.share) for other in others
            ] or ["", ""]
            shares.append(
                [*first, *(with_error(each.share) for each in found.values()), *differences]
            )
            entropies.append(
                [*first, *(f"{float(each.entropy.mean()):.2f}" for each in found.values())]
            )
    return shares, entropies


HEAD = f"""# Rollouts that are some steps old

What samples of a policy k optimizer steps back cost RLOO, by `trainer.reinforce.generator_correction`. All numbers are
of one command, in a clone, which writes this page too;
[docs/algorithms.md](../../docs/algorithms.md#rollouts-that-are-some-steps-old) says what they mean.

```bash
python benchmarks/staleness.py
```

**The gradient** is exact, in float64: every group of G = {SAMPLES} of a policy with {NUM_SEQUENCES} sequences of at
most {MAX_LENGTH} tokens is summed. β = {BETA:g}, cap {CAP:g}. {PROBLEMS} problems have random rewards and a random
reference, which is version 0. Exact gradient ascent leads to version {VERSION}, each step as long as gives the stated
KL, in nats a response, and version {VERSION} - k samples. Numbers are medians over the problems, unless it says
otherwise. `{UNCAPPED}` must have no bias: it checks the sums. "{OLD_KL}" takes the K of the reward from the
log-probs of the policy that sampled, all else from the trainer's own.

**Learning** is by samples of the same policy: {SEEDS} seeds, each with rewards and a reference of its own, {STEPS}
steps of {GROUPS_PER_STEP} groups of {SAMPLES}, Adam with betas {BETAS}; step s samples with version max(0, s - 1 - k).
A seed meets the same noise in every cell. The score is the part of the possible gain in E[r] - β KL that the samples
brought, by enumeration: 0 is the reference, 1 the optimum. `±` is the standard error over seeds; differences are seed
by seed.
"""

TITLES = {
    "bias": "Bias: norm of (expected gradient - true gradient) / norm of the true gradient",
    "cosine": "Cosine of expected and true gradient",
    "variance": "Variance: trace of the covariance, as a share of on-policy",
    "groups": "Groups of G a step at which the squared bias is as large as the variance; - is more than a million",
}
BASELINE = "The baseline: its part in the expected gradient, and the bias with and without it; KL 0.01 a step, k = 4"
LEARNING = (
    f"Learning: part of the possible gain after {STEPS * GROUPS_PER_STEP * SAMPLES:,} samples"
)
ENTROPY = "Entropy of responses at the end, less the optimum's, in nats"


def markdown(rows: Rows) -> str:
    head, *body = rows
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
        + "\n"
    )


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
    text = HEAD + "".join(f"\n**{title}**\n\n{markdown(rows)}" for title, rows in tables.items())
    out.write_text(text, encoding="utf-8")
    console.print(f"Written to {out}", highlight=False)


if __name__ == "__main__":
    main()
