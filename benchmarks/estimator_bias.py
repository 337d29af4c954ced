"""Print the bias and the variance of the options of docs/algorithms.md, exact, by enumeration.

python benchmarks/estimator_bias.py        (about a minute)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.choices import KL_ESTIMATORS, KL_LOSS_WEIGHTS, KL_REDUCTIONS, LOSS_AGGREGATIONS
from helpers.enumeration import (
    BETA,
    NUM_SEQUENCES,
    TREE,
    Options,
    World,
    expected_gradient,
    gradient_variance,
    make_world,
    relative_error,
)
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cosine_similarity

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS
from reinforce_rl.algorithm.loss import LossSettings

SAMPLES = 2
RATIOS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


def bias_table(world: World) -> Table:
    table = Table(
        title=f"Bias. G = {SAMPLES}, beta = {BETA}, a policy of {NUM_SEQUENCES} sequences, every pair summed"
    )
    for column in ("option", "relative error", "cosine"):
        table.add_column(column)
    rows: list[tuple[str, Options]] = [
        (f"advantage_estimator={name}", Options(advantage_estimator=name))
        for name in ADVANTAGE_ESTIMATORS
    ]
    rows += [
        (
            f"advantage_estimator=none advantage_whitening={unit}",
            Options("none", advantage_whitening=unit),
        )
        for unit in ("sequence", "token")
    ]
    rows += [
        (
            f"credit_assignment=token discount_factor={g}",
            Options(credit_assignment="token", discount_factor=g),
        )
        for g in (1.0, 0.9)
    ]
    rows += [
        (
            f"kl_estimator={kl} kl_reduction={reduction}",
            Options(kl_estimator=kl, kl_reduction=reduction),
        )
        for kl in KL_ESTIMATORS
        for reduction in KL_REDUCTIONS
    ]
    rows += [
        (
            f"kl_placement=loss kl_loss_weights={weights} kl_estimator={kl}",
            Options(kl_estimator=kl, kl_placement="loss", kl_loss_weights=weights),
        )
        for weights in KL_LOSS_WEIGHTS
        for kl in KL_ESTIMATORS
    ]
    rows += [
        (f"loss_aggregation={name}", Options(loss=LossSettings(name))) for name in LOSS_AGGREGATIONS
    ]
    for name, options in rows:
        gradient = expected_gradient(world, options, SAMPLES)
        cosine = float(cosine_similarity(gradient.flatten(), world.true_gradient.flatten(), dim=0))
        table.add_row(name, f"{relative_error(gradient, world.true_gradient):.1e}", f"{cosine:.3f}")
    return table


def variance_table() -> Table:
    """Four samples in all, in one group or several; the rewards less their KL are shifted to a mean over spread."""
    table = Table(
        title="Variance of the gradient of four samples, as a share of that without a baseline"
    )
    for column in (
        "mean / spread of r - beta K",
        "none",
        "rloo, G = 4",
        "rloo, two groups of G = 2",
    ):
        table.add_column(column)
    start = make_world(0.0)
    log_probs = TREE.log_probs(start.parameters).detach()
    weights = log_probs.sum(1).exp()
    rewards = start.rewards - BETA * (log_probs - start.reference).sum(1)
    mean = float(weights @ rewards)
    spread = float((weights @ (rewards - mean) ** 2).sqrt())

    def at(ratio: float) -> tuple[float, float, float]:
        world = make_world(ratio * spread - mean)
        none = gradient_variance(world, Options("none"), 1) / 4
        return (
            none,
            gradient_variance(world, Options(), 4) / none,
            gradient_variance(world, Options(), 2) / 2 / none,
        )

    for ratio in RATIOS:
        none, four, two = at(ratio)
        table.add_row(f"{ratio:g}", f"1 ({none:.3f})", f"{four:.2f}", f"{two:.2f}")
    for name, column in (("G = 4", 1), ("G = 2", 2)):
        low = 0.0
        high = 4.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle)[column] > 1 else (low, middle)
        table.add_row(f"{low:.2f}", "1", *(["1.00", ""] if column == 1 else ["", "1.00"]))
        table.caption = (
            table.caption or "The last rows are the crossovers: "
        ) + f"{name} at {low:.2f}. "
    return table


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    console = Console(width=110)
    console.print(bias_table(make_world()))
    console.print(variance_table())


if __name__ == "__main__":
    main()
