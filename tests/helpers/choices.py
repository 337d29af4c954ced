"""Allowed values of keys of `trainer.reinforce`, for tests that try them all."""

from __future__ import annotations

from typing import get_args

from reinforce_rl.algorithm.kl import KL_ESTIMATORS as REGISTERED_KL_ESTIMATORS
from reinforce_rl.config.actor import ReinforceConfig, RewardShapingConfig


def _choices(name: str) -> tuple[str, ...]:
    choices = get_args(ReinforceConfig.model_fields[name].annotation)
    # a key that may be null
    return choices if isinstance(choices[0], str) else get_args(choices[0])


ADVANTAGE_WHITENINGS = _choices("advantage_whitening")
CREDIT_ASSIGNMENTS = _choices("credit_assignment")
GENERATOR_CORRECTIONS = _choices("generator_correction")
IMPORTANCE_RATIOS = _choices("importance_ratio")
KL_ESTIMATORS = tuple(REGISTERED_KL_ESTIMATORS)
KL_LOSS_WEIGHTS = _choices("kl_loss_weights")
KL_PLACEMENTS = _choices("kl_placement")
KL_REDUCTIONS = _choices("kl_reduction")
LOSS_AGGREGATIONS = _choices("loss_aggregation")
REWARD_STANDARDIZATIONS = get_args(RewardShapingConfig.model_fields["standardization"].annotation)
