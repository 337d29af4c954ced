"""Print the bias of every estimator of advantages and KL, by enumeration: the numbers of docs/algorithms.md.

python benchmarks/estimator_bias.py        (about 10 seconds)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.enumeration import BETA, NUM_SEQUENCES, expected_gradient, make_world, relative_error
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cosine_similarity

from reinforce_rl.algorithms.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, KL_REDUCTIONS

SAMPLES = 2


def main() -> None:
    world = make_world()
    table = Table(title=f"G = {SAMPLES}, beta = {BETA}, a policy of {NUM_SEQUENCES} sequences, every pair summed")
    for column in ("estimator", "KL in the reward", "relative error", "cosine"):
        table.add_column(column)
    rows = [(name, "k1", "sum") for name in ADVANTAGE_ESTIMATORS]
    rows += [("rloo", kl, reduction) for kl in KL_ESTIMATORS for reduction in KL_REDUCTIONS]
    for estimator, kl, reduction in rows:
        found = expected_gradient(world, estimator, SAMPLES, kl, reduction)
        cosine = float(cosine_similarity(found.flatten(), world.true_gradient.flatten(), dim=0))
        error = relative_error(found, world.true_gradient)
        table.add_row(estimator, f"{kl}, {reduction}", f"{error:.1e}", f"{cosine:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
