"""Score sequences with a reward model: the actor's model class and a head on a pooled hidden state.

A call is split into micro-batches over the copies of the model. A head's scores are merged into one
reward.

Notation: N sequences, S tokens, h hidden, K attributes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import SCORE, check_headers, load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.reward_head import RewardHead, counted_lengths, head_scores
from reinforce_rl.megatron.model.stored_head import head_modules
from reinforce_rl.megatron.schedule import forward_passes
from reinforce_rl.policy.micro_batches import micro_batches
from reinforce_rl.rewards.base import AttributeScores

_UNNAMED = re.compile(r"LABEL_\d+")  # transformers' name of a label without a name


@dataclass(frozen=True)
class Merging:
    """reward = (sum over attributes of weight * score - mean) / std."""

    weights: tuple[float, ...] = (1.0,)  # [K]; 1.0 for a head with one score
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def from_names(
        cls,
        names: Sequence[str],
        weights: Mapping[str, float] | None,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> Merging:
        """Build from user settings.

        `names` is empty for a single score. Missing weights are 0. `weights=None` gives each of K
        attributes the weight 1 / K.

        Raises:
            ConfigError: unknown names, several scores without names or weights, weights that are
                all 0, or an invalid mean or std in a head's file.
        """
        if not (math.isfinite(mean) and 0 < std < math.inf):
            raise ConfigError(
                [
                    Fault(
                        f"the head has mean {mean} and std {std}; expected finite numbers, the "
                        "std above 0; set reward_model.mean and reward_model.std",
                        key="reward_model.moments.invalid",
                    )
                ]
            )
        if unknown := sorted(set(weights or {}) - set(names)):
            known = (
                f"the head has {', '.join(names)}"
                if names
                else "the head has one score and no attributes"
            )
            raise ConfigError(
                [
                    Fault(
                        f"reward_model.attribute_weights names {', '.join(unknown)}; {known}",
                        key="reward_model.attributes.unknown",
                    )
                ]
            )
        if weights is not None and not any(weights.values()):
            raise ConfigError(
                [
                    Fault(
                        "reward_model.attribute_weights has only weights of 0, so every reward "
                        "would be 0; set one that is not 0",
                        key="reward_model.attributes.all_zero",
                    )
                ]
            )
        if weights is None and len(names) > 1 and all(_UNNAMED.fullmatch(name) for name in names):
            raise ConfigError(
                [
                    Fault(
                        f"the head has {len(names)} scores without names ({', '.join(names)}), and "
                        "their mean may be meaningless; choose with "
                        "reward_model.attribute_weights, for instance {LABEL_0: 1} for the first "
                        "alone, as TRL does, or {LABEL_1: 1, LABEL_0: -1} for the log-odds of a "
                        "classifier's second class",
                        key="reward_model.attributes.no_names",
                    )
                ]
            )
        if weights is None:
            return cls((1 / max(len(names), 1),) * max(len(names), 1), mean, std)
        return cls(tuple(float(weights.get(name, 0.0)) for name in names), mean, std)

    def __call__(self, scores: Tensor) -> Tensor:
        """Merge scores [N, K] into rewards, float64 [N]."""
        merged = scores.double() @ torch.tensor(
            self.weights, dtype=torch.float64, device=scores.device
        )
        return (merged - self.mean) / self.std


@dataclass(frozen=True)
class MicroBatch:
    rows: np.ndarray  # int64 [n], indices into the call's sequences
    tokens: np.ndarray  # int64 [n, s], right-padded with 0
    lengths: np.ndarray  # int64 [n]


@dataclass(frozen=True)
class Batching:
    micro_batch_size: int = 8  # sequences; used if `tokens_per_micro_batch` is None
    tokens_per_micro_batch: int | None = None  # padding included
    pad_to_multiple: int = 1  # in tokens, to limit the number of shapes

    def plan(self, sequences: Sequence[Sequence[int]]) -> list[MicroBatch]:
        """Group sequences (none empty) of similar length, longest first.

        The groups depend only on the list's content.
        """
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        padded = -(-lengths // self.pad_to_multiple) * self.pad_to_multiple
        passes = []
        for group in micro_batches(
            torch.from_numpy(padded), self.micro_batch_size, self.tokens_per_micro_batch
        ):
            rows = group.numpy()
            tokens = np.zeros((len(rows), padded[rows].max()), np.int64)
            for row, source in enumerate(rows.tolist()):
                tokens[row, : lengths[source]] = sequences[source]
            passes.append(MicroBatch(rows, tokens, lengths[rows]))
        return passes


def share(passes: Sequence[MicroBatch], blocks: int) -> list[list[int]]:
    """Distribute passes over `blocks` copies of the model, balanced by tokens.

    Greedy, largest first: at most 4/3 of the optimal makespan (Graham, "Bounds on Multiprocessing
    Timing Anomalies", 1969). A pass is never split, so that scores do not depend on `blocks`.

    Returns the indices of each block's passes.
    """
    dealt: list[list[int]] = [[] for _ in range(blocks)]
    load = [0] * blocks
    for index in sorted(range(len(passes)), key=lambda i: (-passes[i].tokens.size, i)):
        block = load.index(min(load))
        dealt[block].append(index)
        load[block] += passes[index].tokens.size
    return dealt


class MegatronRewardModel:
    """This rank's part of a reward model, an `AttributeScorer`.

    Every rank calls it with the same sequences. A server on several ranks calls
    `score_micro_batches` with this rank's share.

    Args:
        max_length: maximum tokens of a sequence; None for the trunk's maximum.
        merging: None for equal weights and the head's own mean and std.
    """

    def __init__(
        self,
        lm: CausalLM,
        head: RewardHead,
        *,
        batching: Batching | None = None,
        max_length: int | None = None,
        merging: Merging | None = None,
    ):
        width = lm.architecture.hidden_size
        shape = tuple(head.weight.shape)
        most = lm.architecture.max_positions
        if head.width != width:
            raise ConfigError(
                [
                    Fault(
                        f"the reward head has shape {shape}, but its trunk has hidden size "
                        f"{width}; give the head that was trained on this trunk",
                        key="reward_model.head.other_width",
                    )
                ]
            )
        self._lm = lm.eval()
        self._head = head
        self._weight = head.rows.to(lm.mesh.device)
        self.batching = batching or Batching()
        self.merging = merging or Merging.from_names(head.attributes, None, head.mean, head.std)
        self.attributes = head.attributes
        self.pooling = head.pooling
        self.dtype = lm.config.params_dtype
        self.head_name = head.name
        self.head_activation = None if head.hidden is None else head.hidden.activation
        self.vocab_size = lm.architecture.vocab_size
        self.max_length = min(max_length or most, most)

    def score(self, sequences: list[list[int]]) -> list[float]:
        """Return one reward per sequence, in order."""
        return self.merging(self._scores(sequences)).tolist()

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        """Return the rewards, and the scores before merging."""
        scores = self._scores(sequences)
        return AttributeScores(self.merging(scores).tolist(), scores.tolist())

    def score_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        """Return the head's scores of all n sequences in order, float64 [n, K].

        [0, K] before the last pipeline stage.
        """
        device = self._lm.mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread of the server uses device 0
        try:
            scores = forward_passes(
                self._lm,
                micro_batches,
                lambda lm, micro_batch: lm(torch.from_numpy(micro_batch.tokens).to(device)),
                self._head_scores,
                lambda micro_batch: self._lm.stage_shape(*micro_batch.tokens.shape),
            )
            return torch.cat(scores).numpy() if scores else np.zeros((0, len(self._weight)))
        finally:
            # Pending collectives must not mix with the next call's.
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _scores(self, sequences: list[list[int]]) -> Tensor:
        """Return float64 [N, K]."""
        out = torch.zeros((len(sequences), len(self._weight)), dtype=torch.float64)
        passes = self.batching.plan(sequences)
        if passes:
            scores = self._lm.mesh.from_last_stage(self.score_micro_batches(passes))
            rows = np.concatenate([micro_batch.rows for micro_batch in passes])
            out[rows] = torch.from_numpy(scores)
        return out

    def _head_scores(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        head = self._head
        device = hidden.device
        tokens = torch.from_numpy(micro_batch.tokens).to(device)
        lengths = torch.from_numpy(micro_batch.lengths).to(device)
        counted = counted_lengths(tokens, lengths, head.pad_id)
        scores = head_scores(
            hidden, self._lm, self._weight, counted, tokens.shape[1], head.pooling, head.hidden
        )
        return (scores + head.bias.to(device)).double().cpu()


def load_trunk(
    folder: str | Path,
    mesh: Mesh,
    *,
    num_scores: int | None = None,
    dtype: torch.dtype = torch.float32,
    heads: Sequence[str] = (),
) -> CausalLM:
    """Load a trunk; `num_scores` adds a classifier's score layer.

    For `heads` see `load_hf_weights`.
    """
    architecture = Architecture.from_folder(folder)
    weights = HFFolder(folder)
    if num_scores is not None:
        architecture = architecture.as_classifier(num_scores)
    # Check first: a model of config.json's size takes memory.
    check_headers(architecture, weights, heads)
    lm = CausalLM(architecture, mesh, dtype)
    load_hf_weights(lm, weights, heads=heads)
    return lm


def load_head(
    trunk_folder: str | Path,
    head_file: str | Path | None,
    head_name: str | None = None,
    head_activation: str | None = None,
) -> RewardHead:
    """Load a head of `reinforce-rl train-rm`, of another framework, or of the trunk's folder.

    `head_name` is its module in the file or folder; see `RewardHead.from_classifier`.

    Raises CheckpointError if there is no such head.
    """
    if head_file is None:
        return RewardHead.from_classifier(HFFolder(trunk_folder), head_name, head_activation)
    if head_name is None:
        return RewardHead.load(head_file)
    return RewardHead.from_file(head_file, head_name, trunk_folder, head_activation)


def load_reward_model(
    folder: str | Path,
    head_file: str | Path | None,
    mesh: Mesh,
    *,
    dtype: torch.dtype = torch.float32,
    head_name: str | None = None,
    head_activation: str | None = None,
    **options: Any,
) -> MegatronRewardModel:
    """Load this rank's part of a reward model.

    For the head see `load_head`, for the options `MegatronRewardModel`. `dtype` is the trunk's;
    pooling, head and merging always run in fp32 or float64.
    """
    # A missing file must fail before the trunk is loaded.
    head = load_head(folder, head_file, head_name, head_activation)
    num_scores = len(head.rows) if head_file is None else None
    heads = []
    if head_file is None:
        heads.append(head.name)
    if head_name is not None:
        # The user has chosen one; the folder may have further heads.
        heads += head_modules(HFFolder(folder))
    lm = load_trunk(folder, mesh, num_scores=num_scores, dtype=dtype, heads=heads)
    return MegatronRewardModel(lm, head, **options)


def reward_model_identity(
    trunk_folder: str | Path, head_file: str | Path | None, scorer: MegatronRewardModel
) -> dict[str, Any]:
    """Return the model's identity for the server's description.

    It depends on content alone: clients accept a server that restarts from another path or node.
    """
    if head_file is None:
        head = {"weights": HFFolder(trunk_folder).fingerprint()}
    else:
        head = {"head_sha256": hashlib.sha256(Path(head_file).read_bytes()).hexdigest()}
    merging = scorer.merging
    # Omitted for transformers' own head, so that existing identities stay the same.
    if scorer.head_name != SCORE:
        head["head_name"] = scorer.head_name
    if scorer.head_activation is not None:
        head["head_activation"] = scorer.head_activation
    return {
        "trunk": Path(trunk_folder).resolve().name,
        **head,
        # Omitted for fp32, so that existing identities stay the same.
        **(
            {}
            if scorer.dtype == torch.float32
            else {"precision": str(scorer.dtype).removeprefix("torch.")}
        ),
        "pooling": scorer.pooling,
        "attribute_weights": dict(zip(scorer.attributes, merging.weights, strict=False)),
        "mean": merging.mean,
        "std": merging.std,
    }
