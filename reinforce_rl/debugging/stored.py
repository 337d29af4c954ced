"""Recorded rollouts, rebuilt for the trainer's functions, and the settings of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reinforce_rl.config.actor import ReinforceConfig, TrainConfig
from reinforce_rl.config.load import read_config
from reinforce_rl.data.batches import RolloutBatch
from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.records import RolloutRow, SampleTokens, read_tokens, rollout_files
from reinforce_rl.monitoring.run_folder import open_run
from reinforce_rl.runtime.settings import CONFIG_FILE, settings_of
from reinforce_rl.runtime.stored_config import parse_values
from reinforce_rl.runtime.trust import remove_from_import_path, without_custom_generator
from reinforce_rl.trainer.advantages import response_kl


@dataclass(frozen=True)
class StoredStep:
    step: int
    rows: list[RolloutRow]
    # Without tokens if they were not recorded. The recorded KL was taken from its log-probs.
    batch: RolloutBatch

    def needs(self, cfg: ReinforceConfig) -> None:
        """Raise DataError if the record lacks the log-probs for the KL of these settings."""
        if not cfg.uses_reference or self.batch.init_log_probs is not None:
            return
        if not self.batch.sequences.numel():
            self.needs_tokens("the KL is computed from them")
        raise DataError(
            f"step {self.step}: its record has no log-probs of the reference, as the run had "
            "trainer.reinforce.initial_policy_kl_penalty=0, but a KL was asked for; set that key "
            "to 0, or use a run with a KL",
            key="samples.tokens.no_reference_log_probs",
        )

    def needs_tokens(self, why: str) -> None:
        if not self.batch.sequences.numel():
            raise DataError(
                f"step {self.step}: its samples were recorded without tokens, but {why}; expected "
                "a multiple of exp_manager.record_tokens_every, in a run of this version",
                key="samples.tokens.not_recorded",
            )


class StoredRun:
    """A run's recorded training steps.

    Raises:
        DataError: the folder holds no run. Methods raise it for a file that is missing, damaged or
            of another version.
    """

    def __init__(self, folder: str | Path):
        self.run = open_run(folder)
        self.path = self.run.path
        self._settings: dict[str, tuple[TrainConfig, list[str]]] = {}
        remove_from_import_path(self.path)

    def settings(self, step: int) -> tuple[TrainConfig, list[str]]:
        """Return the settings of a step, and their faults on this machine.

        Steps with the same settings share an object.
        """
        text, _ = settings_of(self.path, step)
        if not text:
            raise DataError(
                f"{self.path} has no {CONFIG_FILE}; expected the settings that its steps were made "
                "with. Copy it from where the run was",
                key="run.config.missing",
            )
        if text not in self._settings:
            tree = parse_values(text, f"{self.path}: the settings of step {step}")
            self._settings[text] = read_config(OmegaConf.create(without_custom_generator(tree)))
        return self._settings[text]

    def step(self, step: int) -> StoredStep:
        """Rebuild the rollouts of a step, in the recorded order of all ranks."""
        cfg = self.settings(step)[0]
        rows = self.run.samples(step)
        tokens = read_tokens(rollout_files(self.path)[step])
        has_tokens = len(tokens) == len(rows) and len(rows) > 0

        def table(name: str) -> Tensor | None:
            columns = [getattr(sample, name) for sample in tokens] if has_tokens else [None]
            if None in columns:
                return None
            return pad_sequence([torch.tensor(values) for values in columns], True)

        _check(rows, tokens, rollout_files(self.path)[step])
        prompts: list[list[int]] = [[] for _ in rows]
        responses: list[list[int]] = [[] for _ in rows]
        lengths = [row.response_length for row in rows]
        if has_tokens:
            prompts = [sample.prompt_tokens or [] for sample in tokens]
            responses = [sample.response_tokens or [] for sample in tokens]
            # with the tokens of an environment, which the rows do not count
            lengths = [len(response) for response in responses]
        joined = [
            torch.tensor(p + r, dtype=torch.long) for p, r in zip(prompts, responses, strict=True)
        ]
        source_rewards: dict[str, Tensor] = {}
        for source in dict.fromkeys(name for row in rows for name in row.source_rewards):
            # Ranks may have recorded different sources.
            scores = [row.source_rewards.get(source, math.nan) for row in rows]
            source_rewards[source] = torch.tensor(scores)
        versions = table("weight_versions")
        policy_mask = table("policy_mask")
        history_mask = table("history_mask")
        batch = RolloutBatch(
            sequences=pad_sequence(joined, True)
            if joined
            else torch.zeros((0, 0), dtype=torch.long),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            response_lengths=torch.tensor(lengths),
            group_ids=torch.tensor([row.prompt_id for row in rows]),
            sample_ids=torch.tensor([row.sample_id for row in rows]),
            finish_reasons=tuple(row.finish_reason for row in rows),
            rewards=torch.tensor([row.reward for row in rows], dtype=torch.float32),
            valid=torch.tensor([row.valid for row in rows]),
            generator_log_probs=table("generator_log_probs"),
            weight_versions=None if versions is None else versions.long(),
            policy_mask=None if policy_mask is None else policy_mask.bool(),
            history_mask=None if history_mask is None else history_mask.bool(),
            turn_rewards=table("turn_rewards"),
            log_probs=table("policy_log_probs"),
            init_log_probs=table("reference_log_probs"),
            source_rewards=source_rewards,
            score_faults=tuple(row.score_fault for row in rows),
        )
        return StoredStep(step, rows, _with_log_probs_of_kl(batch, cfg.trainer.reinforce, rows))


def _check(rows: Sequence[RolloutRow], tokens: Sequence[SampleTokens], file: Path) -> None:
    """Raise DataError if the samples of a prompt have different prompt tokens."""
    known = dict[int, list[int] | None]()
    for row, sample in zip(rows, tokens, strict=False):
        if known.setdefault(row.prompt_id, sample.prompt_tokens) != sample.prompt_tokens:
            raise DataError(
                f"{file}: prompt {row.prompt_id}, sample {row.sample_id} has other prompt_tokens "
                "than the first sample of its prompt; the file was changed or damaged since the "
                "run wrote it. Restore it",
                key="samples.tokens.prompts_differ",
            )


def _with_log_probs_of_kl(
    batch: RolloutBatch, cfg: ReinforceConfig, rows: list[RolloutRow]
) -> RolloutBatch:
    """Set the log-probs of the recorded KL: the trainer's or the generator's."""
    if batch.init_log_probs is None:
        return batch
    recorded = torch.tensor([row.kl for row in rows], dtype=torch.float64)
    candidates = []
    for log_probs in (batch.log_probs, batch.generator_log_probs):
        if log_probs is not None:
            candidate = replace(batch, log_probs=log_probs)
            gaps = (response_kl(candidate, cfg)[0].double() - recorded)[batch.valid].nan_to_num(
                torch.inf
            )
            candidates.append((float(gaps.abs().max()) if len(gaps) else 0.0, candidate))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else batch
