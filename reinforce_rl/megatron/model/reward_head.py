"""Head of a reward model: pooling, one or two linear layers, and its files.

Notation: N sequences, S tokens, s positions on a context-parallel rank, h hidden, K attributes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError, ConfigError, Fault, key_of
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.model.attention import sum_of_shares
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.model.stored_head import (
    ACTIVATIONS,
    SCORE,
    Layer,
    activation_of,
    layers_in,
    layers_of,
    module_name,
    module_of,
    read_tensors,
)
from reinforce_rl.megatron.weight_map import SCORE_LAYER
from reinforce_rl.utils.untrusted_files import check_regular

POOLINGS = ("mean", "last")
# Key of a classifier's config.json, if the pooling is not transformers'.
POOLING_KEY = "reward_pooling"


@dataclass(frozen=True)
class HiddenLayer:
    """Layer before a head's last layer, as in Qwen2.5-Math-RM."""

    weight: Tensor  # float32 [m, h]
    bias: Tensor  # float32 [m]
    activation: str  # of `ACTIVATIONS`

    def __call__(self, pooled: Tensor) -> Tensor:
        """Map [N, h] to [N, m]."""
        weight = self.weight.to(pooled)
        bias = self.bias.to(pooled)
        return ACTIVATIONS[self.activation](pooled @ weight.t() + bias)


@dataclass(frozen=True)
class RewardHead:
    """Linear head from a pooled hidden state to one score, or to one score per attribute.

    After a hidden layer, h is m.
    """

    weight: Tensor  # float32 [h], or [K, h] with attributes
    bias: Tensor  # float32 [], or [K]
    pooling: str  # `mean` over tokens, or `last` token
    attributes: tuple[str, ...] = ()  # K names; empty for a single score
    # Mean and std of merged scores, the server's default for standardization.
    mean: float = 0.0
    std: float = 1.0
    # Trailing tokens of this id are ignored, as in transformers; None counts every token.
    pad_id: int | None = None
    hidden: HiddenLayer | None = None
    name: str = SCORE  # module in the folder's weights

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            sentence = f"pooling is {self.pooling!r}; expected one of {', '.join(POOLINGS)}"
            raise ConfigError([Fault(sentence, key="reward_model.head.other_pooling")])
        rows = (len(self.attributes),) if self.attributes else ()
        if self.weight.shape[:-1] != rows or self.bias.shape != rows:
            shapes = f"weights {tuple(self.weight.shape)}, a bias {tuple(self.bias.shape)}"
            names = f"{len(self.attributes)} names of attributes"
            expected = "(h) and () with no name, or (K, h) and (K) with K names"
            sentence = f"the reward head has {shapes} and {names}; expected {expected}"
            raise ConfigError([Fault(sentence, key="reward_model.head.other_shapes")])

    @property
    def rows(self) -> Tensor:
        """The weight as [K, h]; K = 1 for a single score."""
        return self.weight.reshape(-1, self.weight.shape[-1])

    @property
    def width(self) -> int:
        """Size of the hidden state that the head reads."""
        first = self.rows if self.hidden is None else self.hidden.weight
        return first.shape[1]

    def save(self, path: str | Path, about: dict[str, str] | None = None) -> None:
        """Write the head as safetensors, with its other fields and `about` in the metadata."""
        from safetensors.torch import save_file

        if self.hidden is not None:
            raise NotImplementedError(
                "a head with a hidden layer is read from a model's folder, and not written"
            )
        tensors = {
            "weight": self.weight.float().contiguous(),
            "bias": self.bias.float().contiguous(),
        }
        fields = {"pooling": self.pooling}
        if self.attributes:
            fields["attributes"] = json.dumps(self.attributes)
        if (self.mean, self.std) != (0.0, 1.0):
            fields |= {"mean": repr(self.mean), "std": repr(self.std)}
        save_file(tensors, path, metadata={**(about or {}), **fields})

    @classmethod
    def load(cls, path: str | Path) -> RewardHead:
        """Read a head that `save` wrote. Raises CheckpointError if it is missing or not a head."""
        from safetensors import safe_open

        if not Path(path).is_file():
            raise CheckpointError(
                f"reward head {path} does not exist; `reinforce-rl train-rm` writes one",
                key="reward_model.head.no_file",
            )
        try:
            check_regular(Path(path))
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if "deviation" in metadata:
                    raise CheckpointError(
                        f"{path} was written by a version before 0.1.0, whose key deviation is "
                        "now std; train the head again, or rename the key in its metadata",
                        key="reward_model.head.old_metadata",
                    )
                return cls(
                    file.get_tensor("weight"),
                    file.get_tensor("bias"),
                    metadata["pooling"],
                    tuple(json.loads(metadata.get("attributes", "[]"))),
                    float(metadata.get("mean", 0.0)),
                    float(metadata.get("std", 1.0)),
                )
        except (ConfigError, CheckpointError):
            raise
        except Exception as error:  # safetensors raises an undocumented type for a damaged file
            expected = "safetensors with weight, bias, pooling"
            raise CheckpointError(
                f"{path} is not a reward head ({expected}): {error}",
                key=key_of(error, "reward_model.head.not_readable"),
            ) from error

    @classmethod
    def from_classifier(
        cls, folder: HFFolder, name: str | None = None, activation: str | None = None
    ) -> RewardHead:
        """Read the head of a folder, with attributes from `id2label`.

        Args:
            name: of the head's module or weight; None for `score` of a
                `...ForSequenceClassification` model, or the module that config.json names.
            activation: between two layers; None if there is one layer, or if the model's class
                determines it.

        Raises CheckpointError: there is no such head, or its structure is unknown.
        """
        from transformers import CONFIG_MAPPING

        module = module_of(folder, name)
        layers = layers_of(folder, module)
        # `from_folder` checks its bounds, as transformers makes a list with its number of labels.
        raw = Architecture.from_folder(folder.folder).raw
        config: Any = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        labels = tuple(str(config.id2label[label]) for label in sorted(config.id2label))
        if len(labels) != len(layers[-1].weight):
            if SCORE_LAYER in folder and module == SCORE:
                raise CheckpointError(
                    f"{folder.folder}: {SCORE_LAYER} has {len(layers[-1].weight)} rows, "
                    f"but id2label in config.json has {len(labels)} names",
                    key="reward_model.head.other_labels",
                )
            # config.json is not a classifier's.
            labels = unnamed_labels(len(layers[-1].weight))
        # Other frameworks read the last token of a row, whatever its id.
        pooling = raw.get(POOLING_KEY, "last")
        pad_id = config.pad_token_id if pooling == "last" and module == SCORE else None
        hidden = _hidden_layer(layers, activation, folder.folder, module)
        return cls._of_layer(layers[-1], pooling, labels, pad_id, hidden, module)

    @classmethod
    def from_file(
        cls, path: str | Path, name: str, folder: str | Path, activation: str | None = None
    ) -> RewardHead:
        """Read the module `name` of a file that another framework wrote.

        `folder` is the folder of the model's weights.
        """
        module = module_name(name)
        layers = layers_in(read_tensors(Path(path)), module, str(path))
        hidden = _hidden_layer(layers, activation, Path(folder), module)
        labels = unnamed_labels(len(layers[-1].weight))
        return cls._of_layer(layers[-1], "last", labels, None, hidden, module)

    @classmethod
    def _of_layer(
        cls,
        layer: Layer,
        pooling: str,
        labels: tuple[str, ...],
        pad_id: int | None,
        hidden: HiddenLayer | None,
        name: str,
    ) -> RewardHead:
        if len(labels) == 1:
            return cls(
                layer.weight[0], layer.bias[0], pooling, pad_id=pad_id, hidden=hidden, name=name
            )
        return cls(
            layer.weight, layer.bias, pooling, labels, pad_id=pad_id, hidden=hidden, name=name
        )


