"""A reward model whose every weight is trained, on any layout of ranks.

Notation: E examples of G sequences each, S tokens, K scores of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from reinforce_rl.actor.micro_batches import micro_batches
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.reward_head import POOLING_KEY, RewardHead, counted_lengths, head_scores
from reinforce_rl.megatron.model.transformer_config import DEFAULT_OPTIONS, ModelOptions
from reinforce_rl.megatron.optimizer import DEFAULT_DATA_PARALLEL, DataParallelSettings, wrap_data_parallel
from reinforce_rl.megatron.schedule import accumulate_gradients, forward_passes
from reinforce_rl.megatron.weights.hf_weights import HFFolder, export_hf_folder, load_hf_weights
from reinforce_rl.megatron.weights.weight_map import SCORE_LAYER

T = TypeVar("T")
Group = Sequence[Sequence[int]]
"""The G sequences of one example."""

SCORE_NAME = "reward"  # of the only score, in an exported folder


class TrainableRewardModel:
    """A trunk and a linear head without bias, as transformers' classifiers have it.

    Args:
        lm: a classifier, weights loaded.
        pooling: of `POOLINGS`.
        pad_id: with pooling `last`, trailing tokens of this id do not count; see `counted_lengths`.
        micro_batch_size: sequences in one pass; an example's sequences are always in one.
        data_parallel: how data-parallel ranks share their work.
    """

    def __init__(
        self,
        lm: CausalLM,
        *,
        pooling: str = "last",
        pad_id: int | None = None,
        micro_batch_size: int = 8,
        data_parallel: DataParallelSettings = DEFAULT_DATA_PARALLEL,
    ):
        self.lm = lm
        self.ddp = wrap_data_parallel(lm, data_parallel)
        self._pooling = pooling
        self._pad_id = pad_id if pooling == "last" else None
        self._micro_batch_size = micro_batch_size

    @property
    def mesh(self) -> Mesh:
        return self.lm.mesh

    def accumulate(self, groups: Sequence[Group], loss_of: Callable[[Tensor, list[int]], tuple[Tensor, T]]) -> list[T]:
        """Accumulate the gradient of a loss into the gradient buffers, which are zeroed first; a collective call.

        Args:
            groups: this data-parallel rank's examples; there may be none.
            loss_of: of scores [E', G, K] and the indices of the E' examples of a micro-batch, their share of the
                global loss, with gradient, and whatever is wanted besides.

        Returns:
            what `loss_of` gave besides.
        """
        # A rank with nothing to train on still runs one pass, or the others would wait for it.
        parts: list[list[int] | None] = [*self._cut(groups)] or [None]

        def finish(hidden: Tensor, rows: list[int] | None) -> tuple[Tensor, list[T]]:
            if rows is None:
                return 0.0 * self._score(hidden, [[[0]]]).sum(), []
            share, result = loss_of(self._score(hidden, [groups[i] for i in rows]), rows)
            return share, [result]

        self.lm.train()
        found = accumulate_gradients(
            self.ddp,
            parts,
            lambda model, rows: self._hidden(model, [groups[i] for i in rows] if rows else [[[0]]]),
            finish,
            lambda rows: self._stage_shape([groups[i] for i in rows] if rows else [[[0]]]),
        )
        return [result for results in self.mesh.from_last_stage(found) for result in results]

    def scores(self, groups: Sequence[Group]) -> Tensor:
        """float32 [E, G, K] on the CPU of every rank of the block, without gradient; a collective call."""
        if not groups:
            return torch.zeros((0, 1, 1))
        cuts = self._cut(groups)
        parts = [[groups[i] for i in rows] for rows in cuts]
        self.lm.eval()
        found = forward_passes(
            self.lm,
            parts,
            self._hidden,
            lambda hidden, part: self._score(hidden, part).float().cpu(),
            self._stage_shape,
        )
        found = self.mesh.from_last_stage(found)
        out = torch.zeros((len(groups), *found[0].shape[1:]))
        for rows, scores in zip(cuts, found, strict=True):
            out[rows] = scores
        return out

    def export(self, source: str | Path, out: str | Path, names: Sequence[str], pad_id: int | None) -> Path:
        """Write it as a Hugging Face `...ForSequenceClassification` folder; a collective call.

        Args:
            source: the folder that the run began with.
            out: the folder to write; replaced where it exists.
            names: of the K scores; none where there is a single one.
            pad_id: the tokenizer's padding token, which transformers asks for to tell padding from text.
        """
        values = classifier_config(self.lm.architecture, names or (SCORE_NAME,), self._pooling, pad_id)
        return export_hf_folder(self.lm, source, out, config_values=values)

    def _cut(self, groups: Sequence[Group]) -> list[list[int]]:
        if not groups:
            return []
        lengths = torch.tensor([max(map(len, group)) for group in groups])
        return [rows.tolist() for rows in micro_batches(lengths, max(self._micro_batch_size // len(groups[0]), 1))]

    def _hidden(self, model: torch.nn.Module, groups: Sequence[Group]) -> Tensor:
        return model(self._tokens(groups)[0])

    def _stage_shape(self, groups: Sequence[Group]) -> tuple[int, int, int]:
        lengths = [len(sequence) for group in groups for sequence in group]
        return self.lm.stage_shape(len(lengths), max(lengths))

    def _score(self, hidden: Tensor, groups: Sequence[Group]) -> Tensor:
        """[E, G, K], on the last stage."""
        tokens, lengths = self._tokens(groups)
        counted = counted_lengths(tokens, lengths, self._pad_id)
        scores = head_scores(hidden, self.lm, self.lm.score.weight, counted, tokens.shape[1], self._pooling)
        return scores.view(len(groups), len(groups[0]), -1)

    def _tokens(self, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
        """int64 [E G, S], right-padded, and lengths int64 [E G]."""
        sequences = [sequence for group in groups for sequence in group]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        tokens = torch.zeros((len(sequences), int(lengths.max())), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        return tokens.to(self.mesh.device), lengths.to(self.mesh.device)


def load_trainable(
    folder: str | Path,
    mesh: Mesh,
    names: Sequence[str],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    options: ModelOptions = DEFAULT_OPTIONS,
) -> CausalLM:
    """A classifier with the weights of a Hugging Face folder; a language model gets a new head.

    Args:
        folder: a language model, or a classifier with the same scores.
        mesh: this rank's place.
        names: of the scores; none for a single one.
        seed: of a new head's weights, normal with variance 1 / (hidden size + 1) (arXiv:2203.02155's choice).
        dtype: of the parameters.
        options: how it computes.

    Raises:
        ConfigError: the folder's head has other scores, or the model is not supported.
        CheckpointError: the folder cannot be read.
    """
    architecture, weights = Architecture.from_folder(folder), HFFolder(folder)
    if SCORE_LAYER in weights:
        found = RewardHead.of_classifier(weights).attributes
        if found != tuple(names):
            raise ConfigError(
                [
                    f"the head of {folder} scores {', '.join(found) or 'one reward'}; this run trains "
                    f"{', '.join(names) or 'one reward'}. Set full.objective and full.attributes to it, or begin with "
                    "a language model's folder"
                ]
            )
    lm = CausalLM(architecture.as_classifier(max(len(names), 1)), mesh, dtype, options)
    if mesh.is_last_stage:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(lm.score.weight.shape, generator=generator) / (architecture.hidden_size + 1) ** 0.5
        with torch.no_grad():
            lm.score.weight.copy_(start)
    load_hf_weights(lm, weights)
    return lm


def classifier_config(
    architecture: Architecture, names: Sequence[str], pooling: str, pad_id: int | None
) -> dict[str, Any]:
    """What config.json of a classifier has besides the trunk's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return {
        "architectures": [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[architecture.raw["model_type"]]],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "problem_type": "regression",
        "pad_token_id": pad_id,
        POOLING_KEY: pooling,
    }
