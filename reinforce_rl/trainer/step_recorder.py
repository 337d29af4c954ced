"""Records what each training step took and gave, off the critical path.

Checksums are computed while the next rollouts are made.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.megatron.checkpointer import random_state
from reinforce_rl.megatron.optimizer import MegatronOptimizer, states_by_weight
from reinforce_rl.monitoring.step_record import RankState, StepRecord, drop_records
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.runtime.settings import files_of_functions, set_keys
from reinforce_rl.trainer.updates import LOSS, SUM

if TYPE_CHECKING:
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

_WIDTH = 4096
_MIX = 0x1E3779B97F4A7C15
_PACKAGES = ("reinforce_rl", "torch", "megatron-core", "transformers", "numpy")

Sums = dict[str, Tensor]
Numbers = Mapping[str, float]
# A record without its checksums, what computes them, and this rank's numbers of each update.
PendingRecord = tuple[StepRecord, Future[RankState] | Callable[[], RankState], list[Numbers]]


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of 2- or 4-byte elements: int64 [], modulo 2^64.

    One pass, without a host sync. It tells weights apart that differ anywhere, but not all rows of
    a matrix that changed places.
    """
    words = tensor.detach().contiguous().view(-1).view(torch.int16)
    if words.data_ptr() % 8:
        words = words.clone()
    rows = words.numel() // (4 * _WIDTH)
    block = words[: rows * 4 * _WIDTH].view(torch.int64).view(rows, _WIDTH).sum(0)
    rest = words[rows * 4 * _WIDTH :].long()
    places = torch.arange(1, 4 * _WIDTH + 1, device=tensor.device)
    return (block * places[:_WIDTH]).sum() * _MIX + (rest * places[: len(rest)]).sum()


