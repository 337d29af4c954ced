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
        only_subtracts: an advantage is the reward less a baseline, neither divided nor chosen.
    """

    function: str
    compares_samples: bool
    only_subtracts: bool = True


ADVANTAGE_ESTIMATORS = {
    "rloo": EstimatorEntry("leave_one_out", compares_samples=True),
    "none": EstimatorEntry("no_baseline", compares_samples=False),
    "running_mean": EstimatorEntry("past_mean", compares_samples=False),
    "moving_average": EstimatorEntry("past_mean", compares_samples=False),
    "exponential_moving_average": EstimatorEntry("past_mean", compares_samples=False),
    "batch_mean": EstimatorEntry("batch_mean", compares_samples=False),
    "prompt_mean": EstimatorEntry("prompt_mean", compares_samples=True),
    "grpo": EstimatorEntry("group_normalised", compares_samples=True, only_subtracts=False),
    "raft": EstimatorEntry("best_of_group", compares_samples=True, only_subtracts=False),
}

ADVANTAGE_WHITENINGS = ("none", "sequence", "token")  # see `credit.whiten`
CREDIT_ASSIGNMENTS = ("sequence", "token")  # see `credit.py`

KL_ESTIMATORS = ("k1", "absolute_k1", "k2", "k3")  # functions of `kl.py`
KL_REDUCTIONS = ("sum", "mean")
KL_PLACEMENTS = ("reward", "advantage", "loss")
KL_LOSS_WEIGHTS = ("prefix", "token", "none")  # see `kl.kl_loss_terms`

LOSS_AGGREGATIONS = ("sequence_sum", "sequence_mean", "token_mean", "fixed_length")  # see `loss.token_weights`
IMPORTANCE_RATIOS = ("none", "token", "sequence", "sequence_geometric")  # see `loss.policy_terms`
GENERATOR_CORRECTIONS = ("none", "token", "sequence")  # see `loss.generator_weights`

REWARD_STANDARDISATIONS = ("none", "given", "running")  # see `rewards.shape_rewards`
TRUNCATED_SAMPLES = ("keep", "drop", "mask", "penalise")

BEST_MODES = ("max", "min")  # see `best_checkpoints.py`
