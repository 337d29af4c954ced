"""Model cards: provenance and accuracy of a trained head or reward model, as metadata and README."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import reinforce_rl
from reinforce_rl.config.reward_model import TrainRewardModelConfig
from reinforce_rl.errors import CheckpointError
from reinforce_rl.reward_model.head import MAX_EARLY_TOKENS, MAX_PHRASE_TOKENS
from reinforce_rl.reward_model.objectives import Accuracy, Best
from reinforce_rl.reward_model.train_head import TrainedHead
from reinforce_rl.utils.files import write_atomically

HEAD_FILE = "head.safetensors"
CARD_FILE = "README.md"


@dataclass(frozen=True)
class PoolingResult:
    trained: TrainedHead
    train_whole: Accuracy  # whole answers of the training prompts
    held_out_whole: Accuracy  # whole answers of the held-out prompts
    held_out_cut: Accuracy  # the same, cut to `cuts.evaluate_at` tokens
    held_out_synthetic: Accuracy | None  # real answers against synthetic negatives; None without any


@dataclass(frozen=True)
class HeadReport:
    config: TrainRewardModelConfig
    trunk_sha256: str  # over its weights and config
    data_sha256: str
    skipped: dict[str, int]  # reason to number of pairs
    train_pairs: int
    train_prompts: int
    held_out_pairs: int
    held_out_prompts: int
    baseline_whole: Accuracy  # held-out accuracy of "the longer answer wins"
    baseline_cut: Accuracy
    results: dict[str, PoolingResult]  # pooling to result
    pooling: str  # the one whose head is written
    command: str  # how the run was started
    seconds: float  # wall time of the run

    @property
    def best(self) -> PoolingResult:
        return self.results[self.pooling]

    def table(self) -> list[tuple[str, ...]]:
        """Return column titles, the baseline's row and one row per pooling."""
        rows: list[tuple[str, ...]] = [
            ("", "whole", f"cut to {self.config.cuts.evaluate_at}", "above made", "CV acc.", "CV loss"),
            ("longer answer wins", str(self.baseline_whole), str(self.baseline_cut), "", "", ""),
        ]
        for pooling, result in self.results.items():
            mark = " (written)" if pooling == self.pooling else ""
            folds = result.trained.chosen_validation
            measured = ("", "") if math.isnan(folds.loss) else (f"{folds.accuracy:.3f}", f"{folds.loss:.4f}")
            accuracies = (result.held_out_whole, result.held_out_cut, result.held_out_synthetic or "")
            rows.append((f"{pooling}{mark}", *map(str, accuracies), *measured))
        return rows

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the head's file; safetensors allows only strings."""
        best = self.best
        return {
            "trunk": _folder_name(self.config),
            "trunk_sha256": self.trunk_sha256,
            "data_file": _data_name(self.config),
            "data_sha256": self.data_sha256,
            "train_pairs": str(self.train_pairs),
            "held_out_pairs": str(self.held_out_pairs),
            "held_out_accuracy": str(best.held_out_whole),
            f"held_out_accuracy_at_{self.config.cuts.evaluate_at}_tokens": str(best.held_out_cut),
            "l2": f"{best.trained.l2:g}",
            "raw_mean": f"{best.trained.raw_mean:.6g}",
            "raw_std": f"{best.trained.raw_std:.6g}",
            "package_version": reinforce_rl.__version__,
        }

    def card(self) -> str:
        best, cfg = self.best, self.config
        trunk, data_file, cut = _folder_name(cfg), _data_name(cfg), cfg.cuts.evaluate_at
        pooled = "mean of the last layer's hidden states" if self.pooling == "mean" else "last token's hidden state"
        skipped = "; ".join(f"{count}: {reason}" for reason, count in self.skipped.items()) or "none"
        titles, *rows = self.table()
        table = "\n".join(f"| {' | '.join(row)} |" for row in (titles, ("---",) * len(titles), *rows))
        return f"""# Reward head on {trunk}

A linear layer on the {pooled} of a frozen trunk, `{HEAD_FILE}`. It is of use with this
trunk alone: `{trunk}`, sha256 of weights and config `{self.trunk_sha256[:16]}`.

- **Trained on** {self.train_pairs} preference pairs of {self.train_prompts} prompts from `{data_file}` (sha256
  `{self.data_sha256[:16]}`), by Bradley-Terry loss with L2 {best.trained.l2:g}, chosen by cross-validation on them.
- **Held out** {self.held_out_pairs} pairs of {self.held_out_prompts} prompts; no prompt is on both sides.
- **Pairs left out**: {skipped}.
- **Answers**: {_describe_cuts(cfg)}.
- **Made answers**: {_describe_synthetic(cfg)}.
- **Scores** have mean 0 and standard deviation 1 over the training answers (before: {best.trained.raw_mean:.3f} and
  {best.trained.raw_std:.3f}, in log-odds).
- **Made by** reinforce_rl {reinforce_rl.__version__} in {self.seconds:.0f} s:

```
{self.command}
```

Share of held-out pairs ordered rightly, ± one standard error, on whole answers and on answers cut to
{cut} tokens; how often a real answer is above a made one; and cross-validation inside the training pairs
(CV, whole and cut answers together; a loss of 0.6931 nats is a guess), by which pooling and L2 strength are chosen
where there is a choice.

{table}

On its own training pairs the head reaches {best.train_whole}.
"""


