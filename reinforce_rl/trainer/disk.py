"""Bound the disk space of a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import filesize

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.errors import Fault
from reinforce_rl.megatron.size import ADAM_MOMENTS, FP32, WEIGHT_BYTES, ModelSize

gigabytes = partial(filesize.decimal, precision=2)  # of bytes, or in a smaller or larger unit
# Bytes of a response token in a record (benchmarks/records.py: 18 in all).
RECORD_TEXT_BYTES = 2
RECORD_TOKEN_BYTES = 16  # of the columns other than texts
RECORD_FILE_BYTES = 20_000  # of a file, besides its tokens


@dataclass(frozen=True)
class DiskNeed:
    folder: Path  # of the run
    # Bytes of a checkpoint: weights, separate fp32 main weights, Adam's moments; with LoRA of its
    # parameters only.
    checkpoint: int
    checkpoints: int  # at a time, including the one being written
    export: int  # bytes of the Hugging Face folder at the end
    records: int  # bytes of the samples of the remaining steps, every response at full length
    held: int  # bytes of checkpoints in the folder, to be replaced by new ones
    free: int  # bytes on the disk

    @property
    def needed(self) -> int:
        """Bytes besides the bytes already held."""
        return max(self.checkpoint * self.checkpoints - self.held, 0) + self.export + self.records

    @property
    def fault(self) -> str | None:
        """The reason not to start the run, if any.

        `records` alone is no reason: few runs come near this bound.
        """
        if self.needed - self.records <= self.free:
            return None
        parts = f"at most {self.checkpoints} x {gigabytes(self.checkpoint)} for checkpoints"
        if self.held:
            parts += f", less {gigabytes(self.held)} there already"
        if self.export:
            parts += f", {gigabytes(self.export)} for the Hugging Face folder"
        parts += f", and {gigabytes(self.records)} for the samples' records"
        return Fault(
            f"exp_manager.explicit_log_dir is {self.folder}, where {gigabytes(self.free)} are "
            f"free; the run needs {gigabytes(self.needed)}: {parts}. Free some space, choose "
            "another disk, or lower exp_manager.checkpoint_callback_params.keep_last or "
            "keep_best; exp_manager.record_tokens_every=0 makes the records smaller",
            key="preflight.disk.too_little_space",
        )

    @property
    def warning(self) -> str | None:
        if self.fault is not None or self.needed <= self.free:
            return None
        return (
            f"{self.folder} has {gigabytes(self.free)} free, and the samples' records take "
            f"{gigabytes(self.records)} if every response is of full length; "
            "exp_manager.record_tokens_every=0 shrinks them"
        )


def disk_need(cfg: TrainConfig, size: ModelSize, steps: int) -> DiskNeed:
    weight = WEIGHT_BYTES[cfg.trainer.precision]
    rl = cfg.trainer.reinforce
    saving = cfg.exp_manager.checkpoint_callback_params
    folder = Path(cfg.exp_manager.explicit_log_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    intervals = [rl.save_interval, rl.val_check_interval if saving.keep_best else 0]
    saves = 1 + sum(max(steps - 1, 0) // interval for interval in intervals if interval > 0)
    held = _size_of((folder / "checkpoints").glob("step_*/**/*"))
    checkpoint = size.trained * (weight + (0 if weight == FP32 else FP32) + ADAM_MOMENTS)
    checkpoints = min(saving.keep_last + saving.keep_best + 1, saves)
    export = size.parameters * weight if saving.save_hf_on_train_end else 0
    every = cfg.exp_manager.record_tokens_every
    samples = cfg.model.reinforce.num_rollout_samples * rl.num_rollouts_per_prompt
    response_tokens = samples * cfg.max_response_tokens
    steps_with_tokens = steps // every if every else 0
    records = (
        steps * (RECORD_FILE_BYTES + response_tokens * RECORD_TEXT_BYTES)
        + steps_with_tokens * response_tokens * RECORD_TOKEN_BYTES
        - _size_of(folder.glob("rollouts/*"))
    )
    free = shutil.disk_usage(existing).free
    return DiskNeed(folder, checkpoint, checkpoints, export, max(records, 0), held, free)


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
