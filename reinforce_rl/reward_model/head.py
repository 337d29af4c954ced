"""Training data of a reward head: pooled hidden states of a frozen trunk, over whole, cut and synthetic answers.

A decoder is causal: one pass over the whole answer also gives the states of each of its prefixes.

Notation: N sequences, C cuts of all sequences together, S tokens, P pairs, h hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reinforce_rl.config.reward_model import CutsConfig
from reinforce_rl.errors import CheckpointError, ConfigError, DataError
from reinforce_rl.megatron.model.reward_head import pool
from reinforce_rl.reward_model.data import EncodedPair

Trunk = Callable[[Tensor], Tensor]
"""int64 [n, S], right-padded, to hidden states [n, S, h]."""

MAX_EARLY_TOKENS = 3
MAX_PHRASE_TOKENS = 4
WHOLE, CUT = 0, 1  # views of an answer: whole, and cut for evaluation; then those cut for training


@dataclass(frozen=True)
class CutSequence:
    tokens: tuple[int, ...]
    cuts: tuple[int, ...]  # prefix lengths to pool at


def cut_sequences(pairs: Sequence[EncodedPair], cuts: CutsConfig, seed: int) -> list[CutSequence]:
    """Cut chosen and rejected of each pair, pair-major, both at the same `2 + cuts.per_pair` lengths."""
    rng = random.Random(seed)
    sequences = []
    for pair in pairs:
        drawn = [rng.randint(cuts.min_tokens, cuts.max_tokens) for _ in range(cuts.per_pair)]
        for answer in (pair.chosen, pair.rejected):
            lengths = [len(answer), *(min(cut, len(answer)) for cut in (cuts.evaluate_at, *drawn))]
            sequences.append(CutSequence(pair.prompt + answer, tuple(len(pair.prompt) + n for n in lengths)))
    return sequences


@dataclass(frozen=True)
class SyntheticNegative:
    pair: int  # index of the source pair
    tokens: tuple[int, ...]  # of the answer
    better: int  # 0: compared with the pair's chosen answer, 1: with the rejected one


def synthetic_negatives(
    pairs: Sequence[EncodedPair], fraction: float, *, end_id: int, min_tokens: int, max_tokens: int, seed: int
) -> list[SyntheticNegative]:
    """Make two negatives for a share of the pairs: one that ends early and one that repeats a phrase.

    Preference data lacks such answers, and a policy that optimises the reward finds them: a head trained on the data
    alone may score them above sensible answers. Chosen and rejected alternate as the better answer, which keeps their
    order unaffected.

    `fraction` (0 to 1, rounded) is the share of pairs. A repetition has `min_tokens` to `max_tokens` tokens, drawn
    uniformly, and no end-of-turn token (`end_id`).
    """
    rng = random.Random(seed)
    drawn = sorted(rng.sample(range(len(pairs)), round(fraction * len(pairs))))
    made = []
    for number, index in enumerate(drawn):
        answers = (pairs[index].chosen, pairs[index].rejected)
        # kept is 0 in two of five draws: the end-of-turn token alone, which a policy finds first.
        kept = max(0, rng.randint(-1, MAX_EARLY_TOKENS))
        early = (*(t for t in rng.choice(answers)[:kept] if t != end_id), end_id)
        made.append(SyntheticNegative(index, early, number % 2))
        words = tuple(t for t in rng.choice(answers) if t != end_id)
        if words:
            start = rng.choice((0, rng.randrange(len(words))))
            phrase = words[start : start + rng.randint(1, MAX_PHRASE_TOKENS)]
            length = rng.randint(min_tokens, max_tokens)
            made.append(SyntheticNegative(index, (phrase * length)[:length], (number + 1) % 2))
    return made


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
    """Pool every cut of every sequence, with one pass of the trunk (in eval mode) per sequence.

    Returns pooling to float32 [C, h] on the CPU, in the order of the sequences and of their cuts.

    Args:
        poolings: from `reward_head.POOLINGS`.
        micro_batch_size: sequences per pass; sequences of similar length are batched.
        on_progress: called after each pass with its number of tokens.
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
    """Return the sha256 (hex) over all inputs of the features, to validate a cached file."""
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
    """Read a file of `save_features`; None if it is absent or its fingerprint differs.

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


@dataclass(frozen=True)
class PairFeatures:
    chosen: Tensor  # [P, h]
    rejected: Tensor  # [P, h]
    keys: tuple[str, ...]  # prompt keys; pairs of one prompt stay together in every split

    def __post_init__(self) -> None:
        if self.chosen.shape != self.rejected.shape or len(self.keys) != len(self.chosen):
            raise ConfigError(
                [
                    f"chosen {tuple(self.chosen.shape)}, rejected {tuple(self.rejected.shape)} and "
                    f"{len(self.keys)} keys do not belong together; expected [P, h] twice and P keys"
                ]
            )
        if not (self.chosen.isfinite().all() and self.rejected.isfinite().all()):
            raise DataError("the trunk gave features that are not finite; are its weights damaged?")


class HeadData:
    """Features of one pooling: all pairs in all views of their answers, and the synthetic negatives.

    `features` [C, h] are of `cut_sequences`, then one row per synthetic negative; `keys` are the pairs' prompt keys.
    """

    def __init__(self, features: Tensor, keys: Sequence[str], made: Sequence[SyntheticNegative]):
        real = len(features) - len(made)
        # [pairs, chosen or rejected, views, h]
        self._pairs = features[:real].view(len(keys), 2, -1, features.shape[1])
        self._made_features, self._made, self._keys = features[real:], made, keys
        self.trained_views = [WHOLE, *range(CUT + 1, self._pairs.shape[2])]

    def pairs(self, rows: Sequence[int], views: Sequence[int]) -> PairFeatures:
        """Return the features of pairs in the given views, pair-major."""
        table = self._pairs[list(rows)][:, :, list(views)]
        keys = tuple(self._keys[row] for row in rows for _ in views)
        return PairFeatures(table[:, 0].flatten(0, 1), table[:, 1].flatten(0, 1), keys)

    def against_made(self, rows: Sequence[int]) -> PairFeatures | None:
        """Return cut real answers as chosen and their synthetic negatives as rejected; None without negatives."""
        wanted = set(rows)
        numbers = [number for number, item in enumerate(self._made) if item.pair in wanted]
        if not numbers:
            return None
        made = [self._made[number] for number in numbers]
        real = torch.stack([self._pairs[item.pair, item.better, CUT] for item in made])
        return PairFeatures(real, self._made_features[numbers], tuple(self._keys[item.pair] for item in made))
