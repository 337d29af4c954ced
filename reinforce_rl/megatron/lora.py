"""LoRA (arXiv:2106.09685): trained low-rank updates of frozen weights.

`alpha / r * B A` is added to a frozen W [out, in], with A [r, in] and B [out, r]. A column-parallel
weight and its B are split along `out`; a row-parallel weight and its A along `in`. The other matrix
is replicated, and its gradient needs no sum: megatron's region functions act on the r numbers
between A and B. With sequence parallelism megatron sums the gradient as it does for norms.

An update is a submodule of megatron's layer and adds to its output by a forward hook, which
preserves parameter names. Each Hugging Face projection has its own update, at its rows of a fused
output.

Notation: s sequence, b batch, r rank of the update.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from reinforce_rl.errors import CheckpointError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_weights import hf_tensors, parameters_of, save_tensors
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weight_map import Row, Split, weight_map
from reinforce_rl.utils.files import replace_folder, space_note

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SUBMODULE = "lora"  # name of the updates in a megatron layer
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."  # of PEFT's names, which start at its wrapper of the model


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float  # updates are scaled by alpha / rank
    targets: tuple[str, ...]  # Hugging Face projection names, in the order of `PROJECTIONS`
    seed: int = 0  # of the initial A

    @classmethod
    def from_names(
        cls, rank: int, alpha: float, target_modules: Sequence[str], seed: int
    ) -> LoraSettings:
        """Build settings; "all" in `target_modules` selects every projection."""
        named = tuple(name for name in PROJECTIONS if {"all", name} & {*target_modules})
        return cls(rank, alpha, named, seed)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def identity(self, base_weights: str) -> dict[str, Any]:
        """Return the values that identify updates in a checkpoint.

        `base_weights` is the `HFFolder.fingerprint` of the frozen weights.
        """
        settings = {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}
        return {**settings, "base_weights": base_weights}


class LoraRow(NamedTuple):
    projection: str  # Hugging Face name, such as q_proj
    base: Row  # the updated weight
    a: Row  # A, as in PEFT's folder and in megatron's layer
    b: Row


def lora_map(arch: Architecture, tp_size: int, settings: LoraSettings) -> list[LoraRow]:
    """Return every update of a model, layer by layer, in the order of `weight_map`."""
    rows = []
    for base in weight_map(arch, tp_size):
        projection = base.hf.split(".")[-2]
        if projection in settings.targets and base.hf.endswith(".weight"):
            rows.append(_lora_row(base, projection, settings.rank))
    return rows


def _lora_row(base: Row, projection: str, rank: int) -> LoraRow:
    split: Any = base.split
    # Here each projection has rows of its own, not rows of a fused weight.
    own_split: Split = replace(split, width=split.size, offset=0)
    out_size, in_size = base.shape
    layer = base.megatron.removesuffix(".weight")

    def matrix(name: str, shape: tuple[int, int], cut: bool) -> Row:
        hf = f"{base.hf.removesuffix('.weight')}.{name}.weight"
        return Row(
            hf,
            f"{layer}.{SUBMODULE}.{projection}.{name}",
            shape,
            base.tp_size,
            own_split if cut else None,
        )

    a = matrix("lora_A", (rank, in_size), split.axis == 1)
    b = matrix("lora_B", (out_size, rank), split.axis == 0)
    return LoraRow(projection, base, a, b)


class LowRank(torch.nn.Module):
    """A and B of one projection.

    `sequence_parallel` marks replicated matrices for megatron's sum of gradients.
    """

    def __init__(
        self,
        row: LoraRow,
        settings: LoraSettings,
        like: Tensor,
        tp_rank: int,
        sequence_parallel: bool,
    ):
        super().__init__()
        values = initial_a(row.a, settings.seed), torch.zeros(row.b.shape)
        for name, matrix, whole in zip(("lora_A", "lora_B"), (row.a, row.b), values, strict=True):
            local_part = torch.zeros(matrix.local_shape)  # padding stays zero
            matrix.place(local_part, tp_rank).copy_(matrix.part_in(whole, tp_rank))
            parameter: Any = torch.nn.Parameter(local_part.to(like.device, like.dtype))
            if matrix.split is None:
                parameter.sequence_parallel = sequence_parallel
            else:
                # Without this the gradient norm would count only the first rank's share.
                tensor_parallel.set_tensor_model_parallel_attributes(
                    parameter, True, matrix.split.axis, 1
                )
            self.register_parameter(name, parameter)


def initial_a(row: Row, seed: int) -> Tensor:
    """Draw A like PEFT (Kaiming uniform, a = sqrt(5)): float32 [r, in], equal for every layout."""
    key = hashlib.sha256(f"{seed}:{row.hf}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    whole = torch.empty(row.shape)
    torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole


class LayerUpdates(torch.nn.Module):
    """The updates of one megatron layer.

    `blocks` are all projections in its weight, in row order.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        rows: list[LoraRow],
        blocks: list[Row],
        settings: LoraSettings,
        mesh: Mesh,
    ):
        super().__init__()
        self.settings = settings
        self.enabled = True
        self._rows = rows
        self._blocks = blocks
        self._group = mesh.tp_group
        self.weight_name = blocks[0].megatron  # in `parameters_of`
        weight: Any = layer.weight
        for row in rows:
            pair = LowRank(row, settings, weight, mesh.tp_rank, bool(layer.sequence_parallel))
            self.add_module(row.projection, pair)

    def hook(
        self, layer: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]
    ) -> Any:
        """Forward hook: return the layer's output with the updates added."""
        if not self.enabled:
            return outputs
        output, bias = outputs
        split: Any = self._blocks[0].split
        update = self._of_rows if split.axis else self._of_columns
        return output + update(inputs[0], layer.sequence_parallel), bias

    def _of_columns(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """Map [s, b, in], or this rank's part of s, to this rank's columns [s, b, out / tp]."""
        low = (
            torch.cat([F.linear(x, self.pair(row).lora_A) for row in self._rows], dim=-1)
            * self.settings.scale
        )
        # The backward pass sums each rank's part of the gradient of `low`, for both A and x.
        if sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low, group=self._group)
        else:
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low, group=self._group)
        parts = zip(self._rows, low.split(self.settings.rank, dim=-1), strict=True)
        updates = {row.base: F.linear(part, self.pair(row).lora_B) for row, part in parts}
        blocks = []
        for block in self._blocks:
            split: Any = block.split
            width = split.padded_units // block.tp_size * split.size
            update = updates[block] if block in updates else low.new_zeros((*low.shape[:-1], width))
            blocks.append(update.unflatten(-1, (-1, split.size)))
        return torch.cat(blocks, dim=-1).flatten(-2)

    def _of_rows(self, x: Tensor, sequence_parallel: bool) -> Tensor:
        """Map this rank's columns [s, b, in / tp] to [s, b, out], or to this rank's part of s."""
        (row,) = self._rows
        pair = self.pair(row)
        low = F.linear(x, pair.lora_A) * self.settings.scale
        if sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        else:
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low, group=self._group)
        return F.linear(low, pair.lora_B)

    def pair(self, row: LoraRow) -> Any:
        return self.get_submodule(row.projection)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of W + scale B A, added in at least float32."""
        total = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for row in self._rows:
            pair = self.pair(row)
            split = row.base.split
            assert split is not None
            update = self.settings.scale * (
                pair.lora_B.to(total.dtype) @ pair.lora_A.to(total.dtype)
            )
            units = total.unflatten(split.axis, (-1, split.width)).narrow(
                split.axis + 1, split.offset, split.size
            )
            units += update.unflatten(split.axis, (-1, split.size))
        return total.to(weight.dtype)


def add_lora(lm: CausalLM, settings: LoraSettings) -> None:
    """Freeze the model and attach updates with B = 0.

    Call after loading weights and before `wrap_data_parallel`.
    """
    lm.requires_grad_(False)
    arch = lm.architecture
    mesh = lm.mesh
    blocks = weight_map(arch, mesh.tp_size)
    updates = lora_map(arch, mesh.tp_size, settings)
    modules: Any = lm.decoder.layers
    for module in modules:
        prefix = f"decoder.layers.{module.layer_number - 1}."  # megatron counts from 1
        for name in dict.fromkeys(
            row.base.megatron for row in updates if row.base.megatron.startswith(prefix)
        ):
            layer: Any = module.get_submodule(name.removeprefix(prefix).removesuffix(".weight"))
            trained = [row for row in updates if row.base.megatron == name]
            layer_updates = LayerUpdates(
                layer, trained, [row for row in blocks if row.megatron == name], settings, mesh
            )
            layer.add_module(SUBMODULE, layer_updates)
            layer.register_forward_hook(layer_updates.hook)
    if lm.pre_process:
        lm.embedding.register_forward_hook(_keep_gradients)


def _keep_gradients(embedding: Any, inputs: Any, output: Tensor) -> None:
    # Recomputed layers need an input that requires a gradient, but the embedding is frozen.
    if torch.is_grad_enabled() and embedding.config.recompute_granularity == "full":
        output.requires_grad_()


def updates_of(lm: CausalLM) -> list[LayerUpdates]:
    """Return the updates of this rank's layers, in order; empty without LoRA."""
    return [module for module in lm.modules() if isinstance(module, LayerUpdates)]


