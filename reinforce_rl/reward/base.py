"""What the trainer knows of a source of rewards: a request, a future, scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the server's front door uses these names too, and should not spend seconds on torch
    from torch import Tensor

# Status of one sample, as the server sends it (int32) and the client hands it on.
STATUS_OK = 0
STATUS_EMPTY = 1  # no token, or an empty text
STATUS_TOO_LONG = 2  # longer than the reward model's context
STATUS_BAD_TOKEN = 3  # a token id outside the vocabulary
STATUS_BAD_LENGTH = 4  # sequence_lengths does not fit the tokens' shape
STATUS_BAD_TEXT = 5  # not valid UTF-8
STATUS_NOT_FINITE = 6  # the model itself gave NaN or infinity
STATUS_INTERNAL = 7  # the model raised

STATUS_TEXT = {
    STATUS_OK: "ok",
    STATUS_EMPTY: "empty sample",
    STATUS_TOO_LONG: "longer than the reward model's context",
    STATUS_BAD_TOKEN: "a token id outside the reward model's vocabulary",
    STATUS_BAD_LENGTH: "sequence_lengths does not fit the tokens",
    STATUS_BAD_TEXT: "not valid UTF-8",
    STATUS_NOT_FINITE: "the reward model's score was not finite",
    STATUS_INTERNAL: "the reward model raised an error",
}


@dataclass(frozen=True)
class RewardRequest:
    """N sequences to be scored.

    Attributes:
        tokens: int64 [N, S], prompt then response, right-padded.
        lengths: int64 [N], tokens of each row, prompt included.
        prompts: N prompt texts (for sources that read text).
        responses: N response texts.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: tuple[str, ...]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class Rewards:
    """The answer to a `RewardRequest`.

    Attributes:
        values: float32 [N]; NaN where a sample failed, never a made-up 0.
        status: int32 [N], one of the STATUS_ constants.
        by_source: float32 [N] of each source by name, where the values are a weighted sum of several.
    """

    values: Tensor
    status: Tensor
    by_source: dict[str, Tensor] = field(default_factory=dict)


class RewardFuture(Protocol):
    """A score that is being computed elsewhere."""

    def result(self) -> Rewards:
        """Wait for the scores.

        Raises:
            RewardServerError: no answer within the source's own deadline.
        """
        ...


class RewardSource(Protocol):
    """Whatever scores samples. NeMo-Aligner's name for the call is kept."""

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        """Start scoring and return at once, so that scoring overlaps with the log-prob passes."""
        ...

    def close(self) -> None:
        """Release connections and threads. Safe to call twice."""
        ...


class Scorer(Protocol):
    """A reward model inside the server's process: token ids in, one score a sequence out.

    Attributes:
        max_length: the longest sequence it accepts, in tokens.
        vocab_size: token ids are 0 .. vocab_size-1.
    """

    max_length: int
    vocab_size: int

    def score(self, sequences: list[list[int]]) -> list[float]:
        """One float a sequence, in order. A score must not depend on what else is in the list."""
        ...
