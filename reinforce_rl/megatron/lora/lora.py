"""LoRA on the projections of a tensor-parallel model: frozen weights, and small updates of them that are trained.

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
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from reinforce_rl.megatron.lora.map import SUBMODULE, LoraRow, LoraSettings, lora_map
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.weights.hf_weights import parameters_of
from reinforce_rl.megatron.weights.weight_map import Row, weight_map


class LowRank(torch.nn.Module):
    """A and B of one projection.

    Args:
        row: which.
        settings: of the updates.
        like: the layer's weight, for dtype and device.
        tp_rank: this rank.
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
        rows: its updates.
        blocks: all projections that lie in its weight, in the order of their rows, these among them.
        settings: of the updates.
        mesh: this rank's place.
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
