"""What trainer and engine process say to each other. Both sides import this file, so it imports nothing heavy.

The names of the fields of `EngineArguments` and `EngineSampling` are those of TensorRT-LLM's own arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

START, GENERATE, UPDATE, RELEASE, RESUME, STOP = "start", "generate", "update_weights", "release", "resume", "stop"
DONE, FAULT = "done", "fault"

# Memory that an engine gives back while it sleeps, by TensorRT-LLM's tags: all but the cache, and the cache.
WEIGHT_TAGS = (
    "sampler",
    "drafter",
    "guided_decoder",
    "spec_resource_manager",
    "model_extra",
    "executor_extra",
    "model",
    "draft_model",
)
CACHE_TAGS = ("kv_cache",)


@dataclass(frozen=True)
class EngineArguments:
    """How an engine is made.

    Attributes:
        model: a Hugging Face folder, for its config.
        dtype: of weights and computation, e.g. "bfloat16".
        tensor_parallel_size: GPUs that share the model.
        max_batch_size: requests that are decoded together.
        max_seq_len: tokens of prompt and response.
        max_num_tokens: tokens of a forward pass.
        free_gpu_memory_fraction: of the memory that is free at start, for the cache.
    """

    model: str
    dtype: str
    tensor_parallel_size: int
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    free_gpu_memory_fraction: float


@dataclass(frozen=True)
class Started:
    """An engine that is ready: TensorRT-LLM's version, and the device of each of its workers."""

    version: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class EngineSampling:
    """How one response is drawn. With temperature, top_k and top_p all None it is the greedy one."""

    max_tokens: int
    seed: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    stop_token_ids: list[int]
    end_id: int = -1  # with the end tokens in stop_token_ids all of them are treated alike, and stay in the output
    pad_id: int = 0
    include_stop_str_in_output: bool = True
    logprobs: int = 1
    detokenize: bool = False


@dataclass(frozen=True)
class Request:
    """One response that is wanted."""

    tokens: tuple[int, ...]
    sampling: EngineSampling


@dataclass(frozen=True)
class Answer:
    """What became of a request.

    Attributes:
        tokens: of the response, the stop token included.
        log_probs: one a token; None from an engine that gives none.
        stopped: it ended by a stop token, rather than at its length.
        fault: why there is no response; None where there is one.
    """

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] | None = None
    stopped: bool = False
    fault: str | None = None
