"""Sample files of a run: `rollouts/step_00012.parquet`, `validation/...` and `test/...`, and reading them.

Earlier versions wrote `step_00012.jsonl`; the same functions read both.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from reinforce_rl.errors import DataError
from reinforce_rl.monitoring.records import RolloutRow, Samples, read_rows, write_records
from reinforce_rl.utils.files import read_json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Kind = Literal["rollouts", "validation", "test"]
_EARLIER = 13  # fields of a line of the JSONL that earlier versions wrote
_STEP_FILE = re.compile(r"step_(\d+)\.(jsonl|parquet)")


class RolloutWriter:
    """Writes the samples of each step below a run's folder, replacing existing files.

    `resume_step` is the checkpoint's: files of later steps are removed. None removes nothing.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None):
        self.folder = Path(folder)
        if resume_step is not None:
            for kind in get_args(Kind):
                for path in (self.folder / kind).glob("*step_*"):
                    found = _STEP_FILE.fullmatch(path.name)
                    is_torn = path.name.startswith(".step_")  # a kill before its move
                    if is_torn or (found and int(found[1]) > resume_step):
                        path.unlink()

    def write(self, step: int, samples: Samples | Sequence[RolloutRow], kind: Kind = "rollouts") -> Path:
        """Write the samples of `step` atomically; return the file's path."""
        samples = samples if isinstance(samples, Samples) else Samples(list(samples))
        path = self.folder / kind / f"step_{step:05d}.parquet"
        write_records(path, samples)
        return path


def rollout_files(folder: str | Path, kind: Kind = "rollouts") -> dict[int, Path]:
    """Return a run's sample files by step, in ascending order."""
    matches = ((_STEP_FILE.fullmatch(path.name), path) for path in (Path(folder) / kind).glob("step_*"))
    return {step: path for step, _, path in sorted((int(m[1]), m[2], path) for m, path in matches if m)}


def read_rollouts(path: str | Path) -> list[RolloutRow]:
    """Read a file of `RolloutWriter`; null becomes NaN.

    Raises:
        DataError: the file is absent or damaged, or its fields are not those of `RolloutRow`.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the samples of a step")
    if path.suffix == ".parquet":
        return read_rows(path)
    fields = {field.name for field in dataclasses.fields(RolloutRow)[:_EARLIER]}
    rows = []
    for number, record in enumerate(read_json_lines(path), 1):
        if record.keys() != fields:
            missing, unknown = sorted(fields - record.keys()), sorted(record.keys() - fields)
            raise DataError(f"{path}, line {number}: missing fields {missing}, unknown fields {unknown}")
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in record.items()}
        rows.append(RolloutRow(**known))
    return rows


def decode_responses(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Decode each row of int64 [N, T], skipping special tokens."""
    rows = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return [str(text) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
