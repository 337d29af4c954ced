"""What is done with sampled responses, whoever drew them: they are scored and get log-probs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from reinforce_rl.errors import RewardServerError, StoppedEarly, TooManyFailedRewardsError
from reinforce_rl.monitoring.metrics import Mean, reduce_metrics, rollout_means
from reinforce_rl.rewards.base import (
    STATUS_NOT_FINITE,
    STATUS_OK,
    STATUS_TEXT,
    RewardFuture,
    RewardRequest,
    Rewards,
)
from reinforce_rl.rollout.source import RolloutContext
from reinforce_rl.runtime.phases import PhaseTracker
from reinforce_rl.utils.console import warn_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

logger = logging.getLogger(__name__)

_MAX_REASONS = 3  # of failed scores in a message; texts of errors may all differ


@dataclass(frozen=True)
class PendingRollouts:
    """Sampled responses whose scores are under way."""

    batch: RolloutBatch  # without rewards; all samples invalid
    # (future, samples) per micro-batch that this rank asked about
    futures: tuple[tuple[RewardFuture, int], ...]
    # restores the batch's order; a collective call
    to_owners: Callable[[Sequence[Rewards]], list[Rewards]] = list


def unscored_batch(
    prompts: Sequence[Prompt], completions: Completions, pad_id: int
) -> RolloutBatch:
    """Return a batch of these responses without rewards, whose samples are not valid."""
    repeated = completions.repeat_to_samples(prompts)
    sequences, prompt_lengths = join_prompts_and_responses(repeated, completions, pad_id)
    count = len(repeated)
    return RolloutBatch(
        sequences=sequences,
        prompt_lengths=prompt_lengths,
        response_lengths=completions.lengths,
        group_ids=torch.tensor([prompt.id for prompt in repeated], dtype=torch.long),
        sample_ids=torch.arange(count) % max(count // max(len(prompts), 1), 1),
        finish_reasons=completions.finish_reasons,
        rewards=torch.full((count,), float("nan")),
        valid=torch.zeros(count, dtype=torch.bool),
        generator_log_probs=completions.log_probs,
        weight_versions=completions.weight_versions,
        policy_mask=completions.policy_mask,
        history_mask=completions.history_mask,
        turn_rewards=completions.turn_rewards,
    )


class RolloutScorer:
    """Scores sampled responses and takes their log-probs; all ranks call it alike."""

    def __init__(self, context: RolloutContext):
        self._context = context
        self._cfg = context.cfg
        self._model = context.model
        self._stop = context.stop

    def finish_step(self, pending: PendingRollouts, step: int) -> RolloutBatch:
        """Add log-probs, while scores are computed elsewhere, and the scores."""
        batch = self.with_log_probs(pending.batch)
        return self.score_step(replace(pending, batch=batch), step)

    def score_step(self, pending: PendingRollouts, step: int) -> RolloutBatch:
        with self._context.clock.phase("reward_wait", has_deadline=True):
            return self.score(pending, f"step {step}")

    def evaluate(
        self, name: str, step: int, phases: PhaseTracker, sample: Callable[[], PendingRollouts]
    ) -> RolloutBatch:
        """Sample and score the prompts of a validation."""
        phases.begin(name)
        with self._context.while_generating():
            pending = sample()
        phases.begin(f"{name}: reward_wait", has_deadline=True)
        return self.score(pending, f"the {name} after step {step}")

    def means(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """Return means over all ranks of a step's samples."""
        means = rollout_means(batch)
        if self._context.is_off_policy and batch.weight_versions is not None:
            # A generator may pad its responses beyond the longest.
            versions = batch.weight_versions[:, : batch.width]
            means["staleness"] = Mean.of(step - 1 - versions[batch.response_mask])
        return reduce_metrics(means, self._model.mesh.gather_over_dp)

    def score(self, pending: PendingRollouts, name: str) -> RolloutBatch:
        """Wait for this rank's scores and set which samples are valid. All ranks raise alike.

        `name` denotes the samples in error messages, e.g. "step 3".
        """
        batch = pending.batch
        mesh = self._model.mesh
        rewards = batch.rewards
        faults = list[str | None]([None] * len(batch.rewards))
        sources: dict[str, torch.Tensor] = {}
        answers = self._answers(pending)
        if mesh.is_model_parallel_rank_0:
            answers = pending.to_owners(answers)
            if answers:
                rewards = torch.cat([answer.values for answer in answers])
                faults = [fault for answer in answers for fault in faults_of(answer)]
                sources = _rewards_by_source(answers)
        rewards, faults, sources = mesh.from_model_parallel_rank_0((rewards, faults, sources))
        reasons = Counter(fault for fault in faults if fault is not None)
        self._check_failures(reasons, len(rewards), name)
        scored = replace(batch, rewards=rewards, source_rewards=sources, score_faults=tuple(faults))
        return with_valid(scored, self._cfg.truncated_samples)

    def _answers(self, pending: PendingRollouts) -> list[Rewards]:
        """Wait for the scores that this rank asked for; none on ranks that asked for none."""
        with self._model.mesh.raise_on_all_ranks():
            if not pending.futures:
                return []
            answers = self._stop.run_interruptible(
                lambda: [scores_of(future, count) for future, count in pending.futures]
            )
            if answers is None:
                raise StoppedEarly(f"stopped by {self._stop.reason}", key="run.stop.by_signal")
            return answers

    def with_log_probs(self, batch: RolloutBatch) -> RolloutBatch:
        """Add log-probs of policy and reference if needed.

        Without a KL only a second update reads them.
        """
        clock = self._context.clock
        # Ratios of a second update must start from the trainer's own log-probs.
        has_ratios = self._context.has_ratios
        is_current = self._model.generator.is_exact and not self._context.is_off_policy
        is_known = self._cfg.generator_log_probs and is_current and not has_ratios
        if self._cfg.uses_reference or has_ratios:
            with clock.phase("logprobs"):
                log_probs = batch.generator_log_probs
                if not is_known:
                    log_probs = self._model.get_inference_log_probs(*batch.sequence_inputs)
                batch = replace(batch, log_probs=log_probs)
        if self._cfg.uses_reference:
            with clock.phase("init_logprobs"):
                init_log_probs = self._model.get_init_policy_logprobs(*batch.sequence_inputs)
                batch = replace(batch, init_log_probs=init_log_probs)
        self._stop.check(self._model.mesh)
        return batch

    def _check_failures(self, reasons: Counter[str], count: int, name: str) -> None:
        mesh = self._model.mesh
        bound = self._cfg.max_failed_fraction
        failed, total = mesh.sum_over_dp(torch.tensor([reasons.total(), count])).tolist()
        if not failed:
            return
        of_all_ranks = sum(mesh.gather_over_dp(reasons), Counter[str]())
        shown = [f"{text} ({number})" for text, number in of_all_ranks.most_common(_MAX_REASONS)]
        hidden = len(of_all_ranks) - _MAX_REASONS
        if hidden > 0:
            shown.append(f"and {hidden} more")
        fault = f"scoring failed for {failed / total:.1%} of the samples of {name}"
        why = ", ".join(shown)
        if failed > bound * total:
            hint = ""
            if of_all_ranks.keys() & set(STATUS_TEXT.values()):
                hint = "; the reward server's log says more"
            raise TooManyFailedRewardsError(
                f"{fault}, above trainer.reinforce.max_failed_fraction = {bound}; reasons: {why}. "
                f"Nothing was trained on them{hint}",
                key="rewards.samples.too_many_failed",
            )
        if mesh.is_main:
            logger.warning("%s; reasons: %s", fault, why)


