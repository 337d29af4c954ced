"""Schema of generation by an engine: sections `engine`, `vllm` and `tensorrt_llm`."""

from __future__ import annotations

from typing import Literal

from reinforce_rl.config.base import Count, PathText, Positive, Section, key

ENGINES = ("vllm", "tensorrt_llm")  # values of `generation` that run in a process of their own


class EngineConfig(Section):
    python: PathText | None = key(
        None, "interpreter of the engine's own environment; null: the trainer's", kind="path"
    )
    tensor_parallel_size: int | None = key(
        None, "GPUs of an engine; null: all that share a copy of the model", "GPUs"
    )
    max_batch_size: Count = key(256, "responses decoded together", "responses")
    max_num_tokens: Count = key(8192, "tokens of a forward pass of the engine", "tokens")
    weight_bucket_megabytes: Count = key(512, "size of a bucket of weights in transfer", "MiB")
    start_timeout_seconds: Positive = key(600.0, "until an engine is ready", "s")
    update_timeout_seconds: Positive = key(
        120.0, "for a bucket of weights, and for going to sleep or waking up", "s"
    )
    request_timeout_seconds: Positive = key(
        420.0, "for all responses of one rollout_micro_batch_size", "s"
    )


class VLLMConfig(Section):
    gpu_memory_utilization: float = key(
        0.4,
        "share of a GPU's memory that the engine takes while it generates, weights and cache",
        gt=0,
        lt=1,
    )
    cpu_cache_gigabytes: Count = key(1, "of an engine on a CPU, for its cache", "GiB")
    load_adapters: bool = key(
        True,
        "with LoRA, send only the adapters after the first time; false: send all weights each "
        "time, with the adapters merged",
    )
    enforce_eager: bool = key(
        False, "on GPUs: no CUDA graphs and no compilation; a quicker start, slower tokens"
    )


class TensorRTLLMConfig(Section):
    mode: Literal["colocated"] = key(
        "colocated",
        "on the GPUs that train",
        details="; nothing else is built",
        expected=(
            "colocated. TensorRT-LLM's worker takes weights through CUDA IPC only, from a process "
            "on the same GPU, so engines on GPUs of their own are not built"
        ),
    )
    free_gpu_memory_fraction: float = key(
        0.5,
        "largest share of the memory free at the engine's start that its cache takes",
        gt=0,
        lt=1,
    )
    check_weights: bool = key(
        True,
        "after each update compare the weights in the engine's layers with the weights sent; a "
        "difference ends the run",
    )
