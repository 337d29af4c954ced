"""The `Generator` protocol, sampling parameters, and responses resumed with newer weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from reinforce_rl.data.batches import Completions, Prompt
from reinforce_rl.errors import DataError


@dataclass(frozen=True)
class SamplingParams:
    """How to sample responses. Defaults sample from the unmodified model."""

    max_length: int  # response tokens
    min_length: int = 0  # response tokens before a stop token may be drawn
    temperature: float = 1.0  # above 0
    top_k: int = 0  # 0 for all tokens
    top_p: float = 1.0  # 1 for all tokens
    # over prompt and response, 1 for none (Keskar et al. 2019, arXiv:1909.05858)
    repetition_penalty: float = 1.0
    use_greedy: bool = False  # always take the likeliest token
    stop_token_ids: tuple[int, ...] = ()  # any of these ends a response and belongs to it
    # text that ends a response; its tokens belong to the response
    end_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartialResponse:
    """A response that further calls may extend; lists have one entry per token."""

    prompt: Prompt
    key: int  # noise key, uint64: `sample_seeds` of (seed, prompt, sample)
    tokens: tuple[int, ...] = ()
    # at the sampling temperature, under the weights that drew the token
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()  # versions of those weights
    finish_reason: str | None = None  # None: unfinished
    # Most tokens of this response and all later turns of its row; None: of this one, as
    # `SamplingParams.max_length` says.
    limit: int | None = None

    def max_length(self, params: SamplingParams) -> int:
        """Return the most tokens that this response may have."""
        return min(self.room(params), params.max_length)

    def room(self, params: SamplingParams) -> int:
        """Return the most tokens of this response and all later turns of its row."""
        return params.max_length if self.limit is None else self.limit


class WeightUpdates(Protocol):
    """Weights that arrive while responses are drawn. All ranks of a block make the same calls."""

    @property
    def version(self) -> int:
        """Version of the weights in the model."""
        ...

    def next_action(self, unfinished: int) -> Literal["continue", "load", "stop"]:
        """Return the action before the next token; `unfinished` responses run or wait for room.

        "load": call `load` and continue with the present cache. "stop": return the responses as
        they are.
        """
        ...

    def load(self) -> None:
        """Load the newer weights into the model. Its tensors keep their addresses."""
        ...


class Generator(Protocol):
    """An engine that completes prompts; batching, caching and sharding are internal."""

    @property
    def is_exact(self) -> bool:
        """True if log-probs equal the trainer's up to float32 rounding."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Context in which `generate` may run; outside it an engine releases its memory."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int
    ) -> Completions:
        """Generate `num_samples` completions per prompt, prompt-major; call within `awake`.

        Noise is keyed by (seed, prompt id, sample, position), so samples do not depend on batching.

        Raises:
            GenerationError: an engine failed; raised on all ranks of the block.
        """
        ...

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        """Extend responses until all have ended or `updates` stops the call; return all in order.

        Call within `awake`; raises as `generate`. With the generator's noise, a response does not
        depend on where calls begin and end.
        """
        ...

    def refit(self) -> None:
        """Use the policy's current weights from the next response on."""

    def close(self) -> None:
        """Stop the engine. May be called in any state, on one rank alone."""


class Partner(Protocol):
    """Answers the policy's answers. All ranks of a block make the same calls."""

    def __call__(
        self, answers: Mapping[int, PartialResponse], *, waits: bool
    ) -> dict[int, PartialResponse | None]:
        """Take answers that have ended, by row; return the next turns that are ready, by row.

        A turn is an empty response, whose prompt is the row so far and what the partner wrote; None
        ends the row. The partner may rewrite the row; a prompt and its `limit` together have at
        most the room of the row, beside its first prompt if they begin with it.

        Args:
            waits: wait until there is one; nothing else can be generated.
        """
        ...


@runtime_checkable
class ConversingGenerator(Generator, Protocol):
    """A `Generator` that continues a row as soon as its partner's reply arrives."""

    def converse(
        self, responses: Sequence[PartialResponse], params: SamplingParams, partner: Partner
    ) -> None:
        """Generate an answer for every turn of every row, until all rows have ended.

        Responses are empty; the `limit` of the first is the room of all turns of its row. Answers
        are those of `resume`.

        Call within `awake`; raises as `generate`, and what the partner raises.
        """
        ...


class RemoteGenerator:
    """Stands for an engine on ranks that train while other processes generate."""

    is_exact = False

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int
    ) -> Completions:
        raise RuntimeError("this rank only trains; others generate")

    def resume(
        self, responses: Sequence[PartialResponse], params: SamplingParams, updates: WeightUpdates
    ) -> list[PartialResponse]:
        raise RuntimeError("this rank only trains; others generate")

    def refit(self) -> None:
        pass

    def close(self) -> None:
        pass


def check_lengths(lengths: Iterable[tuple[int, int]], limit: int, name: str) -> None:
    """Raise a `DataError` if a prompt and its response may exceed `limit` tokens.

    Args:
        lengths: of each prompt, and the most that its response may have, in tokens.
        name: describes the limit.
    """
    prompt, response = max(lengths, key=sum, default=(0, 0))
    if prompt + response > limit:
        raise DataError(
            f"a prompt has {prompt} tokens and its response may have {response}, which "
            f"together exceed {name}; lower model.reinforce.length_params.max_length or "
            "model.encoder_seq_length",
            key="generation.prompt.too_long",
        )
