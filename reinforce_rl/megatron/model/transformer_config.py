"""Builds megatron's TransformerConfig from the architecture, the layout and the user's overrides."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from reinforce_rl.config.parallelism import Layout
from reinforce_rl.errors import ConfigError
from reinforce_rl.megatron.architecture import Architecture

# The mesh is built from these keys, so overriding them would contradict it.
_SET_BY_OTHER_KEYS = {
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "sequence_parallel": "model.sequence_parallel",
    "recompute_granularity": "model.activations_checkpoint_granularity",
    "recompute_method": "model.activations_checkpoint_method",
    "recompute_num_layers": "model.activations_checkpoint_num_layers",
}


@dataclass(frozen=True)
class ModelOptions:
    """Options of the forward and backward computation."""

    recompute_granularity: str | None = None  # "selective" (core attention), "full" (whole layers); None for none
    # For "full": "uniform" (groups of `recompute_num_layers`) or "block" (the first of them on each stage).
    recompute_method: str | None = None
    recompute_num_layers: int | None = None  # for "full"
    transformer_engine: bool = False  # build layers from Transformer Engine's modules; see `layers`
    # Fields of megatron's TransformerConfig; highest precedence.
    overrides: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = ModelOptions()


def layers_of_stages(
    architecture: Architecture, layout: Layout, dtype: torch.dtype, options: ModelOptions
) -> list[int]:
    """Return the number of layers on each pipeline stage; needs no process group.

    Raises:
        ConfigError: as `transformer_config`, for all stages together.
    """
    layers, faults = [], []
    for stage in range(layout.pipeline):
        try:
            config = transformer_config(architecture, layout, stage, torch.device("cpu"), dtype, 1.0, options)
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
    """Build the TransformerConfig of this pipeline stage.

    Raises:
        ConfigError: unknown override fields (all in one message), or values that megatron rejects.
    """
    faults = list(_faults_of_overrides(options.overrides))
    if faults:
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
        # Also makes megatron sum these norms' gradients over tensor-parallel ranks.
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
        # True would sync the GPU after each send and receive, a workaround for old torch.
        "batch_p2p_sync": False,
        "moe_token_dispatcher_type": "alltoall",  # required by variable_seq_lengths, experts or not
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Losses already carry their global denominators, so megatron must only sum.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        "bias_activation_fusion": False,
        "use_te_activation_func": True,  # use the layer spec's activation module, not only Transformer Engine's
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
    }
    try:
        config = TransformerConfig(**{**values, **options.overrides})
        layers = get_num_layers_to_build(config, pp_rank=stage)  # rejects a layer count that does not divide
    except (AssertionError, TypeError, ValueError) as error:  # megatron validates with asserts
        given = f" with model.megatron_overrides={dict(options.overrides)}" if options.overrides else ""
        raise ConfigError([f"megatron-core refuses this configuration of the model{given}: {error}"]) from error
    group = options.recompute_num_layers
    if options.recompute_method == "uniform" and group is not None and layers % group:
        raise ConfigError(
            [
                f"model.activations_checkpoint_num_layers is {group}, which does not divide the {layers} layers of "
                f"stage {stage}, as activations_checkpoint_method=uniform needs"
            ]
        )
    return config


def _faults_of_overrides(overrides: Mapping[str, Any]) -> list[str]:
    fields = [item.name for item in dataclasses.fields(TransformerConfig)]
    faults = []
    for name in overrides:
        key = f"model.megatron_overrides.{name}"
        if name in _SET_BY_OTHER_KEYS:
            faults.append(f"{key} is what {_SET_BY_OTHER_KEYS[name]} sets; use that")
        elif name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            advice = f"did you mean {close[0]}?" if close else "see megatron.core.transformer.TransformerConfig"
            faults.append(f"{key} is no field of megatron's TransformerConfig; {advice}")
    return faults
