"""Samples of each step as files: `rollouts/step_00012.jsonl` and `validation/step_00012.jsonl`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor

from reinforce_rl.data.batches import FINISH_STOP, Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.errors import DataError
from reinforce_rl.utils.files import read_json_lines, write_json_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Kind = Literal["rollouts", "validation", "test"]
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")
_FLOATS = ("reward", "kl", "reward_with_kl", "baseline", "advantage")


@dataclass(frozen=True)
class RolloutRow:
    """One scored sample. Missing floats (scoring failed, no KL in validation) are NaN, null on disk."""

    step: int  # sampled before this optimizer step, or validated after it
    prompt_id: int  # `Prompt.id`; with weighted blending, modulo the data set's size, its index there
    sample_id: int  # 0 .. G-1 within the prompt
    prompt: str
    response: str
    reward: float  # as the reward source returned it
    finish_reason: str  # `FINISH_STOP`, `FINISH_LENGTH` or `FINISH_OUTSIDE` of `data/batches.py`
    response_length: int  # tokens, including the stop token
    kl: float = math.nan  # nats, summed over the response's tokens
    reward_with_kl: float = math.nan  # reward - beta * kl
    baseline: float = math.nan
    advantage: float = math.nan  # weight of the log-probs in the loss
    valid: bool = True  # False if left out of the loss

    @property
    def is_end(self) -> bool:
        return self.finish_reason == FINISH_STOP


class RolloutWriter:
    """Writes the samples of each step below a run's folder, replacing existing files.

    `resume_step` is the checkpoint's: files of later steps are removed. None removes nothing.
    """

    def __init__(self, folder: str | Path, resume_step: int | None = None):
        self.folder = Path(folder)
        if resume_step is not None:
            for kind in get_args(Kind):
                for step, path in rollout_files(self.folder, kind).items():
                    if step > resume_step:
                        path.unlink()

    def write(self, step: int, rows: Sequence[RolloutRow], kind: Kind = "rollouts") -> Path:
        """Write the samples of `step` atomically as JSON lines; return the file's path."""
        path = self.folder / kind / f"step_{step:05d}.jsonl"
        # `float` accepts NumPy and tensor scalars.
        write_json_lines(path, [vars(row) | {name: float(getattr(row, name)) for name in _FLOATS} for row in rows])
        return path


def rollout_files(folder: str | Path, kind: Kind = "rollouts") -> dict[int, Path]:
    """Return a run's sample files by step, in ascending order."""
    matches = ((_STEP_FILE.fullmatch(path.name), path) for path in (Path(folder) / kind).glob("step_*.jsonl"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_rollouts(path: str | Path) -> list[RolloutRow]:
    """Read a file of `RolloutWriter`; null becomes NaN.

    Raises:
        DataError: the file is absent, a line is not JSON, or its fields are not those of `RolloutRow`.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected the samples of a step")
    expected = {field.name for field in dataclasses.fields(RolloutRow)}
    rows = []
    for number, record in enumerate(read_json_lines(path), 1):
        if record.keys() != expected:
            missing, unknown = sorted(expected - record.keys()), sorted(record.keys() - expected)
            raise DataError(f"{path}, line {number}: missing fields {missing}, unknown fields {unknown}")
        record.update({name: math.nan for name in _FLOATS if record[name] is None})
        rows.append(RolloutRow(**record))
    return rows


def decode_responses(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, lengths: Tensor) -> list[str]:
    """Decode each row of int64 [N, T], skipping special tokens."""
    rows = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return [str(text) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]


def sample_rows(
    step: int,
    prompts: Sequence[Prompt],
    batch: RolloutBatch,
    tokenizer: PreTrainedTokenizerBase,
    data: ReinforceBatch | None = None,
) -> list[RolloutRow]:
    """Return one row per sample; `prompts` are in the batch's order, `data` is None in validation."""
    text_of = {prompt.id: prompt.text for prompt in prompts}
    starts, lengths = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    rows = zip(batch.sequences.tolist(), starts, lengths, strict=True)
    texts = tokenizer.batch_decode([row[start : start + n] for row, start, n in rows], skip_special_tokens=True)
    trained: dict[str, Tensor] = {}
    if data is not None:
        trained = {"kl": data.kl, "reward_with_kl": data.rewards_with_kl, "baseline": data.baseline}
        trained["advantage"] = data.sequence_advantages
    return [
        RolloutRow(
            step=step,
            prompt_id=prompt_id,
            sample_id=int(batch.sample_ids[i]),
            prompt=text_of[prompt_id],
            response=str(texts[i]),
            reward=float(batch.rewards[i]),
            finish_reason=batch.finish_reasons[i],
            response_length=lengths[i],
            **{name: float(values[i]) for name, values in trained.items()},
            valid=bool(batch.valid[i]),
        )
        for i, prompt_id in enumerate(batch.group_ids.tolist())
    ]
