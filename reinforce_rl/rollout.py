"""The batches that flow between the parts of a step, as frozen dataclasses with shaped fields.

Notation used for tensor shapes:
    P  prompts on this data-parallel rank
    G  samples a prompt (`num_rollouts_per_prompt`)
    N  sequences, N = P * G, prompt-major: rows i*G .. (i+1)*G-1 belong to prompt i
    T  response tokens, right-padded
    S  prompt plus response tokens, right-padded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FINISH_STOP = "stop"  # a stop token or a stop string was produced
FINISH_LENGTH = "length"  # max_length was reached first: the response is truncated


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data set.

    Attributes:
        id: its index in the data set, unique there; it keys sampling noise and names the group of its samples.
        text: as given to the tokenizer, chat template applied.
        tokens: its token ids, never padded.
        metadata: every other field of its JSON line, untouched.
    """

    id: int
    text: str
    tokens: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completions:
    """What a generator returns for P prompts and G samples of each.

    Attributes:
        tokens: int64 [N, T], response tokens, the stop token included where one was produced; right-padded.
        lengths: int64 [N], response tokens of each row; 0 is allowed.
        finish_reasons: N times `FINISH_STOP` or `FINISH_LENGTH`.
        log_probs: float32 [N, T] of the sampled tokens under the sampling temperature, 0 on padding;
            None from an engine that does not report them.
    """

    tokens: Tensor
    lengths: Tensor
    finish_reasons: tuple[str, ...]
    log_probs: Tensor | None = None

    def repeat_to_samples(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompt of each row, where every one of `prompts` has equally many samples."""
        samples = len(self.lengths) // len(prompts) if prompts else 0
        return [prompt for prompt in prompts for _ in range(samples)]


@dataclass(frozen=True)
class RolloutBatch:
    """N scored samples on this data-parallel rank: everything that a training step needs.

    Attributes:
        sequences: int64 [N, S], prompt then response, right-padded with the pad token.
        prompt_lengths: int64 [N].
        response_lengths: int64 [N], the stop token included.
        group_ids: int64 [N], equal for the samples of one prompt, unique over ranks (never derived from tokens).
        sample_ids: int64 [N], 0 .. G-1 within a group.
        finish_reasons: N times `FINISH_STOP` or `FINISH_LENGTH`.
        rewards: float32 [N] from the reward source; NaN where scoring failed.
        log_probs: float32 [N, T] of the response tokens under the actor at the sampling temperature; 0 on padding.
        init_log_probs: float32 [N, T] under the reference policy, or None where no reference pass was made.
        valid: bool [N]; False leaves a sample out of every sum and every count (scoring failed, dropped, empty).
    """

    sequences: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    group_ids: Tensor
    sample_ids: Tensor
    finish_reasons: tuple[str, ...]
    rewards: Tensor
    log_probs: Tensor
    init_log_probs: Tensor | None
    valid: Tensor

    @property
    def is_end(self) -> Tensor:
        """bool [N]: the response ended by itself, rather than being cut at max_length."""
        return torch.tensor([reason == FINISH_STOP for reason in self.finish_reasons], dtype=torch.bool)

    @property
    def response_mask(self) -> Tensor:
        """bool [N, T]: True on response tokens."""
        return length_mask(self.response_lengths, self.log_probs.shape[1])


@dataclass(frozen=True)
class ReinforceBatch:
    """What `generate_reinforce_data` adds to a rollout batch, and the loss consumes.

    Attributes:
        rollouts: the samples.
        kl: float32 [N], the sequence's KL estimate as it enters the reward (sum over response tokens, in nats).
        rewards_with_kl: float32 [N], reward minus beta times `kl`.
        baseline: float32 [N], what the estimator subtracted, before any division.
        advantages: float32 [N], detached, 0 where a sample does not train.
        trains: bool [N], the samples that the loss is averaged over: the valid ones, or fewer (RAFT).
    """

    rollouts: RolloutBatch
    kl: Tensor
    rewards_with_kl: Tensor
    baseline: Tensor
    advantages: Tensor
    trains: Tensor


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """bool [N, width], True on the first `lengths[i]` columns of row i."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def join_prompts_and_responses(
    prompts: Sequence[Prompt], completions: Completions, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Put each response right behind its prompt.

    Args:
        prompts: N prompts, one a row of the completions.
        completions: N responses.
        pad_id: fills the right.

    Returns:
        sequences int64 [N, S] and prompt_lengths int64 [N].
    """
    prompt_lengths = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.long)
    width = int((prompt_lengths + completions.lengths).max()) if prompts else 0
    sequences = torch.full((len(prompts), width), pad_id, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        start, length = len(prompt.tokens), int(completions.lengths[row])
        sequences[row, :start] = torch.tensor(prompt.tokens, dtype=torch.long)
        sequences[row, start : start + length] = completions.tokens[row, :length]
    return sequences, prompt_lengths


def join_completions(parts: Sequence[Completions], pad_id: int) -> Completions:
    """Completions of several batches of prompts as one, padded to the widest; none at all gives an empty one."""
    if len(parts) == 1:
        return parts[0]
    width = max((part.tokens.shape[1] for part in parts), default=0)

    def padded(tensor: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=value)

    with_log_probs = [padded(part.log_probs, 0.0) for part in parts if part.log_probs is not None]
    nothing = torch.zeros((0, 0))
    return Completions(
        tokens=torch.cat([padded(part.tokens, pad_id) for part in parts]) if parts else nothing.long(),
        lengths=torch.cat([part.lengths for part in parts]) if parts else nothing[0:0].reshape(0).long(),
        finish_reasons=tuple(reason for part in parts for reason in part.finish_reasons),
        log_probs=torch.cat(with_log_probs) if len(with_log_probs) == len(parts) and parts else None,
    )
