"""Complete checkpoints with megatron's `dist_checkpointing`, the newest named by a file.

The file is written last, so it never names an incomplete checkpoint.

checkpoints/
  latest                      the name of the newest complete checkpoint
  step_00000010/
    model/                    sharded weights, optimizer and schedule
    rng/rank_00000.pt         random state of each rank; sampling has keys of its own
    trainer_state.json        step, epoch, sampler position, ...
    rollouts.pt               rollouts of the next steps, if generation has its own ranks
    manifest.json             size and checksum of all these files
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.utils import get_total_norm

from reinforce_rl.errors import CheckpointError, DivergedError, key_of
from reinforce_rl.megatron import checkpoint_files as files
from reinforce_rl.megatron.lora import trained_state
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.optimizer import STEP, adam_state, set_adam_step
from reinforce_rl.megatron.torch_archive import check_torch_file
from reinforce_rl.utils.files import naming, space_left, write_atomically
from reinforce_rl.utils.untrusted_files import (
    UnreadableFileError,
    check_folder,
    read_bounded,
    read_json,
)

STATE_FILE = "trainer_state.json"
LATEST_FILE = "latest"
CHECKPOINTS = "checkpoints"  # in the folder of a run
_CHECKPOINT_NAME = re.compile(r"step_[0-9]{8}")
_MAX_NAME_BYTES = 4096
_MAX_MORE_BYTES = 1 << 30
# torch's writer raises the last three when a file cannot be written.
_NO_SPACE = re.compile(
    r"No space left|quota exceeded|File too large|unexpected pos|failed writing|iostream error"
)


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    trainer_state: dict[str, Any]

    def more(self, name: str) -> bytes:
        """Return a file that was saved as one of `other_files`; empty if there is none."""
        path = self.folder / name
        return (
            read_bounded(path, max_bytes=_MAX_MORE_BYTES, within=self.folder)
            if path.is_file()
            else b""
        )


def _latest_name(folder: Path) -> str:
    """Return the name of the newest complete checkpoint; "" if there is none."""
    pointer = folder / LATEST_FILE
    # A link to a folder, or a broken link, is a fault, not "no checkpoint": a run would start
    # again.
    if not pointer.exists() and not pointer.is_symlink():
        return ""
    try:
        return (
            read_bounded(pointer, max_bytes=_MAX_NAME_BYTES, within=folder).decode("utf-8").strip()
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{pointer} cannot be read: {error}; write the name of a checkpoint into it",
            key=key_of(error, "checkpoint.latest.not_readable"),
        ) from error


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in a folder, or None.

    Raises CheckpointError if it or its state is missing.
    """
    folder = Path(folder)
    _check_checkpoints(folder)
    name = _latest_name(folder)
    if not name:
        return None
    if not _CHECKPOINT_NAME.fullmatch(name):
        raise CheckpointError(
            f"{folder / LATEST_FILE} names {name[:100]!r}; expected the name of a checkpoint "
            f"beside it, such as {folder_name(10)}. Write one into it, "
            "or delete it to begin again at step 0",
            key="checkpoint.latest.no_name",
        )
    checkpoint = folder / name
    try:
        check_folder(checkpoint)
        state = _state_of(checkpoint)
    except (OSError, ValueError) as error:
        pointer = folder / LATEST_FILE
        way_out = _way_out(checkpoint)
        raise CheckpointError(
            f"{pointer} names {name}, whose {STATE_FILE} cannot be read: {error}. {way_out}",
            key=key_of(error, "checkpoint.state.not_readable"),
        ) from error
    return Checkpoint(checkpoint, state)


def _check_checkpoints(folder: Path) -> None:
    """Raise CheckpointError if a folder of checkpoints is a link that leads out of its parent."""
    try:
        check_folder(folder)
    except UnreadableFileError as error:
        raise CheckpointError(str(error), key=error.key) from error


def _state_of(checkpoint: Path) -> dict[str, Any]:
    state = read_json(checkpoint / STATE_FILE, within=checkpoint)
    if not isinstance(state, dict):
        raise ValueError(f"it is a JSON {type(state).__name__}, expected an object")
    return state


