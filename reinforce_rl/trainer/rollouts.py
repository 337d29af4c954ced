"""Rollouts: responses sampled from the policy and scored by the reward source, batch by batch."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from reinforce_rl.data.batches import (
    FINISH_OUTSIDE,
    FINISH_STOP,
    Completions,
    Prompt,
    RolloutBatch,
    join_completions,
    join_prompts_and_responses,
)
from reinforce_rl.errors import GenerationError, RewardServerError, StoppedEarly, TooManyFailedRewardsError
from reinforce_rl.monitoring.samples import decode_responses
from reinforce_rl.rewards.base import (
    STATUS_NOT_FINITE,
    STATUS_OK,
    STATUS_TEXT,
    RewardFuture,
    RewardRequest,
    Rewards,
    RewardSource,
)
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.trainer.work_queue import FixedSplit, Work, WorkQueue

if TYPE_CHECKING:
    from reinforce_rl.actor.policy import MegatronGPTReinforceActorModel


@dataclass(frozen=True)
class PendingRollouts:
    """Samples whose scores are being computed.

    Attributes:
        batch: without rewards, and nothing valid in it yet.
        futures: of the scores, one for each micro-batch that this rank asked about, and how many samples it has; none
            on a rank that did not ask.
        work: brings the scores into the batch's order.
    """

    batch: RolloutBatch
    futures: tuple[tuple[RewardFuture, int], ...]
    work: Work


class RolloutMaker:
    """Samples and scores.

    Args:
        model: draws the responses.
        rm: scores them.
        batch_iterator_cls: called with (prompts, validation), iterates over the batches that are generated together.
        drop_truncated: a response that was cut at max_length is not valid.
        max_failed_fraction: of samples that may lack a score, over all ranks.
        stop: whether to leave off.
        work_queue: a block of ranks that is free generates what is left, whosever it is; see `WorkQueue`.
    """

    def __init__(
        self,
        model: MegatronGPTReinforceActorModel,
        rm: RewardSource,
        batch_iterator_cls: Callable[[Sequence[Prompt], bool], Iterable[Sequence[Prompt]]],
        *,
        drop_truncated: bool,
        max_failed_fraction: float,
        stop: StopRequest,
        work_queue: bool = False,
    ):
        self._model = model
        self._rm = rm
        self._batch_iterator_cls = batch_iterator_cls
        self._drop_truncated = drop_truncated
        self._max_failed_fraction = max_failed_fraction
        self._stop = stop
        self._has_queue = work_queue and model.mesh.dp_size > 1

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, seed: int, *, validation: bool = False
    ) -> PendingRollouts:
        """Generate batch by batch; each is scored while the next one is generated.

        Raises:
            StoppedEarly: on all ranks, once one was asked to stop.
            GenerationError: on all ranks, once an engine of some rank cannot go on.
        """
        mesh = self._model.mesh
        share = list(self._batch_iterator_cls(prompts, validation))
        work = WorkQueue(mesh, share) if self._has_queue else FixedSplit(share)
        parts: list[Completions] = []
        futures: list[tuple[RewardFuture, int]] = []
        failure: Exception | None = None
        try:
            with contextlib.closing(work), self._model.generator.awake():
                for batch in work:
                    if self._stop.asked_of_block(mesh):
                        break
                    part = self._model.infer(batch, num_samples, seed, validation=validation)
                    parts.append(part)
                    if mesh.is_block_leader:
                        future = self._rm.infer_rm(self._reward_request(batch, part))
                        futures.append((future, len(part.lengths)))
        except GenerationError as error:
            failure = error
        mesh.check_together(failure)
        self._stop.check(mesh)
        completions = join_completions(work.to_owners(parts), self._model.pad_id)
        return PendingRollouts(self._unscored(prompts, completions), tuple(futures), work)

    def score(self, pending: PendingRollouts, name: str) -> RolloutBatch:
        """Wait for this rank's scores, and say which samples count. All ranks fail together.

        Args:
            pending: of `sample`.
            name: of what the samples are for, such as step 3.

        Raises:
            RewardServerError: a request failed on some rank, or too many samples did.
            StoppedEarly: some rank was asked to stop.
        """
        batch, mesh = pending.batch, self._model.mesh
        failure: Exception | None = None
        rewards, reasons = batch.rewards, Counter[str]()
        sources: dict[str, torch.Tensor] = {}
        answers: list[Rewards] | None = []
        try:
            if pending.futures:
                answers = self._stop.unless_asked(lambda: [_scores(*asked) for asked in pending.futures])
                if answers is None:
                    raise StoppedEarly(f"stopped by {self._stop.reason}")
        except Exception as error:  # whatever a source raises, the other ranks must hear of it
            failure = error
        mesh.check_together(failure)
        if mesh.is_block_leader and (own := pending.work.to_owners(answers or [])):
            rewards = torch.cat([answer.values for answer in own])
            reasons = Counter(reason for answer in own for reason in _reasons(answer))
            sources = {name: torch.cat([answer.by_source[name] for answer in own]) for name in own[0].by_source}
        rewards, reasons, sources = mesh.from_block_leader((rewards, reasons, sources))
        self._check_failures(reasons, len(rewards), name)
        valid = torch.isfinite(rewards) & (batch.response_lengths > 0)
        valid &= torch.tensor([reason != FINISH_OUTSIDE for reason in batch.finish_reasons], dtype=torch.bool)
        if self._drop_truncated:
            valid &= batch.is_end
        return replace(batch, rewards=rewards, valid=valid, source_rewards=sources)

    def _check_failures(self, reasons: Counter[str], count: int, name: str) -> None:
        mesh, bound = self._model.mesh, self._max_failed_fraction
        failed, total = mesh.sum_over_dp(torch.tensor([reasons.total(), count])).tolist()
        if failed > bound * total:
            every = sum(mesh.gather_over_dp(reasons), Counter[str]())
            told = ", ".join(f"{text} ({number})" for text, number in every.most_common())
            raise TooManyFailedRewardsError(
                f"scoring failed for {failed / total:.1%} of the samples of {name}, above "
                f"trainer.reinforce.max_failed_fraction = {bound}; reasons: {told}. "
                "Nothing was trained on them; the log of a reward server says more"
            )

    def _reward_request(self, prompts: Sequence[Prompt], completions: Completions) -> RewardRequest:
        repeated = completions.repeat_to_samples(prompts)
        sequences, prompt_lengths = join_prompts_and_responses(repeated, completions, self._model.pad_id)
        text_lengths = self._text_lengths(completions)
        return RewardRequest(
            tokens=sequences,
            lengths=prompt_lengths + completions.lengths,
            prompts=tuple(prompt.text for prompt in repeated),
            responses=tuple(decode_responses(self._model.tokenizer, completions.tokens, text_lengths)),
            messages=tuple(prompt.messages for prompt in repeated),
            metadata=tuple(prompt.metadata for prompt in repeated),
            finished=tuple(reason == FINISH_STOP for reason in completions.finish_reasons),
        )

    def _text_lengths(self, completions: Completions) -> torch.Tensor:
        """[N], tokens of each response less the one that ended it, which a tokenizer need not call special."""
        tokens = torch.nn.functional.pad(completions.tokens, (0, 1))  # a column even where all responses are empty
        last = tokens.gather(1, (completions.lengths - 1).clamp(min=0)[:, None])[:, 0]
        stop_ids = torch.tensor(self._model.settings.sampling.stop_token_ids, dtype=torch.long)
        return completions.lengths - ((completions.lengths > 0) & torch.isin(last, stop_ids)).long()

    def _unscored(self, prompts: Sequence[Prompt], completions: Completions) -> RolloutBatch:
        repeated = completions.repeat_to_samples(prompts)
        sequences, prompt_lengths = join_prompts_and_responses(repeated, completions, self._model.pad_id)
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
        )


def _scores(future: RewardFuture, count: int) -> Rewards:
    """What a source promises, also one of the user's own: no value without STATUS_OK, nor the other way round."""
    found = future.result()
    values, status = found.values.float(), found.status.int()
    for name, tensor in {"values": values, "status": status}.items():
        if tensor.shape != (count,):
            where = f"{type(future).__module__}.{type(future).__qualname__}"
            raise RewardServerError(f"{where} returned {name} of shape {list(tensor.shape)}; expected [{count}]")
    status = torch.where((status == STATUS_OK) & ~torch.isfinite(values), STATUS_NOT_FINITE, status)
    return replace(found, values=values.masked_fill(status != STATUS_OK, torch.nan), status=status)


def _reasons(answer: Rewards) -> list[str]:
    """Say why each failed sample failed, in the order of the samples."""
    failed = [(row, code) for row, code in enumerate(answer.status.tolist()) if code != STATUS_OK]
    return [answer.faults.get(row, STATUS_TEXT.get(code, f"status {code}")) for row, code in failed]
