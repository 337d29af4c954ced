"""A reward head on a frozen trunk: features of whole, cut and synthetic answers, and its fit.

A decoder is causal: one pass over the whole answer also gives the states of each of its prefixes.
The loss of P pairs is the mean of -log sigmoid(s_chosen - s_rejected), plus l2 / 2 * |w|^2. It is
convex and the data fit in memory, so it is minimised to convergence in float64: the result depends
on neither seed nor batch order.

Notation: N sequences, C cuts of all sequences together, S tokens, P pairs, h hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from reinforce_rl.config.reward_model import PrefixesConfig
from reinforce_rl.errors import CheckpointError, DataError, key_of
from reinforce_rl.megatron.model.reward_head import RewardHead, pool
from reinforce_rl.megatron.weight_files import find_weight_files
from reinforce_rl.reward_model.data import EncodedPair
from reinforce_rl.reward_model.objectives import Accuracy, pair_accuracy
from reinforce_rl.utils.files import naming, not_written
from reinforce_rl.utils.untrusted_files import check_regular, open_regular

MAX_EARLY_TOKENS = 3
MAX_PHRASE_TOKENS = 4
# Views of an answer; the views that are cut for training follow.
WHOLE = 0
CUT = 1  # for evaluation
_FEATURES = "features"  # the tensor in the file


# Features


@dataclass(frozen=True)
class CutSequence:
    tokens: tuple[int, ...]
    cuts: tuple[int, ...]  # prefix lengths to pool at


def cut_sequences(
    pairs: Sequence[EncodedPair], prefixes: PrefixesConfig, seed: int
) -> list[CutSequence]:
    """Cut chosen and rejected answers, pair-major, at the same `2 + prefixes.per_pair` lengths."""
    rng = random.Random(seed)
    sequences = []
    for pair in pairs:
        drawn = [
            rng.randint(prefixes.min_tokens, prefixes.max_tokens) for _ in range(prefixes.per_pair)
        ]
        for answer in (pair.chosen, pair.rejected):
            lengths = [
                len(answer),
                *(min(cut, len(answer)) for cut in (prefixes.evaluate_at, *drawn)),
            ]
            sequences.append(
                CutSequence(pair.prompt + answer, tuple(len(pair.prompt) + n for n in lengths))
            )
    return sequences


@dataclass(frozen=True)
class SyntheticNegative:
    pair: int  # index of the source pair
    tokens: tuple[int, ...]  # of the answer
    better: int  # 0: compared with the pair's chosen answer, 1: with the rejected one


def synthetic_negatives(
    pairs: Sequence[EncodedPair],
    fraction: float,
    prefixes: PrefixesConfig,
    *,
    end: Sequence[int],
    seed: int,
) -> list[SyntheticNegative]:
    """Make two negatives for a share of the pairs: an early end and a repeated phrase.

    Preference data lacks such answers, and a policy that optimises the reward finds them: a head
    trained on the data alone may score them above sensible answers. Chosen and rejected alternate
    as the better answer, so that their order is not affected.

    `fraction` (0 to 1, rounded) is the share of pairs. A repetition has `prefixes.min_tokens` to
    `prefixes.max_tokens` tokens, drawn uniformly, and no end of the turn (the tokens `end`).
    """
    rng = random.Random(seed)
    drawn = sorted(rng.sample(range(len(pairs)), round(fraction * len(pairs))))
    made = []
    for number, index in enumerate(drawn):
        answers = [
            _without_end(answer, end) for answer in (pairs[index].chosen, pairs[index].rejected)
        ]
        # `kept` is 0 in two of five draws: a policy first finds the end of the turn alone.
        kept = max(0, rng.randint(-1, MAX_EARLY_TOKENS))
        early = (*rng.choice(answers)[:kept], *end)
        made.append(SyntheticNegative(index, early, number % 2))
        words = rng.choice(answers)
        if words:
            start = rng.choice((0, rng.randrange(len(words))))
            phrase = words[start : start + rng.randint(1, MAX_PHRASE_TOKENS)]
            length = rng.randint(prefixes.min_tokens, prefixes.max_tokens)
            made.append(SyntheticNegative(index, (phrase * length)[:length], (number + 1) % 2))
    return made


def _without_end(answer: tuple[int, ...], end: Sequence[int]) -> tuple[int, ...]:
    return answer[: -len(end)] if end and answer[-len(end) :] == tuple(end) else answer


@torch.no_grad()
def pooled_features(
    trunk: Callable[[Tensor], Tensor],
    sequences: Sequence[CutSequence],
    pooling: str,
    micro_batch_size: int = 8,
    *,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """Pool every cut of every sequence, with one pass of the trunk (in eval mode) per sequence.

    Returns float32 [C, h] on the CPU, in the order of the sequences and of their cuts.

    Args:
        trunk: maps int64 [n, S], right-padded, to hidden states [n, S, h].
        pooling: one of `reward_head.POOLINGS`.
        micro_batch_size: sequences per pass; sequences of similar length are batched.
        on_progress: called after each pass with its number of tokens.
    """
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence.cuts))
    features = None
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i].tokens), i))
    for first in range(0, len(order), micro_batch_size):
        rows = order[first : first + micro_batch_size]
        batch = [sequences[i] for i in rows]
        token_rows = [torch.tensor(sequence.tokens) for sequence in batch]
        tokens = torch.nn.utils.rnn.pad_sequence(token_rows, batch_first=True)
        hidden = trunk(tokens.to(device))
        owners = [row for row, sequence in enumerate(batch) for _ in sequence.cuts]
        lengths = [cut for sequence in batch for cut in sequence.cuts]
        positions = [starts[i] + cut for i in rows for cut in range(len(sequences[i].cuts))]
        states = hidden[torch.tensor(owners, device=hidden.device)]
        values = pool(states, torch.tensor(lengths, device=hidden.device), pooling).cpu()
        if features is None:
            features = torch.empty((starts[-1], values.shape[1]))
        features[torch.tensor(positions)] = values
        on_progress(sum(len(sequence.tokens) for sequence in batch))
    return torch.empty((0, 0)) if features is None else features


def sha256_of_file(path: str | Path) -> str:
    """Return the sha256 (hex) of a file, as `sha256sum` prints it.

    Raises:
        CheckpointError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(Path(path)) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}",
            key=key_of(error, "reward_model.file.not_readable"),
        ) from error
    return digest.hexdigest()


