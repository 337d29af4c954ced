"""What the configuration can choose, by name. Free of torch, so that a wrong name is told within a second.

To add an estimator of advantages: write a function of a `RewardGroups` in `advantages.py`, and enter it here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimatorEntry:
    """An estimator of advantages.

    Attributes:
        function: its name in `advantages.py`.
        compares_samples: it compares the samples of one prompt with each other, so it needs at least two.
    """

    function: str
    compares_samples: bool


ADVANTAGE_ESTIMATORS = {
    "rloo": EstimatorEntry("leave_one_out", compares_samples=True),
    "none": EstimatorEntry("no_baseline", compares_samples=False),
    "running_mean": EstimatorEntry("running_mean", compares_samples=False),
    "batch_mean": EstimatorEntry("batch_mean", compares_samples=False),
    "prompt_mean": EstimatorEntry("prompt_mean", compares_samples=True),
    "grpo": EstimatorEntry("group_normalised", compares_samples=True),
    "reinforce_plus_plus": EstimatorEntry("reinforce_plus_plus", compares_samples=False),
    "reinforce_plus_plus_baseline": EstimatorEntry("reinforce_plus_plus_baseline", compares_samples=True),
    "raft": EstimatorEntry("best_of_group", compares_samples=True),
}

KL_ESTIMATORS = ("k1", "absolute_k1", "k2", "k3")  # functions of `kl.py`
KL_REDUCTIONS = ("sum", "mean")
LOSS_AGGREGATIONS = ("sequence_sum", "sequence_mean", "token_mean", "fixed_length")  # see `loss.reinforce_loss`