def checkpoint_up_to(folder: str | Path, step: int) -> Checkpoint | None:
    """Return the newest complete checkpoint of this step or an earlier one, or None.

    Raises CheckpointError if it is damaged.
    """
    _check_checkpoints(Path(folder))
    paths = _complete_checkpoints(Path(folder)) if Path(folder).is_dir() else []
    candidates = [
        path for path in paths if path.name <= folder_name(step) and (path / STATE_FILE).is_file()
    ]
    if not candidates:
        return None
    file = candidates[-1] / STATE_FILE
    try:
        check_folder(candidates[-1])
        return Checkpoint(candidates[-1], _state_of(candidates[-1]))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}. Restore it, or move {candidates[-1]} away",
            key=key_of(error, "checkpoint.state.not_readable"),
        ) from error


def _way_out(damaged: Path) -> str:
    pointer = damaged.parent / LATEST_FILE
    others = [path.name for path in _complete_checkpoints(damaged.parent) if path != damaged]
    if not others:
        return (
            f"There is no other checkpoint in {damaged.parent}; "
            f"delete {pointer} to begin again at step 0"
        )
    older = [name for name in others if name < damaged.name] or others
    return (
        f"Other checkpoints there: {', '.join(others)}. To resume from one of them, "
        f"write its name into {pointer}, such as `echo {older[-1]} > {pointer}`"
    )


def _complete_checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name))


def state_bytes(ddp: DistributedDataParallel, mesh: Mesh) -> int:
    """Estimate a checkpoint's bytes: weights, Adam's two moments, and separate fp32 weights."""
    sizes = [(p.numel(), p.element_size()) for p in ddp.module.parameters() if p.requires_grad]
    return (
        mesh.tp_size * mesh.pp_size * sum(n * (size + (12 if size < 4 else 8)) for n, size in sizes)
    )


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


@dataclass
class _Save:
    """A save in progress."""

    final: Path  # destination folder
    part: Path  # folder until the checkpoint is complete
    trainer_state: dict[str, Any]  # written last
    keep: set[str]  # older checkpoints to retain
    writer: files.ShardedWriter
    random_state: dict[str, Any]  # of this rank
    other_files: Mapping[str, bytes]  # contents by name, on the first rank
    preparing: float  # seconds that training was blocked before the background write
    thread: threading.Thread = field(init=False)
    # This rank's part of the index, and of the manifest.
    written: tuple[list[Any], files.Records] = [], {}
    writing: float = 0.0  # seconds this rank spent writing
    error: BaseException | None = None  # raised while writing

    def write(self, rank: int) -> None:
        """Write this rank's files; may run on any thread."""
        began = time.monotonic()
        rng = self.part / "rng" / f"rank_{rank:05d}.pt"
        try:
            # If torch wrote the file itself, a full disk would be an assertion error.
            content = io.BytesIO()
            torch.save(self.random_state, content)
            with naming(rng):
                rng.write_bytes(content.getvalue())
            results, paths = self.writer.write()
            self.written = results, files.record_files(self.part, [rng, *paths])
        except Exception as error:
            self.error = error
        self.writing = time.monotonic() - began