def _rewards_by_source(answers: Sequence[Rewards]) -> dict[str, torch.Tensor]:
    """Join the scores of each source; NaN where an answer has none of it.

    Rollouts of a checkpoint may have been scored by other sources.
    """
    unscored = [torch.full_like(answer.values, torch.nan) for answer in answers]
    by_source = {}
    for source in dict.fromkeys(source for answer in answers for source in answer.by_source):
        parts = zip(answers, unscored, strict=True)
        by_source[source] = torch.cat([part.by_source.get(source, nan) for part, nan in parts])
    return by_source


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

    The request of an episode has every message once. Logs a warning where a text lacks a special
    token other than the one at its end.
    """
    completions = completions.without_history(pad_id_of(tokenizer))
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
        environment_rewards=completions.environment_rewards,
        environment_faults=completions.environment_faults,
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


def can_train(batch: RolloutBatch) -> torch.Tensor:
    """Return bool [N]: True for responses that are not empty and within the vocabulary."""
    is_within = [reason != FINISH_OUTSIDE for reason in batch.finish_reasons]
    return (batch.policy_lengths > 0) & torch.tensor(is_within, dtype=torch.bool)


def with_valid(batch: RolloutBatch, truncated_samples: str) -> RolloutBatch:
    """Set which samples of a scored batch count; with `drop`, truncated ones do not."""
    valid = torch.isfinite(batch.rewards) & can_train(batch)
    return replace(batch, valid=valid & batch.is_end if truncated_samples == "drop" else valid)