def lora_settings_of(lm: CausalLM) -> LoraSettings | None:
    """Return the model's LoRA settings; None without LoRA."""
    updates = updates_of(lm)
    return updates[0].settings if updates else None


@contextlib.contextmanager
def updates_off(lm: CausalLM) -> Iterator[None]:
    """Disable the updates inside the block, which leaves the frozen base."""
    enabled = [updates for updates in updates_of(lm) if updates.enabled]
    for updates in enabled:
        updates.enabled = False
    try:
        yield
    finally:
        for updates in enabled:
            updates.enabled = True


class MergedWeights(Mapping[str, Tensor]):
    """This rank's weights with updates added, keyed as in `parameters_of`.

    Each weight is computed when it is read.
    """

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
    """Return A and B of every update of the whole model; empty without LoRA."""
    settings = lora_settings_of(lm)
    if settings is None:
        return []
    return [
        matrix
        for row in lora_map(lm.architecture, lm.mesh.tp_size, settings)
        for matrix in (row.a, row.b)
    ]


def trained_state(lm: CausalLM) -> dict[str, Any]:
    """Return the sharded state to save: all weights, or only the updates under PEFT's names."""
    rows = {row.megatron: row for row in adapter_rows(lm)}
    if not rows:
        return lm.sharded_state_dict()
    parameters = parameters_of(lm)
    local_names = {id(parameter): name for name, parameter in lm.named_parameters()}
    state = {}
    for name, row in rows.items():
        if name not in parameters:
            continue  # on another stage
        axes = {} if row.split is None else {row.hf: row.split.axis}
        sharded = make_sharded_tensors_for_checkpoint({row.hf: parameters[name]}, "", axes)
        state[local_names[id(parameters[name])]] = sharded[row.hf]
    return state


