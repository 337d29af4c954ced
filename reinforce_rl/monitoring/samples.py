"""Samples as text and numbers, for the files and tables that people read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.monitoring.rollouts import RolloutRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode_responses(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, lengths: Tensor) -> list[str]:
    """The text of each row of int64 [N, T], special tokens left out."""
    rows = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return [str(text) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def sample_rows(
    step: int,
    prompts: Sequence[Prompt],
    batch: RolloutBatch,
    tokenizer: PreTrainedTokenizerBase,
    data: ReinforceBatch | None = None,
) -> list[RolloutRow]:
    """One row a sample.

    Args:
        step: see `RolloutRow.step`.
        prompts: of the batch, in its order.
        batch: the scored samples.
        tokenizer: of the policy.
        data: what the algorithm made of them; None in validation.
    """
    text_of = {prompt.id: prompt.text for prompt in prompts}
    responses = [
        sequence[start : start + length]
        for sequence, start, length in zip(
            batch.sequences.tolist(), batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
        )
    ]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [
        RolloutRow(
            step=step,
            prompt_id=prompt_id,
            sample_id=int(batch.sample_ids[i]),
            prompt=text_of[prompt_id],
            response=str(texts[i]),
            reward=float(batch.rewards[i]),
            finish_reason=batch.finish_reasons[i],
            response_length=int(batch.response_lengths[i]),
            kl=float(data.kl[i]) if data else math.nan,
            reward_with_kl=float(data.rewards_with_kl[i]) if data else math.nan,
            baseline=float(data.baseline[i]) if data else math.nan,
            advantage=float(data.sequence_advantages[i]) if data else math.nan,
            valid=bool(batch.valid[i]),
        )
        for i, prompt_id in enumerate(batch.group_ids.tolist())
    ]