class StepRecorder:
    """Writes a `StepRecord` of each step; `seconds` is how long the last one held training up.

    Args:
        folder: the run's.
        rm: whose identity is recorded, if it has one.
        keep: newest steps whose record is kept.
    """

    def __init__(
        self,
        folder: str | Path,
        cfg: TrainConfig,
        model: MegatronGPTReinforceActorModel,
        optimizer: MegatronOptimizer,
        rm: RewardSource | None,
        keep: int,
    ):
        mesh = model.mesh
        self.seconds = 0.0
        self._folder = Path(folder)
        self._keep = keep
        self._mesh = mesh
        self._model = model
        self._optimizer = optimizer
        parameters = model.lm.named_parameters()
        self._weights = {name: weight for name, weight in parameters if weight.requires_grad}
        # A GPU computes the sums by itself once they are launched; on a CPU a thread does.
        self._thread = ThreadPoolExecutor(1, "step record") if mesh.device.type == "cpu" else None
        self._pending: PendingRecord | None = None
        self._known: dict[str, str] = {}  # checksums of the present weights
        versions = {name: _version(name) for name in _PACKAGES}
        settings = set_keys(cfg.model_dump(), TrainConfig)
        self._facts: dict[str, Any] = {
            "software": {"python": platform.python_version(), **versions},
            "machine": {"device": _device(mesh.device), "threads": torch.get_num_threads()},
            "layout": {**vars(mesh.layout), "world_size": mesh.world_size},
            "settings": {setting.key: setting.value for setting in settings},
            "files": files_of_functions(cfg),
            "scorer": getattr(rm, "identity", None),
            "reference": None,
        }

    def before_update(self) -> None:
        """Finish the record of the step before; the weights may change from here on."""
        began = time.perf_counter()
        self.present()
        self.seconds = time.perf_counter() - began

    def present(self) -> dict[str, str]:
        """Return the checksums of this rank's weights, as in `RankState`, after `finish`."""
        self.finish()
        if not self._known:  # the first step of this process
            self._facts["reference"] = self._reference()
            sums = {name: checksum(weight) for name, weight in self._weights.items()}
            self._known = _as_hex(sums)
        return self._of_copy(self._known)

    def record_of(self, step: int, past: Mapping[str, Any], data: Mapping[str, Any]) -> StepRecord:
        """Return the record of a step without what the step gives."""
        return StepRecord(step=step, past=dict(past), updates=[], data=dict(data), **self._facts)

    def after_update(
        self,
        step: int,
        updates: Sequence[Numbers],
        past: Mapping[str, Any],
        data: Mapping[str, Any],
    ) -> None:
        """Begin the record of a step.

        `updates` are this rank's numbers of each optimizer step; `LOSS` and numbers whose names
        begin with `SUM` are added over all ranks. `past` is `RunningBaselines.state_dict` from
        before the step, `data` the loader's position after it.
        """
        began = time.perf_counter()
        record = self.record_of(step, past, data)
        launch = self._launching()
        thread = self._thread
        state = launch() if thread is None else thread.submit(lambda: launch()())
        self._pending = record, state, list(updates)
        self.seconds += time.perf_counter() - began

    def finish(self) -> None:
        """Write the record that was begun; a collective call."""
        if self._pending is None:
            return
        record, pending, updates = self._pending
        self._pending = None
        state = pending.result() if isinstance(pending, Future) else pending()
        self._known = state.after
        state = replace(
            state,
            before=self._of_copy(state.before),
            after=self._of_copy(state.after),
            optimizer=self._of_copy(state.optimizer),
        )
        # The ranks of a block have the same numbers.
        block_updates = updates if self._mesh.is_model_parallel_rank_0 else None
        parts = self._mesh.gather_on_main((state, block_updates))
        if parts:
            updates_of_blocks = [numbers for _, numbers in parts if numbers is not None]
            record = replace(
                record,
                updates=_added(updates_of_blocks),
                ranks=[rank_state for rank_state, _ in parts],
            )
            record.write(self._folder)
            drop_records(self._folder, up_to=record.step - self._keep)

    def _of_copy(self, sums: dict[str, str]) -> dict[str, str]:
        # Copies of the first data-parallel rank's, but for a distributed optimizer.
        return _total(sums) if self._mesh.dp_rank else sums

    def _launching(self) -> Callable[[], Callable[[], RankState]]:
        """Return what starts the sums of the present tensors, which returns what waits for them."""
        # Not the parameters: while the reference computes, they point to its weights.
        weights = {name: weight.detach() for name, weight in self._weights.items()}
        names = {id(weight): name for name, weight in self._weights.items()}
        optimizer_states: dict[str, Tensor] = {}
        for weight, tensors in states_by_weight(self._optimizer):
            for kind, tensor in tensors.items():
                optimizer_states[f"{names[id(weight)]}.{kind}"] = tensor.detach()
        rank = self._mesh.rank
        before = self._known
        random = _random_digest(self._mesh)

        def launch() -> Callable[[], RankState]:
            after = {name: checksum(tensor) for name, tensor in weights.items()}
            optimizer = {name: checksum(tensor) for name, tensor in optimizer_states.items()}
            return lambda: RankState(rank, before, _as_hex(after), _as_hex(optimizer), random)

        return launch

    def _reference(self) -> str | None:
        weights = enumerate(self._model.reference_weights())
        sums = {str(i): checksum(weight).cpu() for i, weight in weights}
        return _total(_as_hex(sums)).get("all")


def _as_hex(sums: Sums) -> dict[str, str]:
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: f"{value % 2**64:016x}" for name, value in zip(sums, values, strict=True)}


def _total(sums: Mapping[str, str]) -> dict[str, str]:
    return {"all": hashlib.sha256("".join(sums.values()).encode()).hexdigest()[:16]} if sums else {}


def _added(of_ranks: Sequence[Sequence[Numbers]]) -> list[dict[str, float]]:
    """Add up the sums of all ranks; the other numbers are the same on each."""
    totals = []
    for updates in zip(*of_ranks, strict=True):
        names = dict.fromkeys(name for numbers in updates for name in numbers)
        total = {}
        for name in names:
            if name.startswith((LOSS, SUM)):
                total[name] = sum(numbers.get(name, 0.0) for numbers in updates)
            else:
                total[name] = updates[0][name]
        totals.append(total)
    return totals


def _random_digest(mesh: Any) -> str:
    content = io.BytesIO()
    torch.save(random_state(mesh), content)
    return hashlib.sha256(content.getvalue()).hexdigest()[:16]


def _device(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {os.cpu_count()} cores"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
