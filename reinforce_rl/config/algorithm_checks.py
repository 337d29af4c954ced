"""Options of the algorithm that do not go together; a part of `config/checks.py`. One sentence a fault."""

from __future__ import annotations

from collections.abc import Iterator

from reinforce_rl.algorithm.advantages import ADVANTAGE_ESTIMATORS, EstimatorEntry
from reinforce_rl.config.schema import TrainConfig


def algorithm_faults(cfg: TrainConfig) -> Iterator[str]:
    """Baseline, KL, credit and reward shaping."""
    rl = cfg.trainer.reinforce
    estimator = ADVANTAGE_ESTIMATORS.get(rl.advantage_estimator)
    if estimator is not None and estimator.compares_samples and rl.num_rollouts_per_prompt < 2:
        yield (
            f"trainer.reinforce.num_rollouts_per_prompt is {rl.num_rollouts_per_prompt}; "
            f"advantage_estimator={rl.advantage_estimator} compares the samples of one prompt with "
            "each other, so it needs at least 2 (with 1 every advantage would be 0)"
        )
    if rl.use_absolute_kl and rl.kl_estimator != "k1":
        yield (
            f"trainer.reinforce.use_absolute_kl is true and kl_estimator is {rl.kl_estimator!r}; "
            "set one of them (use_absolute_kl means kl_estimator=absolute_k1)"
        )
    if rl.kl_target is not None and not rl.initial_policy_kl_penalty > 0:
        yield (
            f"trainer.reinforce.kl_target is {rl.kl_target} and initial_policy_kl_penalty is "
            f"{rl.initial_policy_kl_penalty}; it is the value that beta starts from, so it must be above 0"
        )
    yield from _credit(cfg, estimator)
    yield from _shaping(cfg)


def _credit(cfg: TrainConfig, estimator: EstimatorEntry | None) -> Iterator[str]:
    rl = cfg.trainer.reinforce
    if rl.credit_assignment != "token":
        if rl.discount_factor != 1.0:
            yield (
                f"trainer.reinforce.discount_factor is {rl.discount_factor}, but the response is one action; "
                "set credit_assignment=token, or leave it at 1.0"
            )
        return
    if rl.kl_reduction != "sum":
        yield (
            f"trainer.reinforce.kl_reduction is {rl.kl_reduction!r} with credit_assignment=token, which charges each "
            "token its own KL; expected sum"
        )
    if rl.importance_ratio.startswith("sequence"):
        yield (
            f"trainer.reinforce.importance_ratio is {rl.importance_ratio!r} with credit_assignment=token; a ratio of "
            "the whole response needs one advantage for all of it: set importance_ratio=token"
        )
    if estimator is not None and not estimator.only_subtracts and rl.kl_placement == "reward":
        yield (
            f"trainer.reinforce.advantage_estimator is {rl.advantage_estimator!r} with credit_assignment=token and "
            "kl_placement=reward; it does more than subtract a baseline, so the KL of single tokens cannot go "
            "through it: set kl_placement=advantage or loss"
        )


def _shaping(cfg: TrainConfig) -> Iterator[str]:
    rl, shaping = cfg.trainer.reinforce, cfg.trainer.reinforce.reward_shaping
    if shaping.standardisation != "given" and (shaping.mean, shaping.deviation) != (0.0, 1.0):
        yield (
            f"trainer.reinforce.reward_shaping has mean={shaping.mean} and deviation={shaping.deviation}, which only "
            f"standardisation=given reads; it is {shaping.standardisation!r}"
        )
    if (rl.truncated_samples == "penalise") != (rl.truncation_penalty > 0):
        yield (
            f"trainer.reinforce.truncated_samples is {rl.truncated_samples!r} and truncation_penalty is "
            f"{rl.truncation_penalty}; expected a penalty above 0 with truncated_samples=penalise, and 0 otherwise"
        )
    if rl.overlong_buffer and rl.truncated_samples != "penalise":
        yield (
            f"trainer.reinforce.overlong_buffer is {rl.overlong_buffer}, which only truncated_samples=penalise reads; "
            f"it is {rl.truncated_samples!r}"
        )
    if rl.overlong_buffer > cfg.model.reinforce.length_params.max_length:
        yield (
            f"trainer.reinforce.overlong_buffer is {rl.overlong_buffer}, above "
            f"model.reinforce.length_params.max_length, which is {cfg.model.reinforce.length_params.max_length}"
        )
    if rl.dynamic_filtering and rl.num_rollouts_per_prompt < 2:
        yield (
            f"trainer.reinforce.dynamic_filtering is true and num_rollouts_per_prompt is "
            f"{rl.num_rollouts_per_prompt}; it compares the samples of one prompt, so it needs at least 2"
        )


def batch_size_faults(cfg: TrainConfig) -> Iterator[str]:
    """How a rollout batch is cut into optimizer steps."""
    rl, model = cfg.trainer.reinforce, cfg.model
    samples = rl.num_rollouts_per_prompt
    sequences = model.reinforce.num_rollout_samples * samples
    size = model.global_batch_size
    if size is not None and (size < 1 or size > sequences or sequences % size or size % samples):
        yield (
            f"model.global_batch_size is {size}, but a step makes num_rollout_samples x num_rollouts_per_prompt = "
            f"{model.reinforce.num_rollout_samples} x {samples} = {sequences} sequences; expected a number of whole "
            f"prompts (a multiple of {samples}) that divides {sequences}, or null for all of them"
        )
    elif rl.importance_ratio == "none" and (rl.reinforce_epochs > 1 or cfg.prompts_per_update is not None):
        yield (
            f"trainer.reinforce.reinforce_epochs is {rl.reinforce_epochs} and model.global_batch_size is "
            f"{'null' if size is None else size}: "
            "several optimizer steps on one rollout batch are off-policy; set "
            "trainer.reinforce.importance_ratio=token, sequence or sequence_geometric"
        )
