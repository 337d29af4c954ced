"""Pooled hidden states of a frozen trunk: what a reward head is trained on.

A decoder is causal, so one pass over a sequence gives the states of each of its beginnings too. An answer that was cut
after k tokens costs nothing more than the whole answer.

Notation: N sequences, C cuts of all sequences together, S tokens, h hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.model.reward_head import pool

Trunk = Callable[[Tensor], Tensor]
"""int64 [n, S], right-padded, to hidden states [n, S, h]."""


@dataclass(frozen=True)
class CutSequence:
    """A sequence, and the lengths at which it is to be pooled.

    Attributes:
        tokens: the whole sequence.
        cuts: numbers of leading tokens, each from 1 to `len(tokens)`.
    """

    tokens: tuple[int, ...]
    cuts: tuple[int, ...]


@torch.no_grad()
def pooled_features(
    trunk: Trunk,
    sequences: Sequence[CutSequence],
    poolings: Sequence[str],
    *,
    micro_batch_size: int = 8,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, Tensor]:
    """Pool every cut of every sequence in every way, with one pass of the trunk over each sequence.

    Args:
        trunk: in eval mode.
        sequences: N of them.
        poolings: of `reward_model.POOLINGS`.
        micro_batch_size: sequences a pass; sequences of similar length go together.
        device: the trunk's.
        on_progress: called after each pass with the tokens it covered.

    Returns:
        pooling to float32 [C, h] on the CPU, in the order of the sequences and of their cuts.
    """
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence.cuts))
    features: dict[str, Tensor] = {}
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i].tokens), i))
    for first in range(0, len(order), micro_batch_size):
        rows = order[first : first + micro_batch_size]
        batch = [sequences[i] for i in rows]
        tokens = torch.zeros((len(rows), max(len(s.tokens) for s in batch)), dtype=torch.long)
        for row, sequence in enumerate(batch):
            tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        hidden = trunk(tokens.to(device))
        owners = torch.tensor([row for row, s in enumerate(batch) for _ in s.cuts], device=hidden.device)
        lengths = torch.tensor([cut for s in batch for cut in s.cuts], device=hidden.device)
        places = torch.tensor([starts[i] + k for i in rows for k in range(len(sequences[i].cuts))])
        for pooling in poolings:
            values = pool(hidden[owners], lengths, pooling).cpu()
            out = features.setdefault(pooling, torch.empty((starts[-1], values.shape[1])))
            out[places] = values
        on_progress(sum(len(s.tokens) for s in batch))
    return features


def features_fingerprint(trunk_sha256: str, sequences: Sequence[CutSequence], poolings: Sequence[str]) -> str:
    """sha256 (hex) over all that the features follow from, by which a file of features is recognised."""
    digest = hashlib.sha256(json.dumps([trunk_sha256, list(poolings)]).encode())
    for sequence in sequences:
        digest.update(json.dumps([sequence.tokens, sequence.cuts]).encode())
    return digest.hexdigest()


def save_features(path: str | Path, features: dict[str, Tensor], fingerprint: str) -> None:
    """Write features as safetensors, atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    from safetensors.torch import save_file

    path = Path(path)
    part = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(features, part, metadata={"fingerprint": fingerprint})
        os.replace(part, path)
    except OSError as error:
        raise CheckpointError(f"features file {path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def load_features(path: str | Path, fingerprint: str) -> dict[str, Tensor] | None:
    """Features that `save_features` wrote; None where there is no such file or it was made from other data.

    Raises:
        CheckpointError: the file is damaged.
    """
    from safetensors import safe_open

    if not Path(path).is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("fingerprint") != fingerprint:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own, undocumented type for a damaged file
        raise CheckpointError(f"features file {path} cannot be read: {error}; remove it to make a new one") from error
