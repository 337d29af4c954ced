"""Checkpoints with megatron's `dist_checkpointing`: whole or absent, the newest named by a file that moves last.

checkpoints/
  latest                      the name of the newest complete checkpoint
  step_00000010/
    model/                    sharded weights, optimizer and schedule
    rng/rank_00000.pt         random state of each rank
    trainer_state.json        step, epoch, sampler position, ...
"""

from __future__ import annotations

import json
import os
import queue
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from reinforce_rl.errors import CheckpointError
from reinforce_rl.files import write_atomically
from reinforce_rl.megatron.lora import trained_state
from reinforce_rl.megatron.mesh import Mesh

# Writers hand their results back through this queue. Saves here are synchronous, so a plain one serves; megatron
# would start a manager process for it, which outlives a run that is killed and needs an importable main module.
filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]

STATE_FILE = "trainer_state.json"
LATEST_FILE = "latest"
# Of a parameter group; a resumed run takes them from its configuration, so that a changed one has an effect. The rate
# and the weight decay themselves are the scheduler's.
HYPERPARAMETERS = ("max_lr", "min_lr", "betas", "eps")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    trainer_state: dict[str, Any]


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """The newest complete checkpoint in a folder of checkpoints, or None where there is none.

    Raises:
        CheckpointError: `latest` names a checkpoint that is not there or whose state cannot be read.
    """
    pointer = Path(folder) / LATEST_FILE
    if not pointer.is_file():
        return None
    checkpoint = pointer.parent / pointer.read_text(encoding="utf-8").strip()
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{pointer} names {checkpoint.name}, whose {STATE_FILE} cannot be read: {error}. "
            f"To go on from an older checkpoint, write its name into {pointer}"
        ) from error
    return Checkpoint(checkpoint, state)


class Checkpointer:
    """Saves and restores a run: the trainer's `ckpt_callback`.

    Args:
        folder: holds the checkpoints.
        mesh: this rank's place.
        ddp, optimizer, scheduler: whose state is saved and restored.
        keep_last: how many complete checkpoints stay on disk; at least 1.
    """

    def __init__(
        self,
        folder: str | Path,
        mesh: Mesh,
        ddp: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        *,
        keep_last: int = 2,
    ):
        self.folder = Path(folder)
        self._mesh = mesh
        self._ddp, self._optimizer, self._scheduler = ddp, optimizer, scheduler
        self._keep_last = keep_last

    def save(self, step: int, trainer_state: dict[str, Any]) -> Path:
        """Write a checkpoint; a collective call. `latest` moves only when everything is on disk.

        Raises:
            CheckpointError: on every rank where one rank could not write; the previous checkpoint stays as it was.
        """
        final = self.folder / f"step_{step:08d}"
        part = self.folder / f"step_{step:08d}.part"
        failure: Exception | None = None
        if self._mesh.is_main:
            try:
                shutil.rmtree(part, ignore_errors=True)
                (part / "model").mkdir(parents=True)
                (part / "rng").mkdir()
            except OSError as error:
                failure = self._cannot_write(part, error)
        self._mesh.check_together(failure)
        try:
            dist_checkpointing.save(self._sharded_state(loading=False), str(part / "model"))
            torch.save(_rng_state(), part / "rng" / f"rank_{self._mesh.rank:05d}.pt")
        except (Exception, CheckpointException) as error:  # torch's own is not an Exception
            failure = self._cannot_write(part, error)
        self._mesh.check_together(failure)
        if self._mesh.is_main:
            try:
                write_atomically(part / STATE_FILE, json.dumps(trainer_state, indent=2))
                shutil.rmtree(final, ignore_errors=True)
                os.replace(part, final)
                write_atomically(self.folder / LATEST_FILE, final.name)
                self._remove_old(final)
            except OSError as error:
                failure = self._cannot_write(part, error)
        self._mesh.check_together(failure)
        return final

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizer, schedule and random state; a collective call.

        Raises:
            CheckpointError: the checkpoint is damaged or belongs to another model.
        """
        failure: Exception | None = None
        try:
            sharded = self._sharded_state(loading=True)
            loaded: Any = dist_checkpointing.load(sharded, str(checkpoint.folder / "model"))
            self._ddp.module.load_state_dict(loaded["model"], strict=False)
            configured = [{key: group[key] for key in HYPERPARAMETERS} for group in self._optimizer.param_groups]
            self._optimizer.load_state_dict(loaded["optimizer"])
            for group, values in zip(self._optimizer.param_groups, configured, strict=True):
                group.update(values)
            self._scheduler.num_steps = 0  # megatron adds the checkpoint's steps to those already taken
            self._scheduler.load_state_dict(loaded["scheduler"])
            rng = checkpoint.folder / "rng" / f"rank_{self._mesh.rank:05d}.pt"
            if rng.is_file():  # absent where the run goes on with more ranks than it was saved with
                _set_rng_state(torch.load(rng, weights_only=True))
        except (Exception, CheckpointException) as error:  # torch's own is not an Exception
            failure = CheckpointError(
                f"checkpoint {checkpoint.folder} cannot be loaded: {reason_of(error)}. "
                f"To go on from an older one, write its name into {self.folder / LATEST_FILE}"
            )
            failure.__cause__ = error
        self._mesh.check_together(failure)

    def _sharded_state(self, *, loading: bool) -> dict[str, Any]:
        lm: Any = self._ddp.module
        model = trained_state(lm)
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(model, is_loading=loading),
            "scheduler": self._scheduler.state_dict(),
        }

    def _remove_old(self, newest: Path) -> None:
        complete = [p for p in self.folder.iterdir() if re.fullmatch(r"step_\d{8}", p.name)]
        # Later steps than the newest's are left from before the run went on from an older one: they go first.
        complete.sort(key=lambda p: (p.name <= newest.name, p.name))
        for folder in complete[: -self._keep_last]:
            shutil.rmtree(folder)
        for leftover in self.folder.glob("step_*.part"):
            shutil.rmtree(leftover)

    def _cannot_write(self, part: Path, error: BaseException) -> CheckpointError:
        failure = CheckpointError(
            f"rank {self._mesh.rank} cannot write the checkpoint {part}: {reason_of(error)}. "
            "The previous checkpoint is untouched; free some space and start the run again"
        )
        failure.__cause__ = error
        return failure


def reason_of(error: BaseException) -> str:
    """torch's own exception has the tracebacks of all ranks as its text; the errors below them say what is wrong."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {inner[0]}" for rank, inner in error.failures.items())
    return str(error)


def _rng_state() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": json.dumps(random.getstate()),
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
