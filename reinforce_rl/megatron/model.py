"""A dense decoder as a megatron-core `GPTModel`: actor, reference and reward model are all this class.

Notation: b batch, s sequence, h hidden, d head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.attention import CoreAttention, KVCache
from reinforce_rl.megatron.chunked_head import VocabShard
from reinforce_rl.megatron.mesh import Mesh


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under megatron's constructor, marked so that its gradient is summed with sequence parallelism.

    megatron's own `WrappedTorchNorm` refuses sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class BiasedRowParallelLinear(RowParallelLinear):
    """megatron's, with a bias: its configuration has none for attention's output without one for the MLP."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{**options, "bias": True})


class CausalLM(GPTModel):
    """GPTModel that gives hidden states, applies RoPE at the positions it is told, and takes a KV cache.

    Stock GPTModel returns logits of every position, which a policy gradient does not need (only response positions
    count) and a reward model has no use for; and it ignores `position_ids` for RoPE, which decoding rows of unequal
    length needs.

    Args:
        architecture: the shape.
        mesh: this rank's place.
        dtype: of the parameters.
    """

    def __init__(self, architecture: Architecture, mesh: Mesh, dtype: torch.dtype = torch.float32):
        sizes = architecture.padded(mesh.tp_size)
        inverse_frequencies, rope_scale = rope_parameters(architecture)
        config = TransformerConfig(
            num_layers=architecture.num_layers,
            hidden_size=architecture.hidden_size,
            num_attention_heads=sizes.num_heads,
            num_query_groups=sizes.num_groups,
            kv_channels=architecture.head_size,
            ffn_hidden_size=architecture.ffn_size,
            normalization="RMSNorm",
            layernorm_epsilon=architecture.norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=architecture.qkv_bias,
            # With this, megatron also sums the gradients of these norms, which all heads share, over the ranks.
            qk_layernorm=architecture.qk_norm,
            window_size=None if architecture.window is None else (architecture.window - 1, 0),
            softmax_scale=rope_scale**2 / architecture.head_size**0.5,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            tensor_model_parallel_size=mesh.tp_size,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            # Losses here carry their global denominators already: megatron must neither divide by micro-batches
            # nor average over data-parallel ranks, only sum.
            calculate_per_token_loss=True,
            use_cpu_initialization=mesh.device.type == "cpu",
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        layer = get_gpt_layer_local_spec(normalization="RMSNorm")
        parts: Any = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
        if architecture.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if architecture.output_bias:
            attention.linear_proj = BiasedRowParallelLinear
        block = TransformerBlockSubmodules(
            layer_specs=[layer] * architecture.num_layers,
            layer_norm=RMSNorm,  # type: ignore[arg-type]
        )
        super().__init__(
            config,
            block,  # type: ignore[arg-type]
            vocab_size=sizes.vocab_size,
            max_sequence_length=architecture.max_positions,
            parallel_output=True,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=architecture.tied_embeddings,
        )
        self.architecture, self._sizes = architecture, sizes
        self.mesh = mesh
        self._inv_freq = inverse_frequencies.to(mesh.device)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: int64 [b, s], right-padded.
            position_ids: int64 [b, s]; None means 0 .. s-1 in every row.
            cache: keys and values of earlier positions, extended by this call.

        Returns:
            [b, s, h], the same on every tensor-parallel rank.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :]
        angles = position_ids.to(torch.float32).t()[:, :, None] * self._inv_freq  # [s, b or 1, d/2]
        rotary = torch.cat((angles, angles), dim=-1)[:, :, None, :]
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
        hidden = self.decoder(hidden_states=embedded, attention_mask=cache, rotary_pos_emb=rotary)
        return hidden.transpose(0, 1)

    @property
    def output_weight(self) -> Tensor:
        """[V / tp, h]: this rank's rows of the output layer, which may be the input embeddings."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight  # type: ignore[return-value]

    @property
    def vocab_shard(self) -> VocabShard:
        """Which tokens the rows of `output_weight` are."""
        rows = self._sizes.vocab_size // self.mesh.tp_size
        start = self.mesh.tp_rank * rows
        size = min(max(self.architecture.vocab_size - start, 0), rows)
        return VocabShard(start, size, self.mesh.tp_group)

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's slice of the logits: [n, h] to [n, V / tp], padded columns at minus infinity.

        float32 whatever the model's dtype, or float64 where the model is.
        """
        out = self.output_layer(hidden[:, None, :], weight=self.output_weight)[0][:, 0]
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        true_columns = self.vocab_shard.size
        if true_columns < out.shape[1]:
            columns = torch.arange(out.shape[1], device=out.device)
            out = out.masked_fill(columns >= true_columns, float("-inf"))
        return out

    def full_logits(self, hidden: Tensor) -> Tensor:
        """The logits of the whole vocabulary on every rank, without gradient: [n, h] to [n, V]."""
        with torch.no_grad():
            gathered = tensor_parallel.gather_from_tensor_model_parallel_region(self.logits(hidden))
        return gathered[:, : self.architecture.vocab_size]

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache for `batch` sequences of at most `slots` tokens."""
        return KVCache(
            num_layers=len(self.decoder.layers),
            batch=batch,
            groups=self._sizes.num_groups // self.mesh.tp_size,
            slots=slots,
            head_size=self.architecture.head_size,
            dtype=self.config.params_dtype,
            device=self.mesh.device,
            window=self.architecture.window,
        )


def rope_parameters(architecture: Architecture) -> tuple[Tensor, float]:
    """RoPE's inverse frequencies, float32 [d / 2], and the factor on its sines and cosines, as transformers has them.

    The factor, which only YaRN has, applies to queries and keys alike: its square scales the attention scores.
    """
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config: Any = CONFIG_MAPPING[architecture.raw["model_type"]].from_dict(architecture.raw)
    kind = config.rope_parameters["rope_type"]
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    compute = default if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    inverse_frequencies, scale = compute(config, device=torch.device("cpu"))
    return inverse_frequencies, float(scale)
