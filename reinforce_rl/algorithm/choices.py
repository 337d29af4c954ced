"""Names that the configuration can choose, besides `advantages.ADVANTAGE_ESTIMATORS`. Torch-free."""

from __future__ import annotations

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