def export_adapter(lm: CausalLM, source: str | Path, out: str | Path) -> Path:
    """Write PEFT's folder for the base model `source` atomically; a collective call.

    Raises CheckpointError if it cannot be written.
    """
    out = Path(out)
    mesh = lm.mesh
    settings = lora_settings_of(lm)
    if settings is None:
        raise ValueError("this model has no updates to export")
    tensors: dict[str, Any] = {}
    if mesh.dp_rank == mesh.cp_rank == 0:
        tensors = {PREFIX + name: tensor for name, tensor in hf_tensors(lm, rows=adapter_rows(lm))}
    part = out.with_name(out.name + ".part")

    def failed(error: BaseException) -> CheckpointError:
        space = space_note(error, part)
        shutil.rmtree(part, ignore_errors=True)
        return CheckpointError(
            f"cannot write the PEFT folder {out}: {error}{space}",
            key="lora.folder.not_written",
        )

    with mesh.raise_on_all_ranks(failed):
        if mesh.is_main:
            shutil.rmtree(part, ignore_errors=True)
            write_adapter(tensors, settings, source, part)
            replace_folder(part, out)
    return out


def write_adapter(
    tensors: dict[str, Tensor], settings: LoraSettings, source: str | Path, out: Path
) -> None:
    """Write unsharded updates with PEFT's names, and PEFT's configuration, into a new folder."""
    out.mkdir(parents=True)
    save_tensors(tensors, out / WEIGHTS_FILE)
    config = json.dumps(peft_config(settings, source), indent=2)
    (out / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")


def peft_config(settings: LoraSettings, source: str | Path) -> dict[str, Any]:
    """Return the settings for `peft.LoraConfig` that differ from its defaults."""
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(source)}
    sizes = {"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": 0.0}
    return {
        **kind,
        "inference_mode": True,
        **sizes,
        "target_modules": list(settings.targets),
        "bias": "none",
    }


def check_lora_identity(
    mine: dict[str, Any] | None, checkpoint: str | Path, trainer_state: dict[str, Any]
) -> None:
    """Raise CheckpointError if a checkpoint's weights do not belong to this run.

    `mine` is this run's `LoraSettings.identity`; None without LoRA.
    """
    stored: dict[str, Any] | None = trainer_state.get("lora")
    if stored == mine:
        return
    if stored is None or mine is None:
        kinds = ("all weights", "LoRA updates only")
        stored_kind = kinds[stored is not None]
        expected_kind = kinds[mine is not None]
        raise CheckpointError(
            f"checkpoint {checkpoint} holds {stored_kind}, but this run has {expected_kind} "
            "(model.peft.peft_scheme); resume with the run's own configuration, "
            "or choose another exp_manager.explicit_log_dir",
            key="lora.checkpoint.another_scheme",
        )
    tuning = "model.peft.lora_tuning"
    keys = {
        "rank": f"{tuning}.adapter_dim",
        "alpha": f"{tuning}.alpha",
        "targets": f"{tuning}.target_modules",
    }
    keys["base_weights"] = "the weights of pretrained_checkpoint.restore_from_path (fingerprint)"
    differ = [key for key in mine if stored.get(key) != mine[key]]
    pairs = [f"{keys[key]}: {stored.get(key)} there, {mine[key]} here" for key in differ]
    differences = "; ".join(pairs)
    raise CheckpointError(
        f"checkpoint {checkpoint} has LoRA updates of another model or shape: {differences}. "
        "Resume with the model and LoRA settings of the run, or choose another "
        "exp_manager.explicit_log_dir",
        key="lora.checkpoint.other_updates",
    )
