"""Generation by TensorRT-LLM; here are the messages between trainer and engine process, so it imports nothing heavy.

Fields of `EngineArguments` and `EngineSampling` are named as TensorRT-LLM's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

# Memory that a sleeping engine releases, by TensorRT-LLM's tags: all but the cache, and the cache.
WEIGHT_TAGS = ["sampler", "drafter", "guided_decoder", "spec_resource_manager", "model_extra", "executor_extra"]
WEIGHT_TAGS += ["model", "draft_model"]
CACHE_TAGS = ["kv_cache"]


@dataclass(frozen=True)
class EngineArguments:
    model: str  # Hugging Face folder, for its config
    dtype: str  # of weights and computation, e.g. "bfloat16"
    tensor_parallel_size: int
    max_batch_size: int  # requests decoded together
    max_seq_len: int  # prompt and response tokens
    max_num_tokens: int  # per forward pass
    free_gpu_memory_fraction: float  # for the cache, of the memory free at start


@dataclass(frozen=True)
class EngineSampling:
    """Sampling parameters of one response; greedy if temperature, top_k and top_p are all None."""

    max_tokens: int
    seed: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    stop_token_ids: list[int]
    end_id: int = -1  # disabled: end tokens are in stop_token_ids, so that they stay in the output
    pad_id: int = 0
    include_stop_str_in_output: bool = True
    logprobs: int = 1
    detokenize: bool = False


@dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    sampling: EngineSampling


@dataclass(frozen=True)
class Answer:
    """Result of a request."""

    tokens: tuple[int, ...] = ()  # including the stop token
    log_probs: tuple[float, ...] | None = None  # per token; None if the engine reports none
    stopped: bool = False  # ended by a stop token rather than by length
    fault: str | None = None  # error if there is no response
