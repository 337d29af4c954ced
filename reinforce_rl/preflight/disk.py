"""The room that a run needs on disk, against what is free in its folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reinforce_rl.config.schema import TrainConfig
from reinforce_rl.preflight.memory import ADAM_MOMENTS, FP32, WEIGHT_BYTES

if TYPE_CHECKING:
    from reinforce_rl.preflight.shapes import ModelSize


@dataclass(frozen=True)
class DiskNeed:
    """Bytes.

    Attributes:
        folder: of the run.
        checkpoint: of one checkpoint: weights, fp32 main weights where they are others, Adam's moments; of LoRA's
            updates alone where there are some.
        checkpoints: how many there are at a time, the one that is being written among them.
        export: of the Hugging Face folder at the end.
        held: of checkpoints that are in the folder already, whose room the new ones take.
        free: on the disk.
    """

    folder: Path
    checkpoint: int
    checkpoints: int
    export: int
    held: int
    free: int

    @property
    def needed(self) -> int:
        """Bytes besides those that are held already."""
        return max(self.checkpoint * self.checkpoints - self.held, 0) + self.export

    @property
    def fault(self) -> str | None:
        """A sentence where there is too little room."""
        if self.needed <= self.free:
            return None
        return (
            f"exp_manager.explicit_log_dir is {self.folder}, where {gigabytes(self.free)} are free; the run needs "
            f"{gigabytes(self.needed)}: at most {self.checkpoints} x {gigabytes(self.checkpoint)} for checkpoints"
            f"{f', less {gigabytes(self.held)} there already' if self.held else ''}"
            f"{f', and {gigabytes(self.export)} for the Hugging Face folder' if self.export else ''}. Free some "
            "space, choose another disk, or lower exp_manager.checkpoint_callback_params.keep_last or keep_best"
        )


def disk_need(cfg: TrainConfig, size: ModelSize, steps: int) -> DiskNeed:
    """What a run of so many steps writes, and the room there is.

    Args:
        cfg: of the run.
        size: of its model.
        steps: of the whole run.
    """
    weight = WEIGHT_BYTES[cfg.trainer.precision]
    main = 0 if weight == FP32 else FP32
    saving = cfg.exp_manager.checkpoint_callback_params
    folder = Path(cfg.exp_manager.explicit_log_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    checkpoints = folder / "checkpoints"
    held = sum(path.stat().st_size for path in checkpoints.glob("step_*/**/*") if path.is_file())
    return DiskNeed(
        folder=folder,
        checkpoint=size.trained * (weight + main + ADAM_MOMENTS),
        checkpoints=min(saving.keep_last + saving.keep_best + 1, _saves(cfg, steps)),
        export=size.parameters * weight if saving.save_hf_on_train_end else 0,
        held=held,
        free=shutil.disk_usage(existing).free,
    )


def _saves(cfg: TrainConfig, steps: int) -> int:
    """Checkpoints of a whole run, at most."""
    rl = cfg.trainer.reinforce
    every = [rl.save_interval] + (
        [rl.val_check_interval] if cfg.exp_manager.checkpoint_callback_params.keep_best else []
    )
    return 1 + sum(max(steps - 1, 0) // interval for interval in every if interval > 0)


def gigabytes(count: float) -> str:
    """10^9 bytes, or smaller units."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count / 1e3:.3g} kB"
