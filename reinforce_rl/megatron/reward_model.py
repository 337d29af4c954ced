"""A reward model: the actor's model class as trunk, and a linear head on a pooled hidden state.

Notation: N sequences, S tokens, h hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError, ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import HFFolder, load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.rollout import length_mask

POOLINGS = ("mean", "last")


@dataclass(frozen=True)
class RewardHead:
    """What turns a pooled hidden state into a score.

    Attributes:
        weight: float32 [h].
        bias: float32 [], added to every score.
        pooling: `mean` over all tokens of the sequence, or the `last` token's hidden state.
    """

    weight: Tensor
    bias: Tensor
    pooling: str

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ConfigError([f"pooling is {self.pooling!r}; expected one of {', '.join(POOLINGS)}"])

    def save(self, path: str | Path, about: dict[str, str] | None = None) -> None:
        """Write as safetensors, the pooling and anything in `about` in its metadata."""
        from safetensors.torch import save_file

        tensors = {"weight": self.weight.float().contiguous(), "bias": self.bias.float().contiguous()}
        save_file(tensors, path, metadata={**(about or {}), "pooling": self.pooling})

    @classmethod
    def load(cls, path: str | Path) -> RewardHead:
        """Inverse of `save`.

        Raises:
            CheckpointError: no such file, or not a head.
        """
        from safetensors import safe_open

        if not Path(path).is_file():
            raise CheckpointError(f"reward head {path} does not exist; examples/train_reward_model.py writes one")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                return cls(file.get_tensor("weight"), file.get_tensor("bias"), metadata["pooling"])
        except ConfigError:
            raise
        except Exception as error:  # safetensors raises its own, undocumented type for a damaged file
            raise CheckpointError(
                f"{path} is not a reward head (safetensors with weight, bias, pooling): {error}"
            ) from error


def pool(hidden: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Hidden states [N, S, h] of right-padded sequences and lengths int64 [N] to float32 [N, h]."""
    hidden = hidden.float()
    if pooling == "last":
        return hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
    mask = length_mask(lengths, hidden.shape[1])[:, :, None]
    return (hidden * mask).sum(1) / lengths[:, None]


class MegatronRewardModel:
    """A `Scorer`: scores token sequences in micro-batches of similar length.

    Args:
        lm: the trunk, weights loaded.
        head: the head; its width must be the trunk's.
        micro_batch_size: sequences a forward pass.
        max_length: tokens a sequence may have; None for what the trunk was made for.
    """

    def __init__(self, lm: CausalLM, head: RewardHead, *, micro_batch_size: int, max_length: int | None = None):
        width = lm.architecture.hidden_size
        if head.weight.shape != (width,):
            raise ConfigError(
                [f"the reward head has shape {tuple(head.weight.shape)}, its trunk has hidden size {width}"]
            )
        if micro_batch_size < 1:
            raise ConfigError([f"micro_batch_size is {micro_batch_size}; expected at least 1"])
        self._lm, self._head, self._micro_batch_size = lm.eval(), head, micro_batch_size
        self.pooling = head.pooling
        self.vocab_size = lm.architecture.vocab_size
        self.max_length = min(max_length or lm.architecture.max_positions, lm.architecture.max_positions)

    def score(self, sequences: list[list[int]]) -> list[float]:
        """One score a sequence, in order. Micro-batches follow from the list's content alone."""
        order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i]), i))
        scores = [float("nan")] * len(sequences)
        for start in range(0, len(order), self._micro_batch_size):
            rows = order[start : start + self._micro_batch_size]
            for row, score in zip(rows, self._score_batch([sequences[i] for i in rows]), strict=True):
                scores[row] = score
        return scores

    @torch.no_grad()
    def _score_batch(self, sequences: list[list[int]]) -> list[float]:
        device = self._lm.mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the server calls from a thread of its own, which starts on device 0
        lengths = torch.tensor([len(s) for s in sequences], device=device)
        tokens = torch.zeros((len(sequences), int(lengths.max())), dtype=torch.long, device=device)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = torch.tensor(sequence)
        pooled = pool(self._lm(tokens), lengths, self._head.pooling)
        return (pooled @ self._head.weight.to(device) + self._head.bias.to(device)).tolist()


def load_trunk(folder: str | Path, mesh: Mesh) -> CausalLM:
    """The model of a Hugging Face folder, weights loaded."""
    lm = CausalLM(Architecture.from_folder(folder), mesh)
    load_hf_weights(lm, HFFolder(folder))
    return lm


def load_reward_model(
    trunk_folder: str | Path,
    head_file: str | Path,
    mesh: Mesh,
    *,
    micro_batch_size: int = 8,
    max_length: int | None = None,
) -> MegatronRewardModel:
    """A reward model from a Hugging Face trunk and a head file, ready to score."""
    head = RewardHead.load(head_file)  # first: a missing file should not cost the time of loading a trunk
    return MegatronRewardModel(
        load_trunk(trunk_folder, mesh), head, micro_batch_size=micro_batch_size, max_length=max_length
    )
