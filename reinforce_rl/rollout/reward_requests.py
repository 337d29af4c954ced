"""What a reward source is asked about an actor's responses, and how its answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from reinforce_rl.data.batches import (
    Completions,
    Prompt,
    RolloutBatch,
    join_prompts_and_responses,
)
from reinforce_rl.data.finish_reasons import FINISH_OUTSIDE, FINISH_STOP
from reinforce_rl.data.tokenizer import decode_all, pad_id_of
from reinforce_rl.errors import RewardServerError
from reinforce_rl.rewards.base import (
    STATUS_NOT_FINITE,
    STATUS_OK,
    STATUS_TEXT,
    RewardFuture,
    RewardRequest,
    Rewards,
)
from reinforce_rl.utils.console import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel


def reward_request(
    model: MegatronGPTReinforceActorModel, prompts: Sequence[Prompt], completions: Completions
) -> RewardRequest:
    """Return what a reward source is asked about an actor's responses."""
    return request_about(
        prompts,
        completions,
        model.tokenizer,
        model.sampling.stop_token_ids,
        skip_special_tokens=model.settings.reinforce.skip_special_tokens,
    )


def request_about(
    prompts: Sequence[Prompt],
    completions: Completions,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> RewardRequest:
    """Build the request to a reward source for responses that end at one of `stop_token_ids`.

    Logs a warning where a text lacks a special token other than the one at its end.
    """
    repeated = completions.repeat_to_samples(prompts)
    sequences, prompt_lengths = join_prompts_and_responses(
        repeated, completions, pad_id_of(tokenizer)
    )
    # Without the stop token, which a tokenizer may not treat as special.
    # a column even where all responses are empty
    tokens = torch.nn.functional.pad(completions.tokens, (0, 1))
    last = tokens.gather(1, (completions.lengths - 1).clamp(min=0)[:, None])[:, 0]
    stop_ids = torch.tensor(stop_token_ids, dtype=torch.long)
    text_lengths = (
        completions.lengths - ((completions.lengths > 0) & torch.isin(last, stop_ids)).long()
    )
    texts = [
        row[:length]
        for row, length in zip(completions.tokens.tolist(), text_lengths.tolist(), strict=True)
    ]
    if skip_special_tokens:
        _warn_of_special_tokens(tokenizer, texts)
    return RewardRequest(
        tokens=sequences,
        lengths=prompt_lengths + completions.lengths,
        prompts=tuple(prompt.text for prompt in repeated),
        responses=tuple(decode_all(tokenizer, texts, skip_special_tokens=skip_special_tokens)),
        messages=tuple(prompt.messages for prompt in repeated),
        metadata=tuple(prompt.metadata for prompt in repeated),
        finished=tuple(reason == FINISH_STOP for reason in completions.finish_reasons),
    )


def _warn_of_special_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[int]]
) -> None:
    """Log a warning, once for each, of special tokens that are not in the texts.

    Padding and the like is no loss.
    """
    of_every_text = [
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    ]
    drawn = set[int]().union(*texts)
    for number, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and number in drawn and number not in of_every_text:
            warn_once(
                f"responses hold the special token {token}, which rewards and records do not see; "
                "model.reinforce.skip_special_tokens=false keeps special tokens in their texts"
            )


def scores_of(future: RewardFuture, count: int) -> Rewards:
    """Check and normalise a source's result.

    Values are then finite exactly where the status is STATUS_OK.
    """
    rewards = future.result()
    values = rewards.values.float()
    status = rewards.status.int()
    for name, tensor in {"values": values, "status": status}.items():
        if tensor.shape != (count,):
            where = f"{type(future).__module__}.{type(future).__qualname__}"
            raise RewardServerError(
                f"{where} returned {name} of shape {list(tensor.shape)}; expected [{count}]",
                key="rewards.answer.wrong_shape",
            )
    status = torch.where((status == STATUS_OK) & ~torch.isfinite(values), STATUS_NOT_FINITE, status)
    return replace(
        rewards, values=values.masked_fill(status != STATUS_OK, torch.nan), status=status
    )


def faults_of(answer: Rewards) -> list[str | None]:
    """Return why each sample's scoring failed; None where it did not."""
    texts = {
        code: STATUS_TEXT.get(code, f"status {code}")
        for code in set(answer.status.tolist()) - {STATUS_OK}
    }
    codes = enumerate(answer.status.tolist())
    return [
        None if code == STATUS_OK else answer.faults.get(row, texts[code]) for row, code in codes
    ]


def with_valid(batch: RolloutBatch, truncated_samples: str) -> RolloutBatch:
    """Set which samples of a scored batch count; with `drop`, truncated ones do not."""
    valid = torch.isfinite(batch.rewards) & (batch.response_lengths > 0)
    valid &= torch.tensor(
        [reason != FINISH_OUTSIDE for reason in batch.finish_reasons], dtype=torch.bool
    )
    return replace(batch, valid=valid & batch.is_end if truncated_samples == "drop" else valid)
