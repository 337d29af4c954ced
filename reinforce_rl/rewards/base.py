"""Scoring as the trainer sees it: a request, a future, scores. And what a reward model in the server provides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the front door and the processes of functions import this file, and must not load torch
    from torch import Tensor

# Status of one sample, int32 on the wire.
STATUS_OK = 0
STATUS_EMPTY = 1  # no token, or an empty text
STATUS_TOO_LONG = 2  # longer than the reward model's context
STATUS_BAD_TOKEN = 3  # a token id outside the vocabulary
STATUS_BAD_LENGTH = 4  # sequence_lengths does not fit the tokens' shape
STATUS_BAD_TEXT = 5  # not valid UTF-8
STATUS_NOT_FINITE = 6  # the model or function itself gave NaN or infinity
STATUS_INTERNAL = 7  # the model or function raised
STATUS_TIMED_OUT = 8  # a reward function took longer than its time limit
STATUS_BAD_PROMPT = 9  # messages or metadata that are not what they should be, or that the chat template refuses

STATUS_TEXT = {
    STATUS_OK: "ok",
    STATUS_EMPTY: "empty sample",
    STATUS_TOO_LONG: "longer than the reward model's context",
    STATUS_BAD_TOKEN: "a token id outside the reward model's vocabulary",
    STATUS_BAD_LENGTH: "sequence_lengths does not fit the tokens",
    STATUS_BAD_TEXT: "not valid UTF-8",
    STATUS_NOT_FINITE: "the score was not finite",
    STATUS_INTERNAL: "the reward model or function raised an error",
    STATUS_TIMED_OUT: "the reward function exceeded its time limit",
    STATUS_BAD_PROMPT: "messages or metadata that cannot be read, or that the chat template refuses",
}


@dataclass(frozen=True)
class RewardRequest:
    """N sequences to score.

    Attributes:
        tokens: int64 [N, S], prompt then response, right-padded.
        lengths: int64 [N], tokens per row, prompt included.
        prompts: N prompt texts (for sources that read text).
        responses: N response texts, without special tokens.
        messages: N conversations, each empty if the prompt was plain text; () if all were.
        metadata: the other fields of each prompt's JSON line; () if unknown.
        finished: whether each response ended by itself rather than being cut; () if all did.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: tuple[str, ...]
    responses: tuple[str, ...]
    messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    metadata: tuple[Mapping[str, Any], ...] = ()
    finished: tuple[bool, ...] = ()

    @property
    def samples(self) -> list[TextSample]:
        """The request as texts; raises ValueError if its fields differ in length."""
        count = len(self.prompts)
        return [
            TextSample(*fields)
            for fields in zip(
                self.prompts,
                self.responses,
                self.metadata or ({},) * count,
                self.messages or ((),) * count,
                self.finished or (True,) * count,
                strict=True,
            )
        ]


@dataclass(frozen=True)
class TextSample:
    """One prompt and its response as texts.

    Attributes:
        prompt: as the policy read it.
        response: without special tokens.
        record: the other fields of the prompt's JSON line.
        messages: the prompt before any chat template; empty if it was plain text.
        finished: the response ended by itself rather than being cut.
    """

    prompt: str
    response: str
    record: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    finished: bool = True


@dataclass(frozen=True)
class Rewards:
    """The answer to a `RewardRequest`.

    Attributes:
        values: float32 [N]; NaN where a sample failed, never a made-up 0.
        status: int32 [N], one of the STATUS_ constants.
        by_source: float32 [N] by name: of each source in a weighted sum, of each attribute of a reward model.
        faults: by row of a failed sample, what went wrong, for sources that know more than the status.
    """

    values: Tensor
    status: Tensor
    by_source: dict[str, Tensor] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


class RewardFuture(Protocol):
    """Scores that are being computed elsewhere."""

    def result(self) -> Rewards:
        """Wait for the scores.

        Raises:
            RewardServerError: no answer within the source's own deadline.
        """
        ...


class RewardSource(Protocol):
    """Scores samples. NeMo-Aligner's name for the call is kept."""

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        """Start scoring and return at once, so that scoring overlaps with the log-prob passes."""
        ...

    def close(self) -> None:
        """Release connections and threads. Safe to call twice."""
        ...


@dataclass(frozen=True)
class WeightedSource:
    """One of several sources: its name in metrics and messages, and its weight in the sum, of any sign."""

    name: str
    source: RewardSource
    weight: float


class Scorer(Protocol):
    """A reward model inside the server's process: token ids in, one score per sequence out.

    Attributes:
        max_length: the longest sequence it accepts, in tokens.
        vocab_size: token ids are 0 .. vocab_size-1.
    """

    max_length: int
    vocab_size: int

    def score(self, sequences: list[list[int]]) -> list[float]:
        """Score each sequence, in order, independently of the others in the list."""
        ...


@dataclass(frozen=True)
class AttributeScores:
    """N rewards, and the N times K attributes that they were merged from."""

    rewards: list[float]
    attributes: list[list[float]]


@runtime_checkable
class AttributeScorer(Scorer, Protocol):
    """A `Scorer` whose rewards are merged from K named scores.

    Attributes:
        attributes: K names; empty if only the reward is returned.
    """

    attributes: tuple[str, ...]

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        """As `score`, with the attributes."""
        ...


def attributes_of(scorer: object) -> tuple[str, ...]:
    """The names of the scores that a scorer returns besides rewards; none for most."""
    return scorer.attributes if isinstance(scorer, AttributeScorer) else ()
