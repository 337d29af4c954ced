"""Dense decoder as a megatron-core `GPTModel`.

Actor, reference and reward model are all `CausalLM`.

Notation: b batch, s sequence, h hidden, d head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch import Tensor

from reinforce_rl.config.parallelism import Layout
from reinforce_rl.errors import ConfigError, Fault
from reinforce_rl.megatron.architecture import Architecture, with_old_rope_keys
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.attention import positions_below, zigzag_positions
from reinforce_rl.megatron.model.decoding import (
    CacheSizes,
    FlashCache,
    KVCache,
    decode_layers,
    lean_products,
    packed_head,
)
from reinforce_rl.megatron.model.layers import LINEAR, block_spec, vocabulary_logits

# The mesh is built from these keys, so overrides would contradict it.
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)
_SET_BY_OTHER_KEYS = {name: f"model.{name}" for name in _SIZES}
for _name in ("granularity", "method", "num_layers"):
    _SET_BY_OTHER_KEYS[f"recompute_{_name}"] = f"model.activations_checkpoint_{_name}"


@dataclass(frozen=True)
class ModelOptions:
    """Options of the forward and backward computation."""

    # "selective" (core attention) or "full" (whole layers); None for no recomputation
    recompute_granularity: str | None = None
    # for "full": "uniform" (groups of layers) or "block" (a stage's first layers)
    recompute_method: str | None = None
    recompute_num_layers: int | None = None  # for "full"
    transformer_engine: bool = False  # build layers from Transformer Engine's modules; see `layers`
    # Values of further fields of megatron's TransformerConfig.
    overrides: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = ModelOptions()


def layers_of_stages(
    architecture: Architecture, layout: Layout, dtype: torch.dtype, options: ModelOptions
) -> list[int]:
    """Return the number of layers on each pipeline stage, without process groups.

    Raises the errors of `transformer_config`.
    """
    layers = []
    faults = []
    for stage in range(layout.pipeline):
        try:
            config = transformer_config(
                architecture, layout, stage, torch.device("cpu"), dtype, 1.0, options
            )
            layers.append(get_num_layers_to_build(config, pp_rank=stage))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return layers


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    stage: int,
    device: torch.device,
    dtype: torch.dtype,
    rope_scale: float,
    options: ModelOptions,
) -> TransformerConfig:
    """Build a stage's TransformerConfig.

    Raises ConfigError, which lists unknown fields of the overrides, or says what megatron rejects.
    """
    if faults := list(_faults_of_overrides(options.overrides)):
        raise ConfigError(faults)
    sizes = architecture.padded(layout.tensor)
    values: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": sizes.num_heads,
        "num_query_groups": sizes.num_groups,
        "kv_channels": architecture.head_size,
        "ffn_hidden_size": architecture.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        # This also makes megatron sum these norms' gradients over tensor-parallel ranks.
        "qk_layernorm": architecture.qk_norm,
        "window_size": None if architecture.window is None else (architecture.window - 1, 0),
        "softmax_scale": rope_scale**2 / architecture.head_size**0.5,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence_parallel,
        # Micro-batches differ in length; `schedule` computes the shapes.
        "variable_seq_lengths": layout.pipeline > 1,
        # True would sync the GPU after each send and receive, a workaround for old versions of
        # torch.
        "batch_p2p_sync": False,
        "moe_token_dispatcher_type": "alltoall",  # required by variable_seq_lengths, experts or not
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Losses already have their global denominators, so megatron must only sum them.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        # Use the layer spec's activation module, even if it is not Transformer Engine's.
        "use_te_activation_func": True,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
    }
    try:
        config = TransformerConfig(**{**values, **options.overrides})
        # It rejects a number of layers that the stages cannot share.
        layers = get_num_layers_to_build(config, pp_rank=stage)
    except (AssertionError, TypeError, ValueError) as error:  # megatron validates with asserts
        given = (
            f" with model.megatron_overrides={dict(options.overrides)}" if options.overrides else ""
        )
        sentence = f"megatron-core refuses this configuration of the model{given}: {error}"
        raise ConfigError([Fault(sentence, key="config.model.refused_by_megatron")]) from error
    group = options.recompute_num_layers
    if options.recompute_method == "uniform" and group is not None and layers % group:
        sentence = (
            f"model.activations_checkpoint_num_layers is {group}, which does not divide "
            f"the {layers} layers of stage {stage}, as activations_checkpoint_method=uniform needs"
        )
        fault = Fault(
            sentence,
            key="config.activations_checkpoint_num_layers.not_a_divisor_of_layers",
        )
        raise ConfigError([fault])
    return config


def _faults_of_overrides(overrides: Mapping[str, Any]) -> Iterator[Fault]:
    fields = [item.name for item in dataclasses.fields(TransformerConfig)]
    for name in overrides:
        key = f"model.megatron_overrides.{name}"
        if name in _SET_BY_OTHER_KEYS:
            yield Fault(
                f"{key} is what {_SET_BY_OTHER_KEYS[name]} sets; use that key",
                key="config.megatron_overrides.set_by_another_key",
            )
        elif name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            advice = (
                f"did you mean {close[0]}?"
                if close
                else "see megatron.core.transformer.TransformerConfig"
            )
            yield Fault(
                f"{key} is not a field of megatron's TransformerConfig; {advice}",
                key="config.megatron_overrides.unknown",
            )


Cache = TypeVar("Cache", KVCache, FlashCache)


@dataclass(frozen=True)
class VocabShard:
    """Token ids owned by this tensor-parallel rank."""

    start: int  # first token id
    size: int  # may be 0; further rows of the rank's output weight are padding
    group: dist.ProcessGroup


class CausalLM(GPTModel):
    """GPTModel that returns hidden states, applies RoPE at `position_ids`, and takes a KV cache.

    GPTModel itself computes logits at every position and ignores `position_ids` for RoPE. With
    `num_labels`, a linear head `score` replaces the output layer. Raises ConfigError: the layout
    does not fit, or megatron rejects an option.
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
        config = transformer_config(
            architecture, mesh.layout, mesh.pp_rank, mesh.device, dtype, rope_scale, options
        )
        block = block_spec(
            architecture, config, mesh.pp_rank, transformer_engine=options.transformer_engine
        )
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
            shape = (architecture.hidden_size, architecture.num_labels)
            kind = {"dtype": dtype, "device": mesh.device}
            self.score = torch.nn.Linear(*shape, bias=False, **kind)
        self.architecture = architecture
        self._sizes = sizes
        self.mesh = mesh
        self._plain_layers = not options.overrides
        self._decodes_fast = False
        # The product with the output layer's weight while `fast_decoding` has it packed.
        self._packed_head: Callable[[Tensor, Tensor | None], Tensor] | None = None
        self._inv_freq = inverse_frequencies.to(mesh.device)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: KVCache | FlashCache | None = None,
        packed: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return hidden states [b, s', h] at `own_positions(s)` after the final norm.

        They are equal on all tensor-parallel ranks.

        Stages before the last one return megatron's layout: sequence first, padding included.
        Stages after the first need `set_input_tensor` before.

        Args:
            input_ids: int64 [b, s], right-padded, the same on every rank of a block.
            position_ids: int64 [b, s], with `cache` or `packed`; None means 0 .. s-1.
            cache: extended by this call. Only in `whole_sequences`; each context-parallel rank
                decodes its own rows.
            packed: layout of the single row; positions are then not split over context-parallel
                ranks.
        """
        length = input_ids.shape[1]
        is_padded = cache is None and packed is None
        if is_padded:
            local_positions = self._padded_positions(length)
            # Padding comes last, so the causal mask hides it.
            input_ids = input_ids[:, local_positions.clamp(max=length - 1)]
            positions = local_positions[None, :]
        elif position_ids is None:
            positions = torch.arange(length, device=input_ids.device)[None, :]
        else:
            positions = position_ids
        angles = positions.to(torch.float32).t()[:, :, None] * self._inv_freq  # [s, b or 1, d/2]
        rotary = torch.cat((angles, angles), dim=-1)[:, :, None, :]
        embedded = (
            self.embedding(input_ids=input_ids, position_ids=positions)
            if self.pre_process
            else None
        )
        if (
            cache is not None
            and position_ids is not None
            and self._decodes_fast
            and self._plain_layers
        ):
            hidden = decode_layers(self.decoder, embedded, rotary, cache)
        else:
            options = {
                "attention_mask": cache,
                "rotary_pos_emb": rotary,
                "packed_seq_params": packed,
            }
            hidden = self.decoder(hidden_states=embedded, **options)
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
        """Return the positions in 0 .. length-1 on this context-parallel rank: int64, ascending."""
        return self._padded_positions(length, device)[: self._number_of_own(length)]

    def stage_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        """Return [s', b, h], the shape between stages for `rows` sequences of `length` tokens."""
        padded = self._padded_length(length) // self.mesh.cp_size
        shared = padded // self.mesh.tp_size if self.mesh.sequence_parallel else padded
        return shared, rows, self.architecture.hidden_size

    def _padded_positions(self, length: int, device: torch.device | None = None) -> Tensor:
        padded = self._padded_length(length)
        mesh = self.mesh
        if mesh.cp_size == 1:
            return torch.arange(padded, device=device or mesh.device)
        return zigzag_positions(padded, mesh.cp_size, mesh.cp_rank, device or mesh.device)

    def _padded_length(self, length: int) -> int:
        multiple = self.mesh.layout.sequence_multiple
        return -(-length // multiple) * multiple

    def _number_of_own(self, length: int) -> int:
        if self.mesh.cp_size == 1:
            return length
        # Padding comes last on every rank. Counting without the tensor avoids a GPU sync.
        return positions_below(
            length, self._padded_length(length), self.mesh.cp_size, self.mesh.cp_rank
        )

    @contextlib.contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Disable sequence parallelism inside the block, as one token cannot be split.

        For inference only.
        """
        # The kernel of a fused RoPE supports only one position for all rows.
        names = (
            "sequence_parallel",
            "scatter_to_sequence_parallel",
            "reduce_scatter_embeddings",
            "apply_rope_fusion",
        )
        modules = (self.config, *self.modules())
        switches = [
            (module, name) for module in modules for name in names if getattr(module, name, False)
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
        """Decode with `decode_layers` on the current weights, without gradient.

        Only within `whole_sequences`.
        """
        layers: list[Any] = [m for m in self.decoder.modules() if isinstance(m, LINEAR)]
        with lean_products(layers):
            self._decodes_fast = True
            if self.post_process and self.architecture.num_labels is None:
                self._packed_head = packed_head(self.output_weight)
            try:
                yield
            finally:
                self._decodes_fast = False
                self._packed_head = None

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        parent = GPTModel if self.architecture.num_labels is None else MegatronModule
        state = parent.sharded_state_dict(self, *args, **options)
        # Drop FP8 scales: they are empty here, and Transformer Engine's additional scales would
        # make checkpoints incompatible.
        return {name: entry for name, entry in state.items() if not name.endswith("_extra_state")}

    @property
    def output_weight(self) -> Tensor:
        """[V / tp, h]: this rank's rows of the output layer or of the tied input embedding."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight  # type: ignore[return-value]

    @property
    def vocab_shard(self) -> VocabShard:
        rows = self._sizes.vocab_size // self.mesh.tp_size
        start = self.mesh.tp_rank * rows
        return VocabShard(
            start, min(max(self.architecture.vocab_size - start, 0), rows), self.mesh.tp_group
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits in at least float32: [n, h] to [n, V / tp].

        Padded columns are -inf.
        """
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        out = vocabulary_logits(hidden, self.output_weight, packed=self._packed_head)
        if (true_columns := self.vocab_shard.size) < out.shape[1]:
            out = out.masked_fill(
                torch.arange(out.shape[1], device=out.device) >= true_columns, float("-inf")
            )
        return out

    def full_logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the whole vocabulary on every rank: [n, h] to [n, V]; no gradient."""
        with torch.no_grad():
            gathered = tensor_parallel.gather_from_tensor_model_parallel_region(self.logits(hidden))
        return gathered[:, : self.architecture.vocab_size]

    def new_cache(
        self,
        prompts: int,
        prompt_tokens: int,
        rows: int,
        response_tokens: int,
        kind: type[Cache] = KVCache,
    ) -> Cache:
        """Return an empty cache for this stage's layers. `CacheSizes` describes the sizes."""
        layers: Any = self.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0  # megatron counts from 1
        sizes = (range(first, first + len(layers)), prompts, prompt_tokens, rows, response_tokens)
        groups = self._sizes.num_groups // self.mesh.tp_size
        arch = self.architecture
        dtype = self.config.params_dtype
        device = self.mesh.device
        return kind(CacheSizes(*sizes, groups, arch.head_size, dtype, device, arch.window))


def rope_parameters(architecture: Architecture) -> tuple[Tensor, float]:
    """Return RoPE's inverse frequencies, float32 [d / 2], and its attention scaling.

    Both are computed by transformers.

    The scaling, which only YaRN uses, applies to both queries and keys, so attention scores scale
    by its square.

    Raises ConfigError: a value of config.json that transformers refuses.
    """
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = (
        with_old_rope_keys(architecture.raw)
        if transformers.__version__.startswith("4.")
        else architecture.raw
    )
    try:
        # transformers adds keys to the dictionaries within.
        config: Any = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(deepcopy(values))
        rotary = LlamaRotaryEmbedding(config)
    except Exception as error:  # its checks raise many types; a null in RoPE's keys, a TypeError
        reason = " ".join(str(error).split())
        sentence = f"transformers cannot read the model's config.json: {reason}"
        raise ConfigError([Fault(sentence, key="model.config.refused_by_transformers")]) from error
    return rotary.inv_freq, float(rotary.attention_scaling)
