"""Dense decoder as a megatron-core `GPTModel`; actor, reference and reward model are all `CausalLM`.

Notation: b batch, s sequence, h hidden, d head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MegatronModule
from torch import Tensor

from reinforce_rl.megatron.architecture import Architecture, with_old_rope_keys
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.attention import positions_below, zigzag_positions
from reinforce_rl.megatron.model.fast_decode import decode_layers, products_without_gradient
from reinforce_rl.megatron.model.kv_cache import FlashCache, KVCache
from reinforce_rl.megatron.model.layers import LINEAR, block_spec
from reinforce_rl.megatron.model.transformer_config import DEFAULT_OPTIONS, ModelOptions, transformer_config

Cache = TypeVar("Cache", KVCache, FlashCache)


@dataclass(frozen=True)
class VocabShard:
    """Token ids owned by this tensor-parallel rank."""

    start: int  # first token id
    size: int  # may be 0; any further rows of the rank's output weight are padding
    group: dist.ProcessGroup


class CausalLM(GPTModel):
    """GPTModel that returns hidden states, applies RoPE at explicit `position_ids`, and takes a KV cache.

    Stock GPTModel computes logits at every position and ignores `position_ids` for RoPE.

    Args:
        architecture: with `num_labels`, the output layer is replaced by a linear head `score` on the last stage.

    Raises:
        ConfigError: the layout does not fit the model, or megatron rejects an option.
    """

    def __init__(
        self,
        architecture: Architecture,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        options: ModelOptions = DEFAULT_OPTIONS,
    ):
        sizes = architecture.padded(mesh.tp_size)
        inverse_frequencies, rope_scale = rope_parameters(architecture)
        config = transformer_config(architecture, mesh.layout, mesh.pp_rank, mesh.device, dtype, rope_scale, options)
        block = block_spec(architecture, config, mesh.pp_rank, transformer_engine=options.transformer_engine)
        super().__init__(
            config,
            block,  # type: ignore[arg-type]
            vocab_size=sizes.vocab_size,
            max_sequence_length=architecture.max_positions,
            pre_process=mesh.pp_rank == 0,
            post_process=mesh.is_last_stage,
            parallel_output=True,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=architecture.tied_embeddings,
        )
        if architecture.num_labels is not None and self.post_process:
            del self.output_layer  # megatron always creates one
            self.score = torch.nn.Linear(
                architecture.hidden_size, architecture.num_labels, bias=False, dtype=dtype, device=mesh.device
            )
        self.architecture, self._sizes = architecture, sizes
        self.mesh, self._plain_layers = mesh, not options.overrides
        self._decodes_fast = False
        self._inv_freq = inverse_frequencies.to(mesh.device)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: KVCache | FlashCache | None = None,
        packed: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [b, s', h] at `own_positions(s)` after the final norm, the same on every tensor-parallel rank.

        Stages before the last return megatron's layout: sequence first, padding included. Later stages need
        `set_input_tensor` first.

        Args:
            input_ids: int64 [b, s], right-padded, the same on every rank of a block.
            position_ids: int64 [b, s], with `cache` or `packed`; None means 0 .. s-1.
            cache: extended by this call. Only in `whole_sequences`; each context-parallel rank decodes its own rows.
            packed: layout of the single row; positions are then not cut over context-parallel ranks.
        """
        length = input_ids.shape[1]
        is_padded = cache is None and packed is None
        if is_padded:
            positions = self._padded_positions(length)
            # Padding lies last, so the causal mask hides it.
            input_ids = input_ids[:, positions.clamp(max=length - 1)]
            positions = positions[None, :]
        elif position_ids is None:
            positions = torch.arange(length, device=input_ids.device)[None, :]
        else:
            positions = position_ids
        angles = positions.to(torch.float32).t()[:, :, None] * self._inv_freq  # [s, b or 1, d/2]
        rotary = torch.cat((angles, angles), dim=-1)[:, :, None, :]
        embedded = self.embedding(input_ids=input_ids, position_ids=positions) if self.pre_process else None
        if cache is not None and position_ids is not None and self._decodes_fast and self._plain_layers:
            hidden = decode_layers(self.decoder, embedded, rotary, cache)
        else:
            hidden = self.decoder(
                hidden_states=embedded, attention_mask=cache, rotary_pos_emb=rotary, packed_seq_params=packed
            )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # The output layer already sums gradients over ranks, so the backward pass only slices.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.mesh.tp_group
            )
        hidden = hidden.transpose(0, 1)
        return hidden[:, : self._number_of_own(length)] if is_padded else hidden

    def own_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the positions in 0 .. length-1 that this context-parallel rank holds: int64, ascending."""
        return self._padded_positions(length, device)[: self._number_of_own(length)]

    def stage_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        """Return [s', b, h], the shape passed between stages for `rows` sequences of `length` tokens."""
        padded = self._padded_length(length) // self.mesh.cp_size
        shared = padded // self.mesh.tp_size if self.mesh.sequence_parallel else padded
        return shared, rows, self.architecture.hidden_size

    def _padded_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        padded, mesh = self._padded_length(length), self.mesh
        if mesh.cp_size == 1:
            return torch.arange(padded, device=device or mesh.device)
        return zigzag_positions(padded, mesh.cp_size, mesh.cp_rank, device or mesh.device)

    def _padded_length(self, length: int) -> int:
        multiple = self.mesh.sequence_multiple
        return -(-length // multiple) * multiple

    def _number_of_own(self, length: int) -> int:
        if self.mesh.cp_size == 1:
            return length
        # Padding comes last on every rank; counting without the tensor avoids a GPU sync.
        return positions_below(length, self._padded_length(length), self.mesh.cp_size, self.mesh.cp_rank)

    @contextlib.contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Disable sequence parallelism inside the block, since one token cannot be split; inference only."""
        switches = [
            (module, name)
            for module in (self.config, *self.modules())
            for name in (
                "sequence_parallel",
                "scatter_to_sequence_parallel",
                "reduce_scatter_embeddings",
                "apply_rope_fusion",  # the kernel supports one position for all rows only
            )
            if getattr(module, name, False)
        ]
        for module, name in switches:
            setattr(module, name, False)
        try:
            yield
        finally:
            for module, name in switches:
                setattr(module, name, True)

    @contextlib.contextmanager
    def fast_decoding(self) -> Iterator[None]:
        """Decode with `fast_decode` on the current weights, without gradient; only within `whole_sequences`."""
        head = getattr(self, "output_layer", None)  # on the last stage; it may have no weight of its own
        layers: list[Any] = [m for m in self.modules() if isinstance(m, LINEAR)]
        weights = {layer: self.output_weight if layer is head else layer.weight for layer in layers}
        with products_without_gradient(weights):
            self._decodes_fast = True
            try:
                yield
            finally:
                self._decodes_fast = False

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        if self.architecture.num_labels is None:
            state = super().sharded_state_dict(*args, **options)
        else:
            state = MegatronModule.sharded_state_dict(self, *args, **options)
        # Drop FP8 scales: empty here, and Transformer Engine's extra ones would make checkpoints incompatible.
        return {name: entry for name, entry in state.items() if not name.endswith("_extra_state")}

    @property
    def output_weight(self) -> Tensor:
        """Return [V / tp, h], this rank's rows of the output layer or of the tied input embedding."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight  # type: ignore[return-value]

    @property
    def vocab_shard(self) -> VocabShard:
        rows = self._sizes.vocab_size // self.mesh.tp_size
        start = self.mesh.tp_rank * rows
        size = min(max(self.architecture.vocab_size - start, 0), rows)
        return VocabShard(start, size, self.mesh.tp_group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits in at least float32: [n, h] to [n, V / tp], padded columns at -inf."""
        out = self.output_layer(hidden[:, None, :], weight=self.output_weight)[0][:, 0]
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        true_columns = self.vocab_shard.size
        if true_columns < out.shape[1]:
            columns = torch.arange(out.shape[1], device=out.device)
            out = out.masked_fill(columns >= true_columns, float("-inf"))
        return out

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the whole vocabulary on every rank, without gradient: [n, h] to [n, V]."""
        with torch.no_grad():
            gathered = tensor_parallel.gather_from_tensor_model_parallel_region(self.logits(hidden))
        return gathered[:, : self.architecture.vocab_size]

    def new_cache(
        self, prompts: int, prompt_tokens: int, rows: int, response_tokens: int, kind: type[Cache] = KVCache
    ) -> Cache:
        """Return an empty cache for this stage's layers; see `KVCache` for the sizes."""
        layers: Any = self.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0  # megatron counts from 1
        return kind(
            layers=range(first, first + len(layers)),
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            rows=rows,
            response_tokens=response_tokens,
            groups=self._sizes.num_groups // self.mesh.tp_size,
            head_size=self.architecture.head_size,
            dtype=self.config.params_dtype,
            device=self.mesh.device,
            window=self.architecture.window,
        )


def rope_parameters(architecture: Architecture) -> tuple[Tensor, float]:
    """Return RoPE's inverse frequencies, float32 [d / 2], and its attention scaling, as transformers computes them.

    The scaling (YaRN only) applies to both queries and keys, so attention scores scale by its square.
    """
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = architecture.raw
    if transformers.__version__.startswith("4."):
        values = with_old_rope_keys(values)
    config: Any = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, float(rotary.attention_scaling)
