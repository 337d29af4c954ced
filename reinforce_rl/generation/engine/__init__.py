"""Generation by engines in processes of their own; this file has the messages between the two.

A trainer and its engine may run different Pythons. The engine's process imports only this package,
torch and the standard library, so this file imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# `fault` of an unfinished request's answer, which has the tokens so far
ABORTED = "it was aborted before its end"


@dataclass(frozen=True)
class EngineArguments:
    model: str  # Hugging Face folder, for its config
    dtype: str  # of weights and computation, e.g. "bfloat16"
    tensor_parallel_size: int
    max_batch_size: int  # requests decoded together
    max_seq_len: int  # prompt and response tokens
    max_num_tokens: int  # tokens per forward pass
    lora_rank: int = 0  # rank of the adapters that it will load; 0 for none
    options: dict[str, Any] = field(default_factory=dict)  # specific to the engine


@dataclass(frozen=True)
class EngineSampling:
    """Sampling parameters of one response; greedy if temperature, top_k and top_p are all None."""

    max_tokens: int
    min_tokens: int
    seed: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    stop_token_ids: list[int]
    pad_id: int = 0


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
    # per token, the number of the update whose weights drew it; () if unknown
    updates: tuple[int, ...] = ()
