"""Types shared by reward sources: requests, futures, scores, and the scorer protocol of the
server's reward models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    # the front door and the processes of functions import this file, and must not load torch
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., float])
T = TypeVar("T")

# Status of one sample, int32 on the wire.
STATUS_OK = 0
STATUS_EMPTY = 1  # no token, or an empty text
STATUS_TOO_LONG = 2
STATUS_BAD_TOKEN = 3
STATUS_BAD_LENGTH = 4
STATUS_BAD_TEXT = 5
STATUS_NOT_FINITE = 6  # what the model or function itself gave
STATUS_INTERNAL = 7
STATUS_TIMED_OUT = 8
STATUS_BAD_PROMPT = 9

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
    STATUS_BAD_PROMPT: "messages or metadata that cannot be read, or that the chat template "
    "refuses",
}


@dataclass(frozen=True)
class RewardRequest:
    """N sequences to score."""

    tokens: Tensor  # int64 [N, S], prompt then response, right-padded
    lengths: Tensor  # int64 [N], tokens per row, prompt included
    prompts: tuple[str, ...]
    responses: tuple[str, ...]  # without special tokens
    # each empty for a plain-text prompt; () if all are
    messages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    # other fields of each prompt's JSON line; () if unknown
    metadata: tuple[Mapping[str, Any], ...] = ()
    finished: tuple[bool, ...] = ()  # False for a truncated response; () if none is
    # of each episode's environment, as in `Completions`
    environment_rewards: Tensor | None = None
    environment_faults: tuple[str | None, ...] = ()

    @property
    def samples(self) -> list[TextSample]:
        """The request as texts; raises ValueError if its fields differ in length."""
        count = len(self.prompts)
        metadata = self.metadata or ({},) * count
        messages = self.messages or ((),) * count
        fields = (
            self.prompts,
            self.responses,
            metadata,
            messages,
            self.finished or (True,) * count,
        )
        return [TextSample(*sample) for sample in zip(*fields, strict=True)]

    def select(self, rows: Sequence[int]) -> RewardRequest:
        """Return a request with only these rows, in this order."""

        def pick(values: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(values[row] for row in rows) if values else ()

        return RewardRequest(
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            prompts=pick(self.prompts),
            responses=pick(self.responses),
            messages=pick(self.messages),
            metadata=pick(self.metadata),
            finished=pick(self.finished),
            environment_rewards=None
            if self.environment_rewards is None
            else self.environment_rewards[rows],
            environment_faults=pick(self.environment_faults),
        )


@dataclass(frozen=True)
class TextSample:
    """One prompt and its response as texts."""

    prompt: str  # chat template applied
    response: str  # without special tokens
    # other fields of the prompt's JSON line
    record: Mapping[str, Any] = field(default_factory=dict)
    # the prompt before the chat template; empty for plain text
    messages: tuple[Mapping[str, Any], ...] = ()
    finished: bool = True  # False for a truncated response


@dataclass(frozen=True)
class Rewards:
    """The answer to a `RewardRequest`."""

    values: Tensor  # float32 [N]; NaN where a sample failed, never a made-up 0
    status: Tensor  # int32 [N], STATUS_ constants
    # float32 [N] per source of a sum, or attribute
    by_source: dict[str, Tensor] = field(default_factory=dict)
    # what failed, by row, if the source knows details
    faults: Mapping[int, str] = field(default_factory=dict)


class RewardFuture(Protocol):
    """Scores that are being computed elsewhere."""

    def result(self) -> Rewards:
        """Wait for the scores; raise RewardServerError if none come within the source's own
        deadline.
        """
        ...


@dataclass(frozen=True)
class CompletedRewards:
    """A `RewardFuture` whose scores, or the failure that there is in their place, are known."""

    rewards: Rewards | None
    failure: Exception | None = None

    def result(self) -> Rewards:
        if self.failure is not None:
            raise self.failure
        assert self.rewards is not None
        return self.rewards


class RewardSource(Protocol):
    """Scores samples. The method's name is NeMo-Aligner's.

    `reward=my_module.MySource` plugs in a class of one's own, which is called with the run's
    configuration and the actor's tokenizer. Where others generate (placement=disaggregated), the
    results of several requests are waited for at the same time, each on a thread of its own.
    `identity`, if a source has it, is a JSON value that says which source answered.
    """

    def infer_rm(self, request: RewardRequest) -> RewardFuture:
        """Start scoring and return at once, so that scoring overlaps with the log-prob passes."""
        ...

    def close(self) -> None:
        """Release connections and threads. Safe to call twice."""


@dataclass(frozen=True)
class FunctionSpec:
    """A reward function and its kwargs."""

    key: str  # configuration key, for messages
    name: str  # dotted, `package.module.function`
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of each call, besides the sample


def checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Attach a check of a function's kwargs, run when a pool starts; it raises ValueError if they
    cannot work.
    """

    def mark(function: F) -> F:
        function.check = check  # type: ignore[attr-defined]
        return function

    return mark


SAMPLE_SECONDS = 5.0  # limit of a sample, if neither configuration nor function sets one


def takes_up_to(seconds: float | Callable[..., float]) -> Callable[[F], F]:
    """Declare a function's time limit for one sample, in seconds.

    A number, or a function of the configured kwargs (not of defaults). It holds unless
    `reward_function.sample_timeout_seconds` is set.
    """

    def mark(function: F) -> F:
        function.sample_seconds = seconds  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class WeightedSource:
    """One term of a weighted sum of sources."""

    name: str  # in metrics and messages
    source: RewardSource
    weight: float  # may be negative


class Scorer(Protocol):
    """A reward model in the server's process: token ids in, one score per sequence out."""

    max_length: int  # tokens per sequence
    vocab_size: int  # token ids are 0 .. vocab_size-1

    def score(self, sequences: list[list[int]]) -> list[float]:
        """Score each sequence, in order, independently of the others in the list."""
        ...


@dataclass(frozen=True)
class AttributeScores:
    """N rewards, and the [N, K] attributes that they were merged from."""

    rewards: list[float]
    attributes: list[list[float]]


@runtime_checkable
class AttributeScorer(Scorer, Protocol):
    """A `Scorer` whose rewards are merged from K named scores."""

    attributes: tuple[str, ...]  # K names; empty if only the reward is returned

    def score_attributes(self, sequences: list[list[int]]) -> AttributeScores:
        """Score each sequence as `score` does, and return the attributes too."""
        ...
