"""What the trainer knows of a source of rewards: a request, a future, scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # the front door and the processes of functions read this file too, and should not load torch
    from torch import Tensor

# Status of one sample, as the server sends it (int32) and the client hands it on.
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
    """N sequences to be scored.

    Attributes:
        tokens: int64 [N, S], prompt then response, right-padded.
        lengths: int64 [N], tokens of each row, prompt included.
        prompts: N prompt texts (for sources that read text).
        responses: N response texts, without special tokens.
        messages: N conversations, each empty where the prompt was plain text; () where all were.
        metadata: the other fields of each prompt's JSON line; () where nobody knows them.
        finished: whether each response came to its end, rather than being cut; () where all did.
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
        """The same as texts.

        Raises:
            ValueError: the fields are of different lengths.
        """
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
        messages: the prompt before any chat template; empty where it was plain text.
        finished: the response came to its end, rather than being cut.
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
        by_source: float32 [N] of each source by name, where the values are a weighted sum of several; also of each
            attribute of a reward model that returns them.
        faults: of failed samples by their row, what went wrong and where, for sources that know more than the status.
    """

    values: Tensor
    status: Tensor
    by_source: dict[str, Tensor] = field(default_factory=dict)
    faults: Mapping[int, str] = field(default_factory=dict)


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


@dataclass(frozen=True)
class WeightedSource:
    """One of several sources.

    Attributes:
        name: in metrics and messages.
        source: scores.
        weight: of its scores in the sum; any sign.
    """

    name: str
    source: RewardSource
    weight: float


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


@dataclass(frozen=True)
class AttributeScores:
    """What an `AttributeScorer` says of N sequences.

    Attributes:
        rewards: N, merged from the attributes.
        attributes: N times K.
    """

    rewards: list[float]
    attributes: list[list[float]]


@runtime_checkable
class AttributeScorer(Scorer, Protocol):
    """A `Scorer` whose rewards are merged from K named scores.

    Attributes:
        attributes: K names; none where there is nothing to return besides the reward.
    """

    attributes: tuple[str, ...]

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        """As `score`, with what the rewards were merged from."""
        ...


def attributes_of(scorer: object) -> tuple[str, ...]:
    """The names that a scorer returns besides rewards; none for most."""
    return scorer.attributes if isinstance(scorer, AttributeScorer) else ()
