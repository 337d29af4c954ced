"""The samples of a step or a validation, gathered for the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.monitoring.records import Samples, join_samples, sample_rows, token_columns

if TYPE_CHECKING:
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel


def gather_samples(
    model: MegatronGPTReinforceActorModel,
    step: int,
    prompts: Sequence[Prompt],
    rollouts: RolloutBatch,
    batch: ReinforceBatch | None = None,
    *,
    set_name: str = "train",
    with_tokens: bool,
    kl_estimator: str = "",
    advantages: Tensor | None = None,
) -> Samples:
    """Return the samples of all ranks on the first, none on the others; a collective call.

    Args:
        prompts: of `rollouts`, this rank's.
        batch: None in validation.
        set_name: of prompts that are of no named validation set.
        with_tokens: gather log-probs, KL and `advantages` of each token too; see `token_columns`.
    """
    mesh = model.mesh
    parts: list[Samples] = []
    if mesh.is_model_parallel_rank_0:
        rows = sample_rows(
            step,
            prompts,
            rollouts,
            model.tokenizer,
            batch,
            set_name,
            skip_special_tokens=model.settings.reinforce.skip_special_tokens,
        )
        tokens = None
        if with_tokens:
            tokens = token_columns(rollouts, kl_estimator=kl_estimator, advantages=advantages)
        parts = mesh.gather_over_dp_on_first(Samples(rows, tokens))
    return join_samples(parts, model.tokenizer)
