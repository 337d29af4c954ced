"""One response to each prompt of a fixed set, scored: validation and test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from reinforce_rl.data.batches import Prompt
from reinforce_rl.monitoring.metrics import rollout_means, take_means
from reinforce_rl.monitoring.samples import sample_rows
from reinforce_rl.runtime.phases import Activity
from reinforce_rl.trainer.rollouts import RolloutMaker

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel
    from reinforce_rl.monitoring.rollouts import RolloutRow


def evaluate(
    name: str,
    step: int,
    parts: Iterable[Sequence[Prompt]],
    model: MegatronGPTReinforceActorModel,
    rollouts: RolloutMaker,
    activity: Activity,
) -> tuple[dict[str, float], list[RolloutRow]]:
    """Draw with validation's own sampling, and score.

    Args:
        name: of the phase.
        step: after which it is done.
        parts: this rank's prompts.
        model: the policy.
        rollouts: samples and scores.
        activity: is told what this rank does.

    Returns:
        means over all ranks; the samples of all ranks.

    Raises:
        StoppedEarly: some rank was asked to stop.
        RewardServerError: no answer within the deadline, or too many samples that were not scored.
    """
    activity.begin(name)
    prompts = [prompt for part in parts for prompt in part]
    # One seed for all of validation, so that only the weights make a difference.
    seed = model.settings.seed * 1_000_003
    pending = rollouts.sample(prompts, 1, seed, validation=True)
    activity.begin(f"{name}: reward_wait", has_deadline=True)
    batch = rollouts.score(pending, f"the {name} after step {step}")
    metrics = take_means(rollout_means(batch), model.mesh.gather_over_dp)
    return metrics, model.mesh.join_over_dp(sample_rows(step, prompts, batch, model.tokenizer))
