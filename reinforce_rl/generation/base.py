"""What the trainer asks of a generator, and how it says what to sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from reinforce_rl.data.batches import Completions, Prompt


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. Defaults sample from the model itself.

    Attributes:
        max_length: response tokens at most.
        min_length: response tokens before a stop token may be drawn.
        temperature: divides the logits; above 0.
        top_k: only the k likeliest tokens; 0 for all.
        top_p: only the likeliest tokens that together reach this probability; 1 for all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already seen, prompt included;
            1 for none (Keskar et al. 2019, arXiv:1909.05858).
        use_greedy: the likeliest token, always.
        stop_token_ids: any of these ends a response and belongs to it.
        end_strings: a response whose text contains one of these ends there; the tokens that made it belong to it.
    """

    max_length: int
    min_length: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    use_greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    end_strings: tuple[str, ...] = ()


class Generator(Protocol):
    """Whatever completes prompts. How it batches, caches and shards is its own affair."""

    @property
    def is_exact(self) -> bool:
        """Its log-probs are those that the trainer would compute, but for the rounding of float32."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Responses are drawn inside the block; outside it an engine with memory of its own gives that back."""
        ...

    def generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int) -> Completions:
        """`num_samples` completions of each prompt, prompt-major; inside `awake`.

        Noise is keyed by (seed, prompt id, sample, position): a sample does not depend on what it is batched with.

        Raises:
            GenerationError: an engine failed; on all ranks of this rank's block.
        """
        ...

    def refit(self) -> None:
        """Take over the policy's current weights before the next response."""
        ...

    def close(self) -> None:
        """End what was started. May be called in any state, on one rank alone."""
        ...