class Checkpointer:
    """Saves and restores the state of a run; the trainer's `ckpt_callback`.

    Args:
        keep_last: complete checkpoints to retain, at least 1.
        asynchronous: write in the background; see `poll`.
        on_saved: called on the first rank with the seconds that a complete save blocked training,
            plus, for a background save, the slowest rank's seconds of writing.
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
        asynchronous: bool = False,
        on_saved: Callable[[float], None] = lambda seconds: None,
    ):
        self.folder = Path(folder)
        self._mesh = mesh
        self._ddp = ddp
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._on_saved = on_saved
        self._running: _Save | None = None

    def save(
        self,
        step: int,
        trainer_state: dict[str, Any],
        keep: Collection[int] = (),
        other_files: Mapping[str, bytes] = MappingProxyType({}),
        waited: float = 0.0,
    ) -> Path:
        """Write a checkpoint; a collective call. `latest` changes when all files are on disk.

        An asynchronous save, of the state at this call, completes in `finish` or `poll`. A save in
        progress is finished first.

        Args:
            step: the number of steps that the state includes.
            trainer_state: JSON-serializable.
            keep: steps of checkpoints to retain besides the newest.
            other_files: their contents by name. The first rank writes them, except empty ones.
            waited: seconds for which the save blocked training before this call.

        Raises:
            CheckpointError: on every rank, if one could not write. The previous checkpoint is
                unchanged.
            DivergedError: on every rank, if weights of a rank are not finite.
        """
        self.finish()
        began = time.monotonic()
        final = self.folder / folder_name(step)
        part = self.folder / f"{folder_name(step)}.part"
        weights = [
            parameter.detach()
            for parameter in self._ddp.module.parameters()
            if parameter.requires_grad
        ]
        if self._mesh.any_rank(not get_total_norm(weights, foreach=True).isfinite()):
            raise DivergedError(
                f"the weights to be saved as {final} are not finite",
                key="checkpoint.weights.not_finite",
            )
        with self._writing(part):
            if self._mesh.is_main:
                shutil.rmtree(part, ignore_errors=True)
                (part / "model").mkdir(parents=True)
                (part / "rng").mkdir()
        writer = files.ShardedWriter(self._sharded_state(), part / "model")
        with self._writing(part):
            writer.write_common()
        with self._writing(part):
            writer.plan(copy=self._asynchronous)
        keep_names = {folder_name(s) for s in keep}
        state = random_state(self._mesh)
        waited += time.monotonic() - began
        save = _Save(final, part, trainer_state, keep_names, writer, state, other_files, waited)
        # Not on the main thread, where a Ctrl-C in torch's C++ writer can abort the process. A
        # daemon thread does not keep a failing run alive.
        save.thread = threading.Thread(
            target=save.write, args=(self._mesh.rank,), name=final.name, daemon=True
        )
        self._running = save
        save.thread.start()
        if not self._asynchronous:
            self.finish()
        return final

    def poll(self) -> None:
        """Complete the background save if all ranks have written; a collective call.

        Raises the errors of `save`.
        """
        # Whether a save runs is the same on all ranks.
        if self._running is not None and not self._mesh.any_rank(self._running.thread.is_alive()):
            self.finish()

    def finish(self) -> None:
        """Wait for the background save, if any, and complete it; a collective call.

        Raises the errors of `save`.
        """
        save = self._running
        self._running = None
        if save is None:
            return
        save.thread.join()
        began = time.monotonic()
        with self._writing(save.part):
            if save.error is not None:
                raise save.error
        parts = self._mesh.gather_on_main((*save.written, save.writing))
        with self._writing(save.part):
            if self._mesh.is_main:
                self._complete(save, parts)
        if self._mesh.is_main:
            writing = max(seconds for *_, seconds in parts)
            self._on_saved(save.preparing + writing + time.monotonic() - began)

    def _complete(self, save: _Save, parts: list[Any]) -> None:
        part = save.part
        save.writer.finish([results for results, *_ in parts])
        write_atomically(part / STATE_FILE, json.dumps(save.trainer_state, indent=2))
        for name, content in save.other_files.items():
            if content:
                with naming(part / name):
                    (part / name).write_bytes(content)
        records = {name: record for _, of_rank, _ in parts for name, record in of_rank.items()}
        paths = [path for path in part.rglob("*") if path.is_file()]
        rest = [path for path in paths if path.relative_to(part).as_posix() not in records]
        files.write_manifest(part, records | files.record_files(part, rest))
        shutil.rmtree(save.final, ignore_errors=True)
        os.replace(part, save.final)
        write_atomically(self.folder / LATEST_FILE, save.final.name)
        self._remove_old(save.final, save.keep)

    @property
    def is_writing(self) -> bool:
        """True while a background save runs, on all ranks alike."""
        return self._running is not None

    def holds(self, step: int) -> bool:
        """Return True if there is a checkpoint of this step."""
        return (self.folder / folder_name(step)).is_dir()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a state that was saved from any layout; a collective call.

        Raises CheckpointError if the state does not fit.
        """
        folder = checkpoint.folder
        mesh = self._mesh

        def failed(error: BaseException) -> CheckpointError:
            _raise_interrupt(error)
            reason = reason_of(error)
            sentence = f"checkpoint {folder} cannot be loaded: {reason}. {_way_out(folder)}"
            return CheckpointError(sentence, key=key_of(error, "checkpoint.folder.not_loaded"))

        with mesh.raise_on_all_ranks(failed):
            files.check_files(folder, mesh.rank, mesh.world_size)
        with mesh.raise_on_all_ranks(failed):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        lm: Any = self._ddp.module
        loaded = files.load_sharded(lm, self._sharded_state(), folder / "model")
        # Tensors are filled in place. Hyperparameters come from the configuration, so changes take
        # effect.
        set_adam_step(self._optimizer, loaded["optimizer"][STEP])
        self._scheduler.num_steps = 0  # megatron adds the checkpoint's steps to this
        self._scheduler.load_state_dict(loaded["scheduler"])
        rng = folder / "rng" / f"rank_{self._mesh.rank:05d}.pt"
        if rng.is_file():  # absent if the run is resumed with more ranks
            check_torch_file(rng, within=folder)
            set_random_state(torch.load(rng, weights_only=True), self._mesh)

    def _sharded_state(self) -> dict[str, Any]:
        lm: Any = self._ddp.module
        model = trained_state(lm)
        optimizer = adam_state(self._optimizer, model)
        return {"model": model, "scheduler": self._scheduler.state_dict(), "optimizer": optimizer}

    def _remove_old(self, newest: Path, keep: set[str]) -> None:
        complete = _complete_checkpoints(self.folder)
        # Steps after the newest are leftovers from before the run was resumed at an older step.
        # Delete them first.
        complete.sort(key=lambda p: (p.name <= newest.name, p.name))
        for folder in complete[: -self._keep_last]:
            if folder.name not in keep:
                shutil.rmtree(folder)
        for leftover in self.folder.glob("step_*.part"):
            shutil.rmtree(leftover)

    @contextlib.contextmanager
    def _writing(self, part: Path) -> Iterator[None]:
        def failed(error: BaseException) -> CheckpointError:
            _raise_interrupt(error)
            reason = reason_of(error)
            name = _latest_name(self.folder)
            previous = "There is no checkpoint before it"
            if name:
                previous = (
                    f"The previous checkpoint, {name}, is untouched, "
                    "and the next start resumes from it"
                )
            rank = self._mesh.rank
            if _NO_SPACE.search(reason):
                space = space_left(part, getattr(error, "errno", None))
                return CheckpointError(
                    f"rank {rank} cannot write the checkpoint {part}: {reason} ({space}). "
                    f"{previous}; free some space and start the run again",
                    key="checkpoint.disk.full",
                )
            return CheckpointError(
                f"rank {rank} cannot write the checkpoint {part}: {reason}. "
                f"{previous}; start the run again by the same command",
                key="checkpoint.folder.not_written",
            )

        try:
            with self._mesh.raise_on_all_ranks(failed):
                yield
        except CheckpointError:
            # No rank writes any more: each has reached the end of the block.
            if self._mesh.is_main:
                shutil.rmtree(part, ignore_errors=True)
            raise


