"""A reward model: the actor's model class as trunk, and a linear head on a pooled hidden state.

Notation: N sequences, S tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError, ConfigError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import HFFolder, load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model import CausalLM
from reinforce_rl.megatron.schedule import forward_passes
from reinforce_rl.reward.batching import Batching, MicroBatch
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
    """This rank's part of a reward model; a `Scorer` where there is one rank, else a `BlockModel`.

    Args:
        lm: the trunk, weights loaded.
        head: the head; its width must be the trunk's.
        batching: how a call is cut.
        max_length: tokens a sequence may have; None for what the trunk was made for.
    """

    def __init__(
        self, lm: CausalLM, head: RewardHead, *, batching: Batching | None = None, max_length: int | None = None
    ):
        width = lm.architecture.hidden_size
        if head.weight.shape != (width,):
            raise ConfigError(
                [f"the reward head has shape {tuple(head.weight.shape)}, its trunk has hidden size {width}"]
            )
        self._lm, self._head, self.batching = lm.eval(), head, batching or Batching()
        if faults := self.batching.faults():
            raise ConfigError(faults)
        self.pooling = head.pooling
        self.vocab_size = lm.architecture.vocab_size
        self.max_length = min(max_length or lm.architecture.max_positions, lm.architecture.max_positions)

    def score(self, sequences: list[list[int]]) -> list[float]:
        """One score a sequence, in order. Micro-batches follow from the list's content alone."""
        micro_batches = self.batching.plan(sequences)
        scores = np.empty(len(sequences), np.float32)
        if micro_batches:
            scores[np.concatenate([one.rows for one in micro_batches])] = self.score_micro_batches(micro_batches)
        return scores.tolist()

    def score_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> np.ndarray:
        """Scores float32 [n] of all n sequences, in order; empty where this rank is not on the last stage."""
        device = self._lm.mesh.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the server calls from a thread of its own, which starts on device 0
        try:
            found = forward_passes(
                self._lm, micro_batches, lambda lm, one: lm(torch.from_numpy(one.tokens).to(device)), self._score
            )
            return torch.cat(found).cpu().numpy() if found else np.zeros(0, np.float32)
        finally:
            # Kernels that still wait for another rank would meet those of the next call.
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _score(self, hidden: Tensor, one: MicroBatch) -> Tensor:
        lengths = torch.from_numpy(one.lengths).to(hidden.device)
        pooled = pool(hidden, lengths, self._head.pooling)
        return pooled @ self._head.weight.to(hidden.device) + self._head.bias.to(hidden.device)


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
    batching: Batching | None = None,
    max_length: int | None = None,
) -> MegatronRewardModel:
    """This rank's part of a reward model from a Hugging Face trunk and a head file, ready to score."""
    head = RewardHead.load(head_file)  # first: a missing file should not cost the time of loading a trunk
    return MegatronRewardModel(load_trunk(trunk_folder, mesh), head, batching=batching, max_length=max_length)
