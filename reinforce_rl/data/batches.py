"""Batches passed between the parts of a step, as frozen dataclasses.

Shapes: P prompts on this data-parallel rank, G samples per prompt (`num_rollouts_per_prompt`),
N = P * G sequences in prompt-major order (rows i*G .. (i+1)*G-1 belong to prompt i), T response
tokens, S prompt plus response tokens; T and S are right-padded. The response of an episode of
several turns also holds what the environment wrote; `policy_mask` tells whose each token is.

Where a chat template rewrites the history of an episode, as one that leaves out earlier thoughts
does, the policy reads the rewritten history in a new context. The row keeps it in the response, and
`history_mask` tells where. The policy has read such a row in pieces, each exact by itself:

    row         question  answer  |  history         reply  answer  |  history         ...
    contexts    prompt    answer     prompt          reply  answer     prompt          ...

An episode is still one row of a batch, so it counts once in all baselines and means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from reinforce_rl.data.finish_reasons import FINISH_OUTSIDE, FINISH_STOP

# Fields of a `RolloutBatch`: tensors of shape [N], and tensors of shape [N, T] or None.
_PER_SAMPLE = ("prompt_lengths", "response_lengths", "group_ids", "sample_ids", "rewards", "valid")
_PER_TOKEN = (
    "generator_log_probs",
    "weight_versions",
    "log_probs",
    "init_log_probs",
    "turn_rewards",
)


@dataclass(frozen=True)
class Prompt:
    # Index in the data set. It is a key of the sampling noise and the group id of its samples. With
    # weighted blending, the size of the data set is added for each earlier pass over its file.
    id: int
    text: str  # as given to the tokenizer, chat template applied
    tokens: tuple[int, ...]  # without padding
    metadata: dict[str, Any] = field(default_factory=dict)  # all other fields of the record
    # The conversation that the chat template rendered; empty for plain text.
    messages: tuple[dict[str, Any], ...] = ()
    set_name: str = ""  # of its validation set; "" if the sets have no names


@dataclass(frozen=True)
class Completions:
    """A generator's output for P prompts and G samples of each."""

    tokens: Tensor  # int64 [N, T], right-padded; includes the stop token if one was produced
    lengths: Tensor  # int64 [N]; 0 is allowed
    finish_reasons: tuple[str, ...]  # N times `FINISH_STOP`, `FINISH_LENGTH` or `FINISH_OUTSIDE`
    # float32 [N, T] at the sampling temperature, 0 on padding; None if the engine reports none.
    log_probs: Tensor | None = None
    # int64 [N, T], the training step of the weights that drew each token; None if they are the
    # trainer's current weights.
    weight_versions: Tensor | None = None
    # bool [N, T], False on tokens that an environment wrote; None if the policy wrote them all.
    policy_mask: Tensor | None = None
    # bool [N, T], True on history that the chat template rewrote: a context begins with each run of
    # such tokens. None without an environment.
    history_mask: Tensor | None = None
    # float32 [N, T], the environment's reward of each answer at the answer's last token, else 0;
    # None without an environment.
    turn_rewards: Tensor | None = None
    # float32 [N], the sum over an episode's turns, NaN where the environment failed; None without
    # an environment.
    environment_rewards: Tensor | None = None
    # For each of N episodes why its environment failed, or None; () without an environment.
    environment_faults: tuple[str | None, ...] = ()

    def repeat_to_samples(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompt of each row; every prompt must have the same number of samples."""
        samples = len(self.lengths) // len(prompts) if prompts else 0
        return [prompt for prompt in prompts for _ in range(samples)]

    def without_history(self, pad_id: int) -> Completions:
        """Return the responses with every message once, for readers of text.

        They have no values of single tokens but the tokens.
        """
        if self.history_mask is None:
            return self
        is_message = length_mask(self.lengths, self.tokens.shape[1]) & ~self.history_mask
        rows = [tokens[kept] for tokens, kept in zip(self.tokens, is_message, strict=True)]
        return replace(
            self,
            tokens=pad_sequence(rows, True, pad_id) if rows else self.tokens,
            lengths=is_message.sum(dim=-1),
            log_probs=None,
            weight_versions=None,
            policy_mask=None,
            history_mask=None,
            turn_rewards=None,
        )

    def within_vocabulary(self, size: int, pad_id: int) -> Completions:
        """Replace ids >= `size`, which padded engines may draw, by `pad_id`.

        Their responses are marked `FINISH_OUTSIDE`.
        """
        outside = (self.tokens < 0) | (self.tokens >= size)
        if not bool(outside.any()):
            return self
        marked = (outside & length_mask(self.lengths, self.tokens.shape[1])).any(dim=1).tolist()
        reasons = zip(self.finish_reasons, marked, strict=True)
        return replace(
            self,
            tokens=self.tokens.masked_fill(outside, pad_id),
            finish_reasons=tuple(
                FINISH_OUTSIDE if row_is_marked else reason for reason, row_is_marked in reasons
            ),
        )


@dataclass(frozen=True)
class RolloutBatch:
    """N scored samples on this data-parallel rank."""

    sequences: Tensor  # int64 [N, S], prompt then response, right-padded with the pad token
    prompt_lengths: Tensor  # int64 [N]
    response_lengths: Tensor  # int64 [N], the stop token included
    # int64 [N], equal for the samples of one prompt, unique over ranks (never derived from tokens)
    group_ids: Tensor
    sample_ids: Tensor  # int64 [N], 0 .. G-1 within a group
    finish_reasons: tuple[str, ...]  # N times `FINISH_STOP`, `FINISH_LENGTH` or `FINISH_OUTSIDE`
    rewards: Tensor  # float32 [N] from the reward source; NaN if scoring failed
    # bool [N]; False excludes a sample from all sums and counts: scoring failed, dropped, empty, or
    # outside the vocabulary.
    valid: Tensor
    # float32 [N, T] as reported by the generator, or None.
    generator_log_probs: Tensor | None = None
    weight_versions: Tensor | None = None  # int64 [N, T], as in `Completions`
    policy_mask: Tensor | None = None  # bool [N, T], as in `Completions`
    history_mask: Tensor | None = None  # bool [N, T], as in `Completions`
    turn_rewards: Tensor | None = None  # float32 [N, T], as in `Completions`
    # float32 [N, T] under the actor at the sampling temperature, before any optimizer step on this
    # batch; 0 on padding; None if unused.
    log_probs: Tensor | None = None
    init_log_probs: Tensor | None = None  # the same under the reference policy
    # float32 [N] by name of the reward source, if there are several.
    source_rewards: dict[str, Tensor] = field(default_factory=dict)
    # For each of N samples why scoring failed, or None; () before scoring.
    score_faults: tuple[str | None, ...] = ()

    @property
    def is_end(self) -> Tensor:
        """bool [N]: True if the response ended before max_length."""
        return torch.tensor(
            [reason == FINISH_STOP for reason in self.finish_reasons], dtype=torch.bool
        )

    @property
    def response_mask(self) -> Tensor:
        """bool [N, T]: True on the response tokens that the policy wrote.

        They alone are trained on and counted.
        """
        mask = length_mask(self.response_lengths, self.width)
        return mask if self.policy_mask is None else mask & self.policy_mask[:, : self.width]

    @property
    def policy_lengths(self) -> Tensor:
        """int64 [N]: number of response tokens that the policy wrote."""
        if self.policy_mask is None:
            return self.response_lengths
        return self.response_mask.sum(dim=-1)

    @property
    def sequence_inputs(
        self,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """The arguments of the actor's `get_inference_log_probs`."""
        mask = None if self.policy_mask is None else self.response_mask
        lengths = (self.prompt_lengths, self.response_lengths)
        return self.sequences, *lengths, self.group_ids, mask, self.history_mask

    @property
    def width(self) -> int:
        """T, the longest response."""
        return int(self.response_lengths.max()) if len(self.response_lengths) else 0

    def select(self, rows: Tensor) -> RolloutBatch:
        """Return the samples of these rows (int64 indices) in their order.

        Padding that no row needs is removed.
        """
        width = int(self.response_lengths[rows].max()) if len(rows) else 0
        used = int((self.prompt_lengths + self.response_lengths)[rows].max()) if len(rows) else 0
        tables: dict[str, Any] = {
            name: getattr(self, name) for name in (*_PER_TOKEN, "policy_mask", "history_mask")
        }
        tables = {
            name: None if values is None else values[rows, :width]
            for name, values in tables.items()
        }
        return RolloutBatch(
            sequences=self.sequences[rows, :used],
            finish_reasons=tuple(self.finish_reasons[row] for row in rows.tolist()),
            source_rewards={name: values[rows] for name, values in self.source_rewards.items()},
            score_faults=tuple(self.score_faults[row] for row in rows.tolist())
            if self.score_faults
            else (),
            **{name: getattr(self, name)[rows] for name in _PER_SAMPLE},
            **tables,
        )


@dataclass(frozen=True)
class ReinforceBatch:
    """A rollout batch with the advantages that the loss consumes."""

    rollouts: RolloutBatch
    # float32 [N], KL estimate in nats, summed or averaged over the response.
    kl: Tensor
    # float32 [N], shaped reward, minus beta * `kl` if the KL is in the reward
    rewards_with_kl: Tensor
    baseline: Tensor  # float32 [N], subtracted from the reward before any division
    # float32 [N, T], detached; 0 on padding and for samples that do not train. Constant over a
    # response unless credit is assigned per token.
    advantages: Tensor
    # bool [N], samples that the loss averages over: all valid samples, or fewer (RAFT, masking).
    trains: Tensor
    shaped_rewards: Tensor | None = None  # float32 [N], without the KL; for the record

    @property
    def trained_tokens(self) -> Tensor:
        """bool [N, T]: True for the tokens that the policy wrote in samples that train."""
        return self.rollouts.response_mask & self.trains[:, None]

    @property
    def sequence_advantages(self) -> Tensor:
        """[N]: mean over the tokens that the policy wrote."""
        return self.advantages.sum(dim=-1) / self.rollouts.policy_lengths.clamp(min=1)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return bool [N, width], True on the first `lengths[i]` columns of row i."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def join_prompts_and_responses(
    prompts: Sequence[Prompt], completions: Completions, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Append each response to its row's prompt.

    Returns sequences int64 [N, S] and prompt lengths int64 [N].
    """
    prompt_lengths = torch.tensor([len(prompt.tokens) for prompt in prompts], dtype=torch.long)
    rows = zip(prompts, completions.tokens, completions.lengths.tolist(), strict=True)
    joined = [
        torch.cat([torch.tensor(prompt.tokens).long(), tokens[:length]])
        for prompt, tokens, length in rows
    ]
    sequences = (
        pad_sequence(joined, True, pad_id) if joined else torch.zeros((0, 0), dtype=torch.long)
    )
    return sequences, prompt_lengths


def join_completions(parts: Sequence[Completions], pad_id: int) -> Completions:
    """Concatenate completions of several prompt batches, padded to the widest.

    Without parts the result is empty.
    """
    if not parts:
        return Completions(
            torch.zeros((0, 0), dtype=torch.long), torch.zeros(0, dtype=torch.long), ()
        )
    width = max(part.tokens.shape[1] for part in parts)
    return Completions(
        tokens=torch.cat([_widen(part.tokens, width, pad_id) for part in parts]),
        lengths=torch.cat([part.lengths for part in parts]),
        finish_reasons=tuple(reason for part in parts for reason in part.finish_reasons),
        log_probs=_join_or_none([part.log_probs for part in parts], width),
        weight_versions=_join_or_none([part.weight_versions for part in parts], width),
        policy_mask=_join_masks(parts, "policy_mask", width, missing=True),
        history_mask=_join_masks(parts, "history_mask", width, missing=False),
        turn_rewards=_join_or_none([part.turn_rewards for part in parts], width),
        environment_rewards=_join_environment_rewards(parts),
        environment_faults=tuple(fault for part in parts for fault in part.environment_faults),
    )


def join_rollouts(parts: Sequence[RolloutBatch], pad_id: int) -> RolloutBatch:
    """Concatenate the rollouts of one or more rounds, padded to the widest."""
    # A round without prompts on this rank has neither generator log-probs nor source names.
    parts = [part for part in parts if len(part.rewards)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    width = max(part.width for part in parts)
    used = max(part.sequences.shape[1] for part in parts)
    tables: dict[str, Any] = {
        name: _join_or_none([getattr(part, name) for part in parts], width) for name in _PER_TOKEN
    }
    tables["policy_mask"] = _join_masks(parts, "policy_mask", width, missing=True)
    tables["history_mask"] = _join_masks(parts, "history_mask", width, missing=False)
    # A generator may have sent scores of sources that the others lack.
    unscored = [torch.full_like(part.rewards, torch.nan) for part in parts]
    source_rewards: dict[str, Tensor] = {}
    for source in dict.fromkeys(source for part in parts for source in part.source_rewards):
        scores = []
        for part, missing in zip(parts, unscored, strict=True):
            scores.append(part.source_rewards.get(source, missing))
        source_rewards[source] = torch.cat(scores)
    return RolloutBatch(
        sequences=torch.cat([_widen(part.sequences, used, pad_id) for part in parts]),
        finish_reasons=tuple(reason for part in parts for reason in part.finish_reasons),
        score_faults=tuple(fault for part in parts for fault in part.score_faults),
        source_rewards=source_rewards,
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_SAMPLE},
        **tables,
    )


def _widen(tensor: Tensor, columns: int, value: float = 0.0) -> Tensor:
    return pad(tensor, (0, columns - tensor.shape[1]), value=value)


def _join_or_none(values: Sequence[Tensor | None], columns: int) -> Tensor | None:
    """Concatenate along the rows, padded to `columns`; None if a part is None."""
    known = [_widen(value, columns) for value in values if value is not None]
    return torch.cat(known) if len(known) == len(values) else None


def _join_environment_rewards(parts: Sequence[Completions]) -> Tensor | None:
    known = [part.environment_rewards for part in parts if part.environment_rewards is not None]
    return torch.cat(known) if known else None


def _join_masks(
    parts: Sequence[Completions] | Sequence[RolloutBatch],
    name: str,
    columns: int,
    *,
    missing: bool,
) -> Tensor | None:
    """Concatenate the masks, padded to `columns`; None if no part has one.

    A part without a mask has `missing` at all its tokens.
    """
    masks: list[Tensor | None] = [getattr(part, name) for part in parts]
    if all(mask is None for mask in masks):
        return None
    known = []
    for part, mask in zip(parts, masks, strict=True):
        if mask is None:
            mask = torch.full((len(part.finish_reasons), columns), missing)
        known.append(_widen(mask, columns))
    return torch.cat(known)
