"""LoRA (arXiv:2106.09685): frozen weights, and low-rank updates of them that are trained.

`alpha / r * B A` is added to a frozen weight W [out, in], with A [r, in] and B [out, r]. A column-parallel weight is
cut along `out`, and so is B; a row-parallel one along `in`, and so is A. The other matrix is whole on every rank.

An update is a submodule of megatron's layer and adds to its output by a forward hook, so the layer's own parameters
keep their names. Each Hugging Face projection has an update of its own, added at its rows of a fused output.

Gradients of what every rank holds whole (A of a column-parallel layer, B of a row-parallel one) need no sum
afterwards: the ranks meet at the r numbers between A and B, where megatron's region functions do what the layer itself
does at its input or output. With sequence parallelism each rank has them of its own positions only, and megatron sums
them as it does those of the norms.

Notation: s sequence, b batch, r rank of the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weights.hf_weights import hf_tensors, parameters_of
from reinforce_rl.megatron.weights.weight_map import Row, Split, weight_map
from reinforce_rl.utils.files import replace_folder

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL = "all"
# Of a megatron layer, where its updates are submodules.
SUBMODULE = "lora"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
# PEFT's names begin at its own wrapper of the model.
PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSettings:
    """Rank, scale and targets of the updates."""

    rank: int  # r
    alpha: float  # an update is scaled by alpha / r
    targets: tuple[str, ...]  # Hugging Face's names of the projections that have one, in the order of `PROJECTIONS`
    seed: int = 0  # of A

    @classmethod
    def from_names(cls, rank: int, alpha: float, target_modules: Sequence[str], seed: int) -> LoraSettings:
        """With "all" for every projection."""
        named = tuple(name for name in PROJECTIONS if ALL in target_modules or name in target_modules)
        return cls(rank, alpha, named, seed)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class LoraRow:
    """The update of one projection."""

    projection: str  # Hugging Face's name of it in its layer, such as q_proj
    base: Row  # the weight that it is added to
    a: Row  # A, as in PEFT's folder and in megatron's layer
    b: Row


def lora_map(arch: Architecture, tp_size: int, settings: LoraSettings) -> list[LoraRow]:
    """Every update of a model, layer by layer, in the order of `weight_map`."""
    found = []
    for base in weight_map(arch, tp_size):
        projection = base.hf.split(".")[-2]
        if projection in settings.targets and base.hf.endswith(".weight"):
            found.append(_lora_row(base, projection, settings.rank))
    return found


def _lora_row(base: Row, projection: str, rank: int) -> LoraRow:
    split = base.split
    assert split is not None
    # Each projection has rows of its own here, and does not share them with the others of a fused weight.
    own: Split = replace(split, width=split.size, offset=0)
    out_size, in_size = base.shape
    layer = base.megatron.removesuffix(".weight")

    def matrix(name: str, shape: tuple[int, int], cut: bool) -> Row:
        return Row(
            hf=f"{base.hf.removesuffix('.weight')}.{name}.weight",
            megatron=f"{layer}.{SUBMODULE}.{projection}.{name}",
            shape=shape,
            tp_size=base.tp_size,
            split=own if cut else None,
        )

    a = matrix("lora_A", (rank, in_size), split.axis == 1)
    b = matrix("lora_B", (out_size, rank), split.axis == 0)
    return LoraRow(projection, base, a, b)


class LowRank(torch.nn.Module):
    """A and B of one projection.

    Args:
        sequence_parallel: positions are shared by the ranks, and with them the gradients of what is whole.
    """

    def __init__(self, row: LoraRow, settings: LoraSettings, like: Tensor, tp_rank: int, sequence_parallel: bool):
        super().__init__()
        values = initial_a(row.a, settings.seed), torch.zeros(row.b.shape)
        for name, matrix, whole in zip(("lora_A", "lora_B"), (row.a, row.b), values, strict=True):
            own = torch.zeros(matrix.local_shape)  # what is not filled below is padding, and stays zero
            matrix.place(own, tp_rank).copy_(matrix.part_in(whole, tp_rank))
            parameter: Any = torch.nn.Parameter(own.to(like.device, like.dtype))
            if matrix.split is None:
                parameter.sequence_parallel = sequence_parallel
            else:  # else the norm of the gradient would count the first rank's share only
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, matrix.split.axis, 1)
            self.register_parameter(name, parameter)


def initial_a(row: Row, seed: int) -> Tensor:
    """A as PEFT draws it (Kaiming's uniform distribution, a = sqrt(5)): float32 [r, in], the same at any layout."""
    key = hashlib.sha256(f"{seed}:{row.hf}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    whole = torch.empty(row.shape)
    torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole


class LayerUpdates(torch.nn.Module):
    """The updates of one megatron layer.

    Args:
        layer: a ColumnParallelLinear or a RowParallelLinear.
        blocks: all projections that lie in its weight, in the order of their rows, these among them.
    """

    def __init__(
        self, layer: torch.nn.Module, rows: list[LoraRow], blocks: list[Row], settings: LoraSettings, mesh: Mesh
    ):
        super().__init__()
        self.settings, self.enabled = settings, True
        self._rows, self._blocks, self._group = rows, blocks, mesh.tp_group
        weight: Any = layer.weight
        for row in rows:
            pair = LowRank(row, settings, weight, mesh.tp_rank, bool(layer.sequence_parallel))
            self.add_module(row.projection, pair)

    def hook(self, layer: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
        """The layer's output with the updates added, as a forward hook of it."""
        if not self.enabled:
            return outputs
        output, bias = outputs
        update = self._of_rows if self._blocks[0].split.axis else self._of_columns  # type: ignore[union-attr]
        return output + update(inputs[0], layer.sequence_parallel), bias

    def _of_columns(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """[s, b, in], or the rank's part of s, to the rank's columns: [s, b, out / tp]."""
        low = torch.cat([F.linear(x, self.pair(row).lora_A) for row in self._rows], dim=-1) * self.settings.scale
        # Each rank's columns give a part of the gradient of `low`; this sums them, for A and for x alike.
        if sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, group=self._group)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self._group)
        parts = dict(zip((row.base for row in self._rows), low.split(self.settings.rank, dim=-1), strict=True))
        pairs = {row.base: self.pair(row) for row in self._rows}
        blocks = []
        for block in self._blocks:
            split = block.split
            assert split is not None
            if block in parts:
                blocks.append(F.linear(parts[block], pairs[block].lora_B).unflatten(-1, (-1, split.size)))
            else:
                units = split.padded_units // block.tp_size
                blocks.append(low.new_zeros((*low.shape[:-1], units, split.size)))
        return torch.cat(blocks, dim=-1).flatten(-2)

    def _of_rows(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """The rank's columns [s, b, in / tp] to [s, b, out], or the rank's part of s."""
        (row,) = self._rows
        pair = self.pair(row)
        low = F.linear(x, pair.lora_A) * self.settings.scale
        if sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        else:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self._group)
        return F.linear(low, pair.lora_B)

    @property
    def weight_name(self) -> str:
        """The layer's weight, as `parameters_of` names it."""
        return self._blocks[0].megatron

    def pair(self, row: LoraRow) -> Any:
        return self.get_submodule(row.projection)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """W + scale B A of this rank's part of the layer's weight, added in float32 at least."""
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for row in self._rows:
            pair, split = self.pair(row), row.base.split
            assert split is not None
            update = self.settings.scale * (pair.lora_B.to(total.dtype) @ pair.lora_A.to(total.dtype))
            units = total.unflatten(split.axis, (-1, split.width)).narrow(split.axis + 1, split.offset, split.size)
            units += update.unflatten(split.axis, (-1, split.size))
        return total.to(weight.dtype)


def add_lora(lm: CausalLM, settings: LoraSettings) -> None:
    """Freeze the model and give its projections updates, zero at first since B is.

    After the weights are loaded, and before `wrap_data_parallel`, which gives gradient buffers to what is trained.
    """
    lm.requires_grad_(False)
    arch, mesh = lm.architecture, lm.mesh
    blocks, updates = weight_map(arch, mesh.tp_size), lora_map(arch, mesh.tp_size, settings)
    modules: Any = lm.decoder.layers
    for module in modules:
        prefix = f"decoder.layers.{module.layer_number - 1}."  # megatron counts from 1
        for name in dict.fromkeys(row.base.megatron for row in updates if row.base.megatron.startswith(prefix)):
            layer: Any = module.get_submodule(name.removeprefix(prefix).removesuffix(".weight"))
            own = LayerUpdates(
                layer,
                [row for row in updates if row.base.megatron == name],
                [row for row in blocks if row.megatron == name],
                settings,
                mesh,
            )
            layer.add_module(SUBMODULE, own)
            layer.register_forward_hook(own.hook)
    if lm.pre_process:
        lm.embedding.register_forward_hook(_keep_gradients)


def _keep_gradients(embedding: Any, inputs: Any, output: Tensor) -> None:
    # A layer that is computed again in the backward pass has gradients only where its input asks for one, and nothing
    # below the first layer does: the embedding is frozen.
    if torch.is_grad_enabled() and embedding.config.recompute_granularity == "full":
        output.requires_grad_()


def updates_of(lm: CausalLM) -> list[LayerUpdates]:
    """Those of this rank's layers, in order; none where the whole model is trained."""
    return [module for module in lm.modules() if isinstance(module, LayerUpdates)]


def lora_settings_of(lm: CausalLM) -> LoraSettings | None:
    """None where the whole model is trained."""
    found = updates_of(lm)
    return found[0].settings if found else None


@contextlib.contextmanager
def updates_off(lm: CausalLM) -> Iterator[None]:
    """The model is its frozen base inside the block."""
    found = updates_of(lm)
    before = [updates.enabled for updates in found]
    for updates in found:
        updates.enabled = False
    try:
        yield
    finally:
        for updates, enabled in zip(found, before, strict=True):
            updates.enabled = enabled


class MergedWeights(Mapping[str, Tensor]):
    """This rank's weights with their updates added, named as by `parameters_of`; each is made when it is read."""

    def __init__(self, lm: CausalLM):
        self._own = parameters_of(lm)
        self._updates = {updates.weight_name: updates for updates in updates_of(lm)}

    def __getitem__(self, name: str) -> Tensor:
        weight = self._own[name].detach()
        return self._updates[name].merged(weight) if name in self._updates else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def adapter_rows(lm: CausalLM) -> list[Row]:
    """A and B of every update of the whole model; none where the whole model is trained."""
    settings = lora_settings_of(lm)
    if settings is None:
        return []
    return [matrix for row in lora_map(lm.architecture, lm.mesh.tp_size, settings) for matrix in (row.a, row.b)]


def trained_state(lm: CausalLM) -> dict[str, Any]:
    """What a checkpoint holds of the model, for megatron: all weights, or the updates alone under PEFT's names."""
    rows = {row.megatron: row for row in adapter_rows(lm)}
    if not rows:
        return lm.sharded_state_dict()
    own = parameters_of(lm)
    local_names = {id(parameter): name for name, parameter in lm.named_parameters()}
    found = {}
    for name, row in rows.items():
        if name not in own:
            continue  # of another rank's layers
        axes = {} if row.split is None else {row.hf: row.split.axis}
        sharded = make_sharded_tensors_for_checkpoint({row.hf: own[name]}, "", axes)
        found[local_names[id(own[name])]] = sharded[row.hf]
    return found


def export_adapter(lm: CausalLM, source: str | Path, out: str | Path) -> Path:
    """Write A and B of every update; a collective call of all ranks, of which the first one writes.

    Args:
        source: the folder of the base model, which PEFT's configuration names.
        out: the folder to write, whole or not at all; replaced where it exists.

    Raises:
        CheckpointError: on every rank, it cannot be written.
    """
    out, mesh, settings = Path(out), lm.mesh, lora_settings_of(lm)
    if settings is None:
        raise ValueError("this model has no updates to export")
    tensors: dict[str, Any] = {}
    if mesh.dp_rank == mesh.cp_rank == 0:
        tensors = {PREFIX + name: tensor for name, tensor in hf_tensors(lm, rows=adapter_rows(lm))}
    part = out.with_name(out.name + ".part")

    def failed(error: BaseException) -> CheckpointError:
        shutil.rmtree(part, ignore_errors=True)
        return CheckpointError(f"cannot write the PEFT folder {out}: {error}")

    with mesh.together(failed):
        if mesh.is_main:
            _write(part, tensors, peft_config(settings, source))
            replace_folder(part, out)
    return out


def peft_config(settings: LoraSettings, source: str | Path) -> dict[str, Any]:
    """What `peft.LoraConfig` reads; everything else has its default there."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(settings.targets),
        "bias": "none",
    }


def _write(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it readable by its owner only
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class LoraIdentity:
    """What the updates in a checkpoint belong to. They mean nothing on other weights or at another scale."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_weights: str  # fingerprint of the frozen weights; see `HFFolder.fingerprint`

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> LoraIdentity:
        """Inverse of `state`."""
        return cls(**{**state, "targets": tuple(state["targets"])})

    def state(self) -> dict[str, Any]:
        """For the trainer's state, which is JSON."""
        return {**dataclasses.asdict(self), "targets": list(self.targets)}


def check_lora_identity(own: LoraIdentity | None, checkpoint: str | Path, trainer_state: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights do not belong to this run.

    Args:
        own: of this run; None where the whole model is trained.

    Raises:
        CheckpointError: what differs, all in one message.
    """
    stored: dict[str, Any] | None = trainer_state.get("lora")
    mine = None if own is None else own.state()
    if stored == mine:
        return
    if stored is None or mine is None:
        kinds = ("all weights", "LoRA updates only")
        found, expected = kinds[stored is not None], kinds[mine is not None]
        raise CheckpointError(
            f"checkpoint {checkpoint} holds {found}, but this run has {expected} (model.peft.peft_scheme); "
            "go on with the run's own configuration, or choose another exp_manager.explicit_log_dir"
        )
    keys = {
        "rank": "model.peft.lora_tuning.adapter_dim",
        "alpha": "model.peft.lora_tuning.alpha",
        "targets": "model.peft.lora_tuning.target_modules",
        "base_weights": "the weights of pretrained_checkpoint.restore_from_path (fingerprint)",
    }
    differ = [key for key in mine if stored.get(key) != mine[key]]
    told = "; ".join(f"{keys[key]}: {stored.get(key)} there, {mine[key]} here" for key in differ)
    raise CheckpointError(
        f"checkpoint {checkpoint} has LoRA updates of another model or shape: {told}. Go on with what the run began "
        "with, or choose another exp_manager.explicit_log_dir"
    )