def unnamed_labels(count: int) -> tuple[str, ...]:
    """Return transformers' names of labels without names."""
    return tuple(f"LABEL_{number}" for number in range(count))


def _hidden_layer(
    layers: tuple[Layer, ...], activation: str | None, folder: Path, module: str
) -> HiddenLayer | None:
    between = activation_of(layers, activation, folder, module)
    if between is None:
        return None
    return HiddenLayer(layers[0].weight, layers[0].bias, between)


def counted_lengths(tokens: Tensor, lengths: Tensor, pad_id: int | None) -> Tensor:
    """Return lengths without trailing `pad_id` tokens, at least 1; unchanged if `pad_id` is None.

    transformers' classifiers read the last token that is not `pad_token_id`, even if a trailing
    `pad_token_id` is real text (an end-of-sequence token that doubles as padding). tokens int64
    [N, S], right-padded with anything; lengths int64 [N].
    """
    if pad_id is None:
        return lengths
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    counts = (tokens != pad_id) & (positions < lengths[:, None])
    return torch.where(counts, positions, 0).amax(1) + 1


def pool(hidden: Tensor, lengths: Tensor, pooling: str, positions: Tensor | None = None) -> Tensor:
    """Return this rank's share of the pooled hidden states.

    Sum the shares over context-parallel ranks.

    hidden [N, s, h], lengths int64 [N], to [N, h] in at least float32. `positions`, int64 [s], are
    the positions of `hidden`; None for 0 .. s-1.
    """
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if positions is None:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
    if pooling == "last":
        return (hidden * (positions == lengths[:, None] - 1)[:, :, None]).sum(1)
    return (hidden * (positions < lengths[:, None])[:, :, None]).sum(1) / lengths[:, None]


def head_scores(
    hidden: Tensor,
    lm: CausalLM,
    weight: Tensor,
    lengths: Tensor,
    width: int,
    pooling: str,
    hidden_layer: HiddenLayer | None = None,
) -> Tensor:
    """Compute scores [N, K] without bias, with gradient, on every rank.

    A collective call over context parallelism. hidden [N, s, h] on the last stage, weight [K, h],
    lengths int64 [N]; `width` is S, the number of tokens given to `lm`.
    """
    pooled = pool(hidden, lengths, pooling, lm.own_positions(width))
    is_shared = lm.mesh.cp_size > 1
    if hidden_layer is not None:
        whole = sum_of_shares(pooled, lm.mesh.cp_group) if is_shared else pooled
        return hidden_layer(whole) @ weight.to(pooled.dtype).t()
    share = pooled @ weight.to(pooled.dtype).t()
    return sum_of_shares(share, lm.mesh.cp_group) if is_shared else share
