"""Rules of sampling, placement, generators and engines, across the keys of the actor's
configuration.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from reinforce_rl.config.actor import COLOCATED, TrainConfig
from reinforce_rl.config.base import DEEP, settings_fault
from reinforce_rl.config.engines import ENGINES
from reinforce_rl.config.model_folder import model_values
from reinforce_rl.errors import Fault

GENERATIONS = ("native", *ENGINES)


def generation_faults(cfg: TrainConfig) -> Iterator[Fault]:
    for check in (_placement, _sampling, _generation):
        yield from check(cfg)


def _placement(cfg: TrainConfig) -> Iterator[Fault]:
    if cfg.inflight_updates != "none" and cfg.rollout_order != "finished":
        yield settings_fault(
            cfg,
            ("inflight_updates", "rollout_order"),
            "rollouts in prompt order use one version of the weights: set rollout_order=finished",
            key="config.inflight_updates.without_rollout_order_finished",
        )
    if cfg.placement == "colocated":
        yield from _colocated(cfg)
    else:
        yield from _disaggregated(cfg)


def _colocated(cfg: TrainConfig) -> Iterator[Fault]:
    for setting, default in COLOCATED.items():
        has_own_rule = setting == "max_staleness" or setting.startswith("inflight_")
        if not has_own_rule and getattr(cfg, setting) != default:
            yield settings_fault(
                cfg,
                (setting, "placement"),
                f"it applies to placement=disaggregated only: expected {default}",
                key="config.placement.not_disaggregated",
            )
    if cfg.is_off_policy:
        yield settings_fault(
            cfg,
            ("max_staleness", "placement"),
            "colocated ranks generate with the newest weights: expected 0",
            key="config.max_staleness.conflicts_with_colocated",
        )


def _disaggregated(cfg: TrainConfig) -> Iterator[Fault]:
    rl = cfg.trainer.reinforce
    tensor = cfg.generation_tensor_parallel_size
    ranks = cfg.trainer.world_size
    if cfg.generation_ranks >= ranks or cfg.generation_ranks % tensor:
        expected = f"fewer than the {ranks} ranks of this job"
        if tensor > 1:
            expected = f"a multiple of {tensor} (generation_tensor_parallel_size), {expected}"
        yield settings_fault(
            cfg,
            ("generation_ranks",),
            f"expected {expected}, or 0 for generators that register",
            key="config.generation_ranks.out_of_range",
        )
    size = model_values(cfg.pretrained_checkpoint.restore_from_path).get("intermediate_size")
    if isinstance(size, int) and size % tensor:
        yield settings_fault(
            cfg,
            ("generation_tensor_parallel_size",),
            f"it must divide the model's feed-forward size, {size}",
            key="config.generation_tensor_parallel_size.not_a_divisor_of_feed_forward",
        )
    if cfg.preflight == DEEP:
        yield settings_fault(
            cfg,
            ("preflight", "placement"),
            "the deep preflight covers colocated runs only: expected true",
            key="config.preflight.conflicts_with_disaggregated",
        )
    if cfg.generation == "tensorrt_llm":
        yield settings_fault(
            cfg,
            ("generation", "placement"),
            "its weights are transferred within one GPU only: expected generation=native or vllm",
            key="config.generation.conflicts_with_disaggregated",
        )
    if rl.dynamic_filtering and cfg.is_off_policy:
        yield settings_fault(
            cfg,
            ("trainer.reinforce.dynamic_filtering", "max_staleness"),
            "a step that may draw more prompts must finish before the next one's are drawn: set "
            "dynamic_filtering=false or max_staleness=0",
            key="config.dynamic_filtering.conflicts_with_max_staleness",
        )
    if cfg.rollout_order == "finished" and not cfg.is_off_policy:
        yield settings_fault(
            cfg,
            ("rollout_order", "max_staleness"),
            "a step with current weights waits for all its prompts: set max_staleness to 1 or more",
            key="config.rollout_order.without_max_staleness",
        )
    is_uncorrected = rl.generator_correction == "none"
    if cfg.is_off_policy and is_uncorrected and not cfg.model.reinforce.allow_biased_sampling:
        yield settings_fault(
            cfg,
            ("max_staleness", "trainer.reinforce.generator_correction"),
            "rollouts of older weights bias the gradient: set generator_correction=sequence or "
            "another correction, or max_staleness=0",
            key="config.max_staleness.without_generator_correction",
        )


def _sampling(cfg: TrainConfig) -> Iterator[Fault]:
    rollout = cfg.model.reinforce
    sampling = rollout.sampling_params
    if sampling.use_greedy:
        yield Fault(
            "model.reinforce.sampling_params.use_greedy is true; greedy samples of one prompt are "
            "all alike, so there is nothing to learn from: set it to false (validation has its own "
            "val_sampling_params)",
            key="config.use_greedy.in_training",
        )
    full = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    narrowed = []
    for name, full_value in full.items():
        value = getattr(sampling, name)
        if value != full_value:
            narrowed.append(f"sampling_params.{name}={value}")
    if rollout.length_params.min_length:
        narrowed.append(f"length_params.min_length={rollout.length_params.min_length}")
    if narrowed and not rollout.allow_biased_sampling:
        yield Fault(
            f"model.reinforce has {', '.join(narrowed)}: samples would not come from the policy "
            "whose log-probs are trained, which biases the gradient; use the full distribution "
            "(top_k=0, top_p=1.0, repetition_penalty=1.0, min_length=0) or set "
            "model.reinforce.allow_biased_sampling=true",
            key="config.sampling_params.biased",
        )


def _generation(cfg: TrainConfig) -> Iterator[Fault]:
    if cfg.generation not in GENERATIONS and not is_importable(cfg.generation):
        yield settings_fault(
            cfg,
            ("generation",),
            f"expected one of {', '.join(GENERATIONS)}, or the dotted name of a generator's class "
            "in a module that can be imported",
            key="config.generation.unknown",
        )
    if cfg.generation in ENGINES:
        yield from _engine(cfg)
    yield from _native_decoding(cfg)
    rollout = cfg.model.reinforce
    ranks = cfg.training_ranks // max(cfg.model.block_size, 1)
    most = -(-rollout.num_rollout_samples // max(ranks, 1))
    has_queue = cfg.trainer.reinforce.generation_work_queue
    if has_queue and ranks > 1 and most <= rollout.rollout_micro_batch_size:
        yield Fault(
            f"trainer.reinforce.generation_work_queue is true, but each of {ranks} data-parallel "
            f"ranks has at most {most} of a step's prompts and "
            "model.reinforce.rollout_micro_batch_size is "
            f"{rollout.rollout_micro_batch_size}, so there is nothing to share; expected a size "
            f"below {most}, or generation_work_queue=false",
            key="config.generation_work_queue.nothing_left",
        )


def _native_decoding(cfg: TrainConfig) -> Iterator[Fault]:
    """Check the keys that only native generation reads."""
    rollout = cfg.model.reinforce
    is_native = cfg.generation == "native"
    if rollout.generation_cache_tokens is not None:
        if not is_native:
            yield settings_fault(
                cfg,
                ("model.reinforce.generation_cache_tokens", "generation"),
                "this engine has a cache of its own: expected null",
                key="config.generation_cache_tokens.without_native",
            )
        elif rollout.generation_cache_tokens < cfg.model.encoder_seq_length:
            yield settings_fault(
                cfg,
                ("model.reinforce.generation_cache_tokens", "model.encoder_seq_length"),
                "the longest sequence must fit",
                key="config.generation_cache_tokens.below_encoder_seq_length",
            )
    if rollout.static_decoding and not is_native:
        yield settings_fault(
            cfg,
            ("model.reinforce.static_decoding", "generation"),
            "only generation=native has static decode steps: expected null or false",
            key="config.static_decoding.without_native",
        )
    if rollout.static_decoding and not rollout.lean_decoding:
        yield settings_fault(
            cfg,
            ("model.reinforce.static_decoding", "model.reinforce.lean_decoding"),
            "false selects megatron's own layers, which do not support it: expected true",
            key="config.static_decoding.without_lean_decoding",
        )
    if rollout.cuda_graphs and not is_native:
        yield settings_fault(
            cfg,
            ("model.reinforce.cuda_graphs", "generation"),
            "only native takes this key: expected null or false",
            key="config.cuda_graphs.without_native",
        )
    if rollout.cuda_graphs and not rollout.lean_decoding:
        yield settings_fault(
            cfg,
            ("model.reinforce.cuda_graphs", "model.reinforce.lean_decoding"),
            "false selects megatron's own layers, which do not support it: expected true",
            key="config.cuda_graphs.without_lean_decoding",
        )
    if rollout.cuda_graphs and rollout.static_decoding is False:
        yield settings_fault(
            cfg,
            ("model.reinforce.cuda_graphs", "model.reinforce.static_decoding"),
            "otherwise shapes change from step to step: expected true",
            key="config.cuda_graphs.without_static_decoding",
        )
    if rollout.cuda_graphs and cfg.model.pipeline_model_parallel_size > 1:
        yield settings_fault(
            cfg,
            ("model.reinforce.cuda_graphs", "model.pipeline_model_parallel_size"),
            "a CUDA graph cannot contain the communication between stages: expected 1, or "
            "cuda_graphs=false",
            key="config.cuda_graphs.conflicts_with_pipeline_stages",
        )


def _engine(cfg: TrainConfig) -> Iterator[Fault]:
    engine = cfg.engine
    if engine.python is not None and not _is_executable(engine.python):
        yield settings_fault(
            cfg,
            ("engine.python",),
            "expected an interpreter, such as .venv-engine/bin/python (docs/generation.md)",
            key="config.engine.python.no_interpreter",
        )
    apart = cfg.placement == "disaggregated"
    block = cfg.generation_tensor_parallel_size if apart else cfg.model.block_size
    if engine.tensor_parallel_size is not None and not 1 <= engine.tensor_parallel_size <= block:
        yield settings_fault(
            cfg,
            ("engine.tensor_parallel_size",),
            f"expected 1 to {block}, the ranks that share a copy of the model, or null for all",
            key="config.engine.tensor_parallel_size.out_of_range",
        )
    limit = cfg.trainer.collective_timeout_seconds
    twice_a_request = 2 * (engine.request_timeout_seconds + 65)
    longest = engine.start_timeout_seconds + engine.update_timeout_seconds + twice_a_request
    if not longest < limit:
        yield Fault(
            "engine's start_, update_ and twice request_timeout_seconds + 65 are "
            f"{longest:g} together; expected below trainer.collective_timeout_seconds, which is "
            f"{limit:g}: the other ranks may wait this long for an engine that restarts",
            key="config.engine.timeouts.above_collective_timeout",
        )
    if cfg.generation == "tensorrt_llm":
        yield from _tensorrt_llm(cfg)


def _tensorrt_llm(cfg: TrainConfig) -> Iterator[Fault]:
    if cfg.model.reinforce.length_params.min_length:
        yield settings_fault(
            cfg,
            ("model.reinforce.length_params.min_length",),
            "TensorRT-LLM can suppress one end token only: set it to 0, or generation=native or "
            "vllm",
            key="config.min_length.conflicts_with_tensorrt_llm",
        )
    is_corrected = cfg.trainer.reinforce.generator_correction not in (None, "none")
    if is_corrected and cfg.model.reinforce.sampling_params.temperature != 1.0:
        yield settings_fault(
            cfg,
            (
                "trainer.reinforce.generator_correction",
                "model.reinforce.sampling_params.temperature",
            ),
            "it has not been verified on a GPU that TensorRT-LLM's log-probs include the "
            "temperature: expected 1.0; the check tensorrt-llm of tools/gpu_check.py verifies it",
            key="config.temperature.conflicts_with_generator_correction",
        )


def _is_executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def is_importable(name: str) -> bool:
    module = name.rpartition(".")[0]
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
