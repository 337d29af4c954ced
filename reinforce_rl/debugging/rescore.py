"""Score stored rollouts again, by the trainer's own requests."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.data.batches import Completions, Prompt, RolloutBatch
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.debugging.stored import StoredStep
from reinforce_rl.errors import ReinforceError
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.monitoring.run import SilentMonitor
from reinforce_rl.policy.build import stop_token_ids
from reinforce_rl.rewards.environment import ENVIRONMENT_FAILED
from reinforce_rl.rewards.sources import connect_to_reward_servers
from reinforce_rl.rollout.prompts import build_datasets
from reinforce_rl.rollout.scoring import faults_of, request_about, scores_of

logger = logging.getLogger(__name__)


class Rescorer:
    """The configured reward functions and servers, for stored rollouts.

    The caller closes it. Raises the errors of `connect_to_reward_servers`.
    """

    def __init__(self, cfg: TrainConfig, mesh: Mesh):
        model = cfg.pretrained_checkpoint.restore_from_path
        self._tokenizer = load_tokenizer(model)
        self._stop_ids = stop_token_ids(model, self._tokenizer)
        self._has_environment = cfg.has_environment
        self._takes_environment_rewards = cfg.takes_environment_rewards
        self._skips = cfg.model.reinforce.skip_special_tokens
        self._size = (
            cfg.model.reinforce.rollout_micro_batch_size
            * cfg.trainer.reinforce.num_rollouts_per_prompt
        )
        self._data: list[Prompt] = []  # has the messages, which a record lacks
        try:
            train = build_datasets(cfg, self._tokenizer, splits=["train"]).train
            self._data = [train[i] for i in range(len(train))]
        except ReinforceError as error:
            logger.warning(
                "the run's prompts cannot be read, so rewards get no messages, only texts: %s",
                error,
            )
        self._source = connect_to_reward_servers(
            cfg, mesh, self._tokenizer, SilentMonitor(".", notes=mesh.is_main)
        )

    def __call__(self, stored: StoredStep) -> RolloutBatch:
        """Return a step's rollouts with new rewards.

        Raises RewardServerError if a server does not answer in time.
        """
        stored.needs_tokens("a reward source reads them")
        answers = [scores_of(*asked) for asked in list(self._asked(stored))]
        return replace(
            stored.batch,
            rewards=torch.cat([answer.values for answer in answers]),
            source_rewards={
                name: torch.cat([answer.by_source[name] for answer in answers])
                for name in answers[0].by_source
            },
            score_faults=tuple(fault for answer in answers for fault in faults_of(answer)),
        )

    @property
    def identity(self) -> Any:
        """The reward source's description of its version; None without one."""
        return getattr(self._source, "identity", None)

    def close(self) -> None:
        with contextlib.suppress(ReinforceError):
            self._source.close()

    def _asked(self, stored: StoredStep) -> Iterator[tuple]:
        """Request scores for all samples, in requests of the trainer's size."""
        batch = stored.batch
        for rows in torch.arange(len(stored.rows)).split(self._size):
            part = batch.select(rows)
            starts = part.prompt_lengths.tolist()
            lengths = part.response_lengths.tolist()
            ids = zip(part.sequences.tolist(), starts, lengths, strict=True)
            cut = [(row[:start], row[start : start + length]) for row, start, length in ids]
            tokens = torch.zeros((len(rows), part.width), dtype=torch.long)
            for i, (_, response) in enumerate(cut):
                tokens[i, : len(response)] = torch.tensor(response, dtype=torch.long)
            prompts = [
                self._prompt(stored, i, prompt_tokens)
                for i, (prompt_tokens, _) in zip(rows.tolist(), cut, strict=True)
            ]
            completions = Completions(
                tokens,
                part.response_lengths,
                part.finish_reasons,
                history_mask=part.history_mask,
                environment_rewards=self._environment_rewards(part),
                environment_faults=self._environment_faults(part),
            )
            request = request_about(
                prompts,
                completions,
                self._tokenizer,
                self._stop_ids,
                skip_special_tokens=self._skips,
            )
            yield self._source.infer_rm(request), len(rows)

    def _environment_rewards(self, batch: RolloutBatch) -> torch.Tensor | None:
        """Return what the environment gave, as it was recorded; None if it was no term."""
        if not self._takes_environment_rewards:
            return None
        return batch.source_rewards.get("environment", batch.rewards)

    def _environment_faults(self, batch: RolloutBatch) -> tuple[str | None, ...]:
        """Return why environments failed, as it was recorded with the scores."""
        if not self._has_environment:
            return ()
        return tuple(
            fault if fault is not None and fault.startswith(ENVIRONMENT_FAILED) else None
            for fault in batch.score_faults
        )

    def _prompt(self, stored: StoredStep, row: int, tokens: list[int]) -> Prompt:
        sample = stored.rows[row]
        known = self._data[sample.prompt_id % len(self._data)] if self._data else None
        messages = known.messages if known is not None and known.text == sample.prompt else ()
        return Prompt(
            sample.prompt_id,
            sample.prompt,
            tuple(tokens),
            json.loads(sample.record or "{}"),
            messages,
        )
