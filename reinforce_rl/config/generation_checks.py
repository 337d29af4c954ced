"""Validation of the generation engine's settings, for `config/checks.py`; yields one message per error."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from reinforce_rl.config.schema import TrainConfig

GENERATIONS = ("native", "tensorrt_llm")


def generation_faults(cfg: TrainConfig) -> Iterator[str]:
    """The choice of the engine, and what it asks of other keys."""
    if cfg.generation not in GENERATIONS and not _is_importable(cfg.generation):
        yield (
            f"generation is {cfg.generation!r}; expected one of {', '.join(GENERATIONS)}, or the dotted name of a "
            "generator's class in a module that can be imported"
        )
    if cfg.generation == "tensorrt_llm":
        yield from _ranges(cfg)
        yield from _sampling(cfg)
    if cfg.model.reinforce.generation_cache_tokens is not None:
        yield from _cache(cfg)
    if cfg.model.reinforce.static_decoding:
        yield from _static_decoding(cfg)
    if cfg.model.reinforce.cuda_graphs:
        yield from _cuda_graphs(cfg)
    if cfg.trainer.reinforce.generation_work_queue:
        yield from _work_queue(cfg)


def _is_importable(name: str) -> bool:
    module = name.rpartition(".")[0]
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _ranges(cfg: TrainConfig) -> Iterator[str]:
    engine, block = cfg.tensorrt_llm, cfg.model.block_size
    if engine.mode != "colocated":
        yield (
            f"tensorrt_llm.mode is {engine.mode!r}; expected colocated. TensorRT-LLM 1.2 takes weights through CUDA "
            "IPC only, from a process on the same GPU, so engines on GPUs of their own are not built"
        )
    if engine.tensor_parallel_size is not None and not 1 <= engine.tensor_parallel_size <= block:
        yield (
            f"tensorrt_llm.tensor_parallel_size is {engine.tensor_parallel_size}; expected 1 to {block}, the ranks "
            "that share a copy of the model, or null for all of them"
        )
    if not 0 < engine.free_gpu_memory_fraction < 1:
        yield f"tensorrt_llm.free_gpu_memory_fraction is {engine.free_gpu_memory_fraction}; expected above 0, below 1"
    for key in ("max_batch_size", "max_num_tokens", "weight_bucket_megabytes"):
        if getattr(engine, key) < 1:
            yield f"tensorrt_llm.{key} is {getattr(engine, key)}; expected at least 1"
    for key in ("start_timeout_seconds", "update_timeout_seconds", "request_timeout_seconds"):
        if not getattr(engine, key) > 0:
            yield f"tensorrt_llm.{key} is {getattr(engine, key)}; expected above 0"
    limit = cfg.trainer.collective_timeout_seconds
    longest = engine.start_timeout_seconds + engine.update_timeout_seconds + 2 * engine.request_timeout_seconds
    if not longest < limit:
        yield (
            f"tensorrt_llm's start_, update_ and twice request_timeout_seconds are {longest:g} together; expected "
            f"below trainer.collective_timeout_seconds, which is {limit:g}: so long may the other ranks "
            "wait for an engine that is started anew"
        )


def _cache(cfg: TrainConfig) -> Iterator[str]:
    tokens, longest = cfg.model.reinforce.generation_cache_tokens, cfg.model.encoder_seq_length
    told = f"model.reinforce.generation_cache_tokens is {tokens}"
    if cfg.generation != "native":
        yield f"{told}, but generation is {cfg.generation!r}, whose engine has a cache of its own; expected null"
    elif tokens is not None and tokens < longest:
        yield f"{told}, below model.encoder_seq_length, which is {longest}; the longest sequence must fit"


def _static_decoding(cfg: TrainConfig) -> Iterator[str]:
    told = "model.reinforce.static_decoding is true, but"
    if cfg.generation != "native":
        yield f"{told} generation is {cfg.generation!r}; only the native engine has such steps; expected false"
    if not cfg.model.reinforce.lean_decoding:
        yield f"{told} model.reinforce.lean_decoding is false, which asks for megatron's own layers; expected true"


def _cuda_graphs(cfg: TrainConfig) -> Iterator[str]:
    told = "model.reinforce.cuda_graphs is true, but"
    if not cfg.model.reinforce.static_decoding:
        yield f"{told} model.reinforce.static_decoding is false, whose steps change their shape; expected true"
    if cfg.model.pipeline_model_parallel_size > 1:
        yield (
            f"{told} model.pipeline_model_parallel_size is {cfg.model.pipeline_model_parallel_size}: stages hand over "
            "between the kernels of a step, which a graph does not hold; expected 1, or cuda_graphs=false"
        )


def _work_queue(cfg: TrainConfig) -> Iterator[str]:
    rollout, ranks = cfg.model.reinforce, cfg.trainer.world_size // max(cfg.model.block_size, 1)
    if ranks > 1 and (most := -(-rollout.num_rollout_samples // ranks)) <= rollout.rollout_micro_batch_size:
        yield (
            f"trainer.reinforce.generation_work_queue is true, but each of {ranks} data-parallel ranks has at most "
            f"{most} of a step's prompts and model.reinforce.rollout_micro_batch_size is "
            f"{rollout.rollout_micro_batch_size}: one micro-batch each, so none is left to others; expected a size "
            f"below {most}, or generation_work_queue=false"
        )


def _sampling(cfg: TrainConfig) -> Iterator[str]:
    rollout = cfg.model.reinforce
    if rollout.length_params.min_length:
        yield (
            f"model.reinforce.length_params.min_length is {rollout.length_params.min_length}, but TensorRT-LLM holds "
            "back one end token only; set it to 0, or generation=native"
        )
    if cfg.trainer.reinforce.generator_correction != "none" and rollout.sampling_params.temperature != 1.0:
        yield (
            f"trainer.reinforce.generator_correction is {cfg.trainer.reinforce.generator_correction!r} and "
            f"model.reinforce.sampling_params.temperature is {rollout.sampling_params.temperature}; whether "
            "TensorRT-LLM's log-probs are those at the temperature has not been established, so expected 1.0"
        )
