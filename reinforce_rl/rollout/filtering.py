"""Dynamic filtering: prompts are drawn until enough groups have unequal rewards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from reinforce_rl.algorithm.rewards import has_reward_variance
from reinforce_rl.data.batches import Prompt, RolloutBatch, join_rollouts
from reinforce_rl.monitoring.metrics import reduce_metrics, rollout_means
from reinforce_rl.rollout.scoring import PendingRollouts, RolloutScorer
from reinforce_rl.rollout.source import PromptBatch, RolloutContext, StepRollouts, draw_prompts


def draw_until_rewards_differ(
    context: RolloutContext,
    scorer: RolloutScorer,
    step: int,
    ahead: deque[PromptBatch],
    sample: Callable[[Sequence[Prompt]], PendingRollouts],
) -> StepRollouts:
    """Draw prompts until enough groups have unequal rewards, with a bound on the rounds.

    It stops at the epoch's end too, because a prompt must not occur twice in a step. Prompts
    `ahead`, which an earlier start of the run had drawn, come first.
    """
    mesh = context.model.mesh
    loader = context.loader
    wanted = loader.prompts_per_step
    epoch = loader.state_dict()["epoch"]
    prompts = list[Prompt]()
    rounds = list[RolloutBatch]()
    with_variance = list[int]()
    position = loader.state_dict()
    for _ in range(1 + context.cfg.max_resampling_rounds):
        drawn = ahead.popleft() if ahead else draw_prompts(loader)
        position = drawn.position
        batch = scorer.score_step(sample(drawn.prompts), step)
        prompts += drawn.prompts
        rounds.append(batch)
        differs = has_reward_variance(batch.rewards, batch.group_ids, batch.valid)
        for ids in mesh.gather_over_dp(batch.group_ids[differs].tolist()):
            with_variance += dict.fromkeys(ids)  # each once, in order
        is_over = loader.finished and not ahead
        if len(with_variance) >= wanted or loader.state_dict()["epoch"] != epoch or is_over:
            break
    batch = join_rollouts(rounds, context.model.pad_id)
    kept = torch.isin(batch.group_ids, torch.tensor(with_variance[:wanted], dtype=torch.long))
    metrics = reduce_metrics(rollout_means(batch), mesh.gather_over_dp)
    groups = sum(mesh.gather_over_dp(len(prompts)))
    counts = {
        "groups_drawn": groups,
        "groups_with_zero_std": groups - len(with_variance),
        "groups_trained": min(len(with_variance), wanted),
        "resampling_rounds": len(rounds) - 1,
    }
    trained = scorer.with_log_probs(batch.select(kept.nonzero()[:, 0]))
    return StepRollouts(prompts, position, trained, {**metrics, **counts})