def write_head(report: HeadReport, folder: str | Path) -> Path:
    """Write the head and its card into a folder; return the head's path.

    Raises:
        CheckpointError: they cannot be written.
    """
    folder = Path(folder)
    path = folder / HEAD_FILE
    part = folder / f".{HEAD_FILE}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.best.trained.head.save(part, report.metadata())
        part.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(part, path)
        write_atomically(folder / CARD_FILE, report.card())
    except OSError as error:
        raise CheckpointError(f"cannot write the reward head to {folder}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def full_card(
    cfg: TrainRewardModelConfig, best: Best, names: tuple[str, ...], sizes: tuple[int, int], command: str
) -> str:
    """Return the README of a fully trained reward model.

    `names` is empty for a single score; `sizes` are the numbers of training and held-out examples.
    """
    metrics, (train, held_out) = best.evaluation.metrics, sizes
    kind = "rated answers, by squared error" if names else "preference pairs, by Bradley-Terry loss"
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in metrics.items())
    if names:
        scores = f"Its scores are {', '.join(names)}, in the units of the ratings."
        options = f"'reward_model.attribute_weights={{{', '.join(f'{name}: 1.0' for name in names)}}}'"
    else:
        scores = (
            "Its score has the scale of log-odds: sigmoid of a difference of two is the probability that the "
            "first answer is preferred."
        )
        mean, deviation = metrics["score_mean"], metrics["score_deviation"]
        options = f"reward_model.mean={mean:.4f} reward_model.deviation={deviation:.4f}"
    if cfg.full.pooling == "last":
        pooling = "The score is read from the last token that is no padding, as transformers does."
    else:
        pooling = (
            "**The score is read from the mean of all hidden states** (`reward_pooling` in config.json), which "
            "this project's server knows and transformers does not: there the scores are other ones."
        )
    return f"""# Reward model from {_folder_name(cfg)}

All weights and a linear head, trained on {train} {kind}, from `{_data_name(cfg)}`.
{scores} {pooling}

Best on {held_out} held-out examples after step {best.step}: loss {best.evaluation.loss:.4f}. No prompt is on both
sides.

| | held out |
|---|---|
{rows}

Serve it:

```
python examples/serve_reward_model.py reward_model.restore_from_path=FOLDER \\
    {options}
```

Made by reinforce_rl {reinforce_rl.__version__}:

```
{command}
```
"""


def sha256_of_file(path: str | Path) -> str:
    """Return the sha256 (hex) of a file, as `sha256sum` prints it.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def sha256_of_files(paths: Iterable[Path]) -> str:
    """Return the sha256 (hex) over the names and hashes of files, sorted by name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    lines = (f"{sha256_of_file(path)}  {path.name}\n" for path in sorted(paths, key=lambda item: item.name))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _folder_name(cfg: TrainRewardModelConfig) -> str:
    return Path(cfg.model.restore_from_path).resolve().name


def _data_name(cfg: TrainRewardModelConfig) -> str:
    return Path(cfg.data.ratings_path or cfg.data.pairs_path or "").name


def _describe_cuts(cfg: TrainRewardModelConfig) -> str:
    cuts, limit = cfg.cuts, cfg.data.max_answer_tokens
    whole = "whole" if limit is None else f"the first {limit} tokens"
    if not cuts.per_pair:
        return whole
    return (
        f"{whole}, and {cuts.per_pair} beginnings of each pair's answers, of {cuts.min_tokens} to {cuts.max_tokens} "
        "tokens drawn evenly, the same for both (an answer that is shorter stays whole)"
    )


def _describe_synthetic(cfg: TrainRewardModelConfig) -> str:
    if not cfg.degenerate.fraction:
        return "none"
    return (
        f"for {cfg.degenerate.fraction:.0%} of the pairs, one that ends at once or after up to {MAX_EARLY_TOKENS} "
        f"tokens and one that repeats a phrase of up to {MAX_PHRASE_TOKENS}, each to be scored below the pair's own"
    )
