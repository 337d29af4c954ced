"""What a trained reward head says of itself: metadata in its file, and a README beside it."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import reinforce_rl
from reinforce_rl.errors import CheckpointError
from reinforce_rl.reward_model.evaluation import Accuracy
from reinforce_rl.reward_model.head.training import TrainedHead
from reinforce_rl.utils.files import write_atomically

HEAD_FILE = "head.safetensors"
CARD_FILE = "README.md"


@dataclass(frozen=True)
class PoolingResult:
    """One pooling's head and how it does.

    Attributes:
        trained: the head.
        train_whole: accuracy on the whole training answers.
        held_out_whole: on the whole answers of held-out prompts.
        held_out_cut: on the same, cut to `HeadReport.evaluate_at` tokens.
        held_out_degenerate: how often a real answer is above a made, degenerate one; None where none was made.
    """

    trained: TrainedHead
    train_whole: Accuracy
    held_out_whole: Accuracy
    held_out_cut: Accuracy
    held_out_degenerate: Accuracy | None


@dataclass(frozen=True)
class HeadReport:
    """All that is worth knowing of a training run.

    Attributes:
        trunk: name of the trunk's folder.
        trunk_sha256: of its weights and config.
        data_file, data_sha256: name and hash of the file of pairs.
        skipped: reason to number of pairs that were left out.
        train_pairs, train_prompts, held_out_pairs, held_out_prompts: sizes of the split.
        cut_answers: what was trained on besides whole answers, in words.
        degenerate: what was made besides, in words.
        evaluate_at: tokens an answer is cut to for the second accuracy.
        baseline_whole, baseline_cut: held-out accuracy of "the answer with more tokens wins".
        results: pooling to result, for every pooling that was tried.
        pooling: the one whose head is written.
        command: how the run was started.
        seconds: wall time of the run.
    """

    trunk: str
    trunk_sha256: str
    data_file: str
    data_sha256: str
    skipped: dict[str, int]
    train_pairs: int
    train_prompts: int
    held_out_pairs: int
    held_out_prompts: int
    cut_answers: str
    degenerate: str
    evaluate_at: int
    baseline_whole: Accuracy
    baseline_cut: Accuracy
    results: dict[str, PoolingResult]
    pooling: str
    command: str
    seconds: float

    @property
    def best(self) -> PoolingResult:
        """The result whose head is written."""
        return self.results[self.pooling]

    def rows(self) -> list[tuple[str, ...]]:
        """The baseline, then each pooling's head; `columns` names the cells."""
        out: list[tuple[str, ...]] = [
            ("longer answer wins", str(self.baseline_whole), str(self.baseline_cut), *[""] * 3)
        ]
        for pooling, result in self.results.items():
            mark = " (written)" if pooling == self.pooling else ""
            folds = result.trained.chosen_validation
            out.append(
                (
                    f"{pooling}{mark}",
                    str(result.held_out_whole),
                    str(result.held_out_cut),
                    str(result.held_out_degenerate or ""),
                    "" if math.isnan(folds.loss) else f"{folds.accuracy:.3f}",
                    "" if math.isnan(folds.loss) else f"{folds.loss:.4f}",
                )
            )
        return out

    @property
    def columns(self) -> tuple[str, ...]:
        """Titles of the columns of `rows`."""
        return (
            "",
            "whole",
            f"cut to {self.evaluate_at}",
            "above made",
            "CV acc.",
            "CV loss",
        )

    def metadata(self) -> dict[str, str]:
        """For the head's file; safetensors takes strings alone."""
        best = self.best
        return {
            "trunk": self.trunk,
            "trunk_sha256": self.trunk_sha256,
            "data_file": self.data_file,
            "data_sha256": self.data_sha256,
            "train_pairs": str(self.train_pairs),
            "held_out_pairs": str(self.held_out_pairs),
            "held_out_accuracy": str(best.held_out_whole),
            f"held_out_accuracy_at_{self.evaluate_at}_tokens": str(best.held_out_cut),
            "l2": f"{best.trained.l2:g}",
            "raw_mean": f"{best.trained.raw_mean:.6g}",
            "raw_std": f"{best.trained.raw_std:.6g}",
            "package_version": reinforce_rl.__version__,
        }

    def card(self) -> str:
        """The README's text."""
        best = self.best
        pooled = "mean of the last layer's hidden states" if self.pooling == "mean" else "last token's hidden state"
        skipped = "; ".join(f"{count}: {reason}" for reason, count in self.skipped.items()) or "none"
        rows = [self.columns, tuple("---" for _ in self.columns), *self.rows()]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"""# Reward head on {self.trunk}

A linear layer on the {pooled} of a frozen trunk, `{HEAD_FILE}`. It is of use with this
trunk alone: `{self.trunk}`, sha256 of weights and config `{self.trunk_sha256[:16]}`.

- **Trained on** {self.train_pairs} preference pairs of {self.train_prompts} prompts from `{self.data_file}` (sha256
  `{self.data_sha256[:16]}`), by Bradley-Terry loss with L2 {best.trained.l2:g}, chosen by cross-validation on them.
- **Held out** {self.held_out_pairs} pairs of {self.held_out_prompts} prompts; no prompt is on both sides.
- **Pairs left out**: {skipped}.
- **Answers**: {self.cut_answers}.
- **Made answers**: {self.degenerate}.
- **Scores** have mean 0 and standard deviation 1 over the training answers (before: {best.trained.raw_mean:.3f} and
  {best.trained.raw_std:.3f}, in log-odds).
- **Made by** reinforce_rl {reinforce_rl.__version__} in {self.seconds:.0f} s:

```
{self.command}
```

Share of held-out pairs ordered rightly, ± one standard error, on whole answers and on answers cut to
{self.evaluate_at} tokens; how often a real answer is above a made one; and cross-validation inside the training pairs
(CV, whole and cut answers together; a loss of 0.6931 nats is a guess), by which pooling and L2 strength are chosen
where there is a choice.

{table}

On its own training pairs the head reaches {best.train_whole}.
"""


def write_head(report: HeadReport, folder: str | Path) -> Path:
    """Write the head and its card into a folder, and return the head's path.

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


def sha256_of_file(path: str | Path) -> str:
    """sha256 (hex) of a file's content, as `sha256sum` prints it.

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
    """sha256 (hex) over the names and hashes of files, in the order of their names.

    Raises:
        CheckpointError: one cannot be read.
    """
    lines = (f"{sha256_of_file(path)}  {path.name}\n" for path in sorted(paths, key=lambda item: item.name))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