def sha256_of_trunk(folder: Path) -> str:
    """Return the sha256 (hex) over names and hashes of the loaded weight files and config.json."""
    paths = sorted(
        [*find_weight_files(folder).paths, folder / "config.json"], key=lambda path: path.name
    )
    return hashlib.sha256(
        "".join(f"{sha256_of_file(path)}  {path.name}\n" for path in paths).encode()
    ).hexdigest()


def features_fingerprint(trunk_sha256: str, sequences: Sequence[CutSequence], pooling: str) -> str:
    """Return the sha256 (hex) over all inputs of the features, the check of a cached file."""
    digest = hashlib.sha256(json.dumps([trunk_sha256, pooling]).encode())
    for sequence in sequences:
        digest.update(json.dumps([sequence.tokens, sequence.cuts]).encode())
    return digest.hexdigest()


def save_features(path: str | Path, features: Tensor, fingerprint: str) -> None:
    """Write features as safetensors, atomically. Raises CheckpointError if that fails."""
    from safetensors.torch import save_file

    with replaced(Path(path)) as part:
        save_file({_FEATURES: features}, part, metadata={"fingerprint": fingerprint})


def load_features(path: str | Path, fingerprint: str) -> Tensor | None:
    """Read a file of `save_features`; None if it is missing or has another fingerprint.

    Raises:
        CheckpointError: the file is damaged.
    """
    from safetensors import safe_open

    if not Path(path).is_file():
        return None
    try:
        check_regular(Path(path))
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("fingerprint") != fingerprint:
                return None
            return file.get_tensor(_FEATURES)
    except Exception as error:  # safetensors raises an undocumented type for a damaged file
        raise CheckpointError(
            f"the file of features {path} cannot be read: {error}; remove it, and a new one is "
            "made",
            key=key_of(error, "reward_model.features.not_readable"),
        ) from error


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write; then move it to `path`."""
    part = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            os.replace(part, path)
    except OSError as error:
        raise CheckpointError(
            not_written(path, error), key="reward_model.file.not_written"
        ) from error
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class PairFeatures:
    chosen: Tensor  # [P, h]
    rejected: Tensor  # [P, h]

    def __post_init__(self) -> None:
        if not (self.chosen.isfinite().all() and self.rejected.isfinite().all()):
            raise DataError(
                "the trunk's features are not finite; check that its weights are not damaged",
                key="reward_model.features.not_finite",
            )


class HeadData:
    """Features of all pairs in all views of their answers, and of the synthetic negatives.

    Args:
        features: [C, h], rows of `cut_sequences`, then a row per synthetic negative.
        num_pairs: number of pairs in `cut_sequences`.
    """

    def __init__(self, features: Tensor, num_pairs: int, negatives: Sequence[SyntheticNegative]):
        cut_rows = len(features) - len(negatives)
        # [pairs, chosen or rejected, views, h]
        self._pairs = features[:cut_rows].view(num_pairs, 2, -1, features.shape[1])
        self._negative_features = features[cut_rows:]
        self._negatives = negatives
        self.trained_views = [WHOLE, *range(CUT + 1, self._pairs.shape[2])]

    def pairs(self, rows: Sequence[int], views: Sequence[int]) -> PairFeatures:
        """Return the features of pairs in the given views, pair-major."""
        table = self._pairs[list(rows)][:, :, list(views)]
        return PairFeatures(table[:, 0].flatten(0, 1), table[:, 1].flatten(0, 1))

    def against_negatives(self, rows: Sequence[int]) -> PairFeatures | None:
        """Return cut real answers as chosen and their synthetic negatives as rejected.

        None if there are no negatives of these pairs.
        """
        wanted = set(rows)
        numbers = [i for i, negative in enumerate(self._negatives) if negative.pair in wanted]
        if not numbers:
            return None
        negatives = [self._negatives[number] for number in numbers]
        real = [self._pairs[negative.pair, negative.better, CUT] for negative in negatives]
        return PairFeatures(torch.stack(real), self._negative_features[numbers])


# The fit


@dataclass(frozen=True)
class TrainedHead:
    head: RewardHead  # standardized: training scores have mean 0 and std 1
    raw_mean: float  # of the scores before standardization, in log-odds
    raw_std: float


def scores(head: RewardHead, features: Tensor) -> Tensor:
    """Score features [n, h]; return float64 [n]."""
    return features.double() @ head.weight.double() + head.bias.double()


def head_accuracy(head: RewardHead, features: PairFeatures) -> Accuracy:
    return pair_accuracy(scores(head, features.chosen), scores(head, features.rejected))


def fit_direction(differences: Tensor, l2: float) -> Tensor:
    """Return the minimiser w, float64 [h], of mean(softplus(-differences @ w)) + l2 / 2 * |w|^2.

    `differences` [P, h] are chosen minus rejected features; `l2` is above 0, so that the minimum is
    unique.
    """
    x = differences.double()
    w = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w],
        max_iter=1000,
        tolerance_grad=1e-8,
        tolerance_change=0.0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.softplus(-(x @ w)).mean() + 0.5 * l2 * w.dot(w)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return w.detach()


def train_head(
    features: PairFeatures, pooling: str, l2: float, *, extra: PairFeatures | None = None
) -> TrainedHead:
    """Fit a head on all training pairs, and standardize it.

    Features are scaled so that chosen minus rejected has mean squared length 1: strengths of L2 are
    then comparable between trunks and poolings.

    Args:
        extra: pairs for the fit alone, not for scaling or standardization.

    Raises:
        DataError: chosen and rejected have the same features throughout.
    """
    pairs, extra_pairs, size = _scaled_differences(features, extra)
    w = fit_direction(torch.cat((pairs, extra_pairs)), l2) / size
    raw = torch.cat((features.chosen, features.rejected)).double() @ w
    mean = float(raw.mean())
    std = float(raw.std())
    if not std > 0:
        raise DataError(
            "all training answers get the same score, so chosen and rejected cannot be told apart",
            key="reward_model.scores.all_the_same",
        )
    bias = torch.tensor(-mean / std, dtype=torch.float32)
    head = RewardHead((w / std).float(), bias, pooling)
    return TrainedHead(head, mean, std)


def _scaled_differences(
    features: PairFeatures, extra: PairFeatures | None
) -> tuple[Tensor, Tensor, float]:
    """Return chosen minus rejected of both in float64, divided by a scale, and the scale."""
    pairs = features.chosen.double() - features.rejected.double()
    extra_pairs = pairs[:0] if extra is None else extra.chosen.double() - extra.rejected.double()
    size = float(pairs.square().sum(1).mean().sqrt())
    if not size > 0:
        raise DataError(
            "chosen and rejected have the same features in every pair",
            key="reward_model.features.all_the_same",
        )
    return pairs / size, extra_pairs / size, size