def reason_of(error: BaseException) -> str:
    """Return the message of an error.

    The text of torch's CheckpointException is the tracebacks of all ranks, so its underlying errors
    are returned.
    """
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {inner[0]}" for rank, inner in error.failures.items())
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _raise_interrupt(error: BaseException) -> None:
    """Re-raise a Ctrl-C that torch wrapped, or that made torch fail while closing a file."""
    causes = [error]
    for cause in causes:  # grows while iterating
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        of_ranks = (
            [inner for inner, _ in cause.failures.values()]
            if isinstance(cause, CheckpointException)
            else []
        )
        causes += [
            below for below in (cause.__cause__, cause.__context__, *of_ranks) if below is not None
        ]


def random_state(mesh: Mesh) -> dict[str, Any]:
    """Return the random state of Python, NumPy, torch, this rank's GPU and megatron's tracker.

    All values have types that `torch.load` reads with `weights_only`.
    """
    name, keys, position, has_gauss, cached = np.random.get_state()
    tracker: Any = get_cuda_rng_tracker()
    state = {
        "layout": _layout(mesh),
        "torch": torch.get_rng_state(),
        "python": json.dumps(random.getstate()),
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            position,
            has_gauss,
            cached,
        ],
        "megatron": dict(tracker.get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any], mesh: Mesh) -> None:
    """Restore the result of `random_state`. The state of another layout is ignored."""
    if state["layout"] != _layout(mesh):
        return
    torch.set_rng_state(state["torch"])
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _layout(mesh: Mesh) -> dict[str, int]:
    sizes = {"tensor": mesh.tp_size, "pipeline": mesh.pp_size, "context": mesh.cp_size}
    return {"world_size": mesh.world_size, **sizes}
