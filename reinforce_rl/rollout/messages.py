"""What trainers and generators tell each other; `message_codec` puts it on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reinforce_rl.data.batches import Completions, Prompt, length_mask
from reinforce_rl.errors import ReinforceError
from reinforce_rl.rewards.base import Rewards

HELLO = b"generator"
_MAX_LOG_PROB = 1e-3  # rounding may leave a little above 0


# From a generator


@dataclass(frozen=True)
class Register:
    """A rank of a generator has come."""

    size: int  # ranks of this generator
    name: str  # host and process
    settings: Mapping[str, Any]  # must equal the trainers' settings


@dataclass(frozen=True)
class RequestCredit:
    """A generator asks for requests."""

    count: int  # a negative count withdraws earlier requests


@dataclass(frozen=True)
class GenerationResult:
    """The answer to a `GenerationRequest`."""

    number: int
    prompt_ids: tuple[int, ...]
    completions: Completions
    rewards: Rewards | None = None
    failure: ReinforceError | None = None  # of the reward source


@dataclass(frozen=True)
class GeneratorFailed:
    """A generator cannot continue."""

    failure: ReinforceError


@dataclass(frozen=True)
class Received:
    """What has become of `NewWeights`."""

    epoch: int
    version: int
    fault: str = ""  # empty: the weights are there


@dataclass(frozen=True)
class EndReceived:
    """The answer to `RunEnded`, at once, whatever is still under way."""


# From the trainers


@dataclass(frozen=True)
class GenerationRequest:
    """A micro-batch of prompts to answer."""

    number: int
    step: int  # 0 of a validation
    version: int  # of the weights
    prompts: tuple[Prompt, ...]
    num_samples: int
    seed: int
    allow_newer: bool = (
        False  # of weights of this version or, rather, newer ones; then of one prompt
    )

    @property
    def validation(self) -> bool:
        return self.step == 0


@dataclass(frozen=True)
class GenerationRequests:
    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True)
class RunEnded:
    """The trainers have ended, and nothing more is to be generated."""


@dataclass(frozen=True)
class NewWeights:
    """A rank is to receive a version in an epoch's group."""

    epoch: int
    version: int
    place: int  # rank in the group
    size: int


@dataclass(frozen=True)
class Abandoned:
    """An epoch's transfer is not going on."""

    epoch: int
    why: str


@dataclass(frozen=True)
class Dismissed:
    """A rank is not a generator of this run any more."""

    why: str


Message = (
    Register
    | RequestCredit
    | GenerationResult
    | GeneratorFailed
    | Received
    | EndReceived
    | GenerationRequests
    | RunEnded
    | NewWeights
    | Abandoned
    | Dismissed
)


@dataclass(frozen=True)
class ResultBounds:
    """Bounds on the results of a run's generators."""

    vocab_size: int  # a token id beyond it has no embedding
    max_length: int  # tokens of a response
    # Names of `Rewards.by_source`, behind which a / and an attribute may stand. None: of one server
    # alone, whose attributes have any name.
    sources: tuple[str, ...] | None = None
    needs_log_probs: bool = False  # of an engine that always reports them


def fault_of_result(
    request: GenerationRequest, result: GenerationResult, *, newest: int, bounds: ResultBounds
) -> str:
    """Say why a result cannot be the answer to this request; empty if it can.

    Args:
        newest: version of the weights that generators may have.
    """
    if result.prompt_ids != tuple(prompt.id for prompt in request.prompts):
        return f"its prompts are {result.prompt_ids}, expected those of request {request.number}"
    completions = result.completions
    count = len(request.prompts) * request.num_samples
    if len(completions.lengths) != count:
        return f"it has {len(completions.lengths)} responses, expected {count}"
    if result.rewards is None and result.failure is None:
        return "it has neither scores nor a failure"
    return (
        _fault_of_tokens(completions, bounds)
        or _fault_of_history(completions)
        or _fault_of_log_probs(completions, bounds)
        or _fault_of_versions(completions, request, newest)
        or _fault_of_sources(result.rewards, bounds.sources)
    )


def _fault_of_tokens(completions: Completions, bounds: ResultBounds) -> str:
    longest = int(completions.lengths.max()) if len(completions.lengths) else 0
    if longest > bounds.max_length:
        return f"it has a response of {longest} tokens, expected at most {bounds.max_length}"
    ids = completions.tokens[_is_token(completions)]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= bounds.vocab_size):
        return f"it has token ids outside of 0 to {bounds.vocab_size - 1}"
    return ""


def _fault_of_history(completions: Completions) -> str:
    if completions.history_mask is None:
        return ""
    written_by_policy = _is_token(completions)
    if completions.policy_mask is not None:
        written_by_policy = written_by_policy & completions.policy_mask
    if bool((written_by_policy & completions.history_mask).any()):
        return "it says that the policy wrote tokens of a rewritten history"
    return ""


def _fault_of_log_probs(completions: Completions, bounds: ResultBounds) -> str:
    log_probs = completions.log_probs
    if log_probs is None:
        return "it has no log-probs" if bounds.needs_log_probs else ""
    # Padding too: it is multiplied by 0, and 0 * NaN is NaN.
    is_possible = log_probs.isfinite() & (log_probs <= _MAX_LOG_PROB)
    if not bool(is_possible.all()):
        wrong = float(log_probs[~is_possible][0])
        return f"it has a log-prob of {wrong:g}, expected a finite one of at most 0"
    return ""


def _fault_of_versions(completions: Completions, request: GenerationRequest, newest: int) -> str:
    versions = completions.weight_versions
    if versions is None:
        return "it does not say which weights drew its tokens"
    is_token = _is_token(completions)
    if not bool(is_token.any()):
        return ""
    first = int(versions[is_token].min())
    last = int(versions[is_token].max())
    oldest = 0 if request.allow_newer else request.version
    latest = newest if request.allow_newer else request.version
    if first < oldest or last > latest:
        return (
            f"weights of versions {first} to {last} drew its tokens, expected {oldest} to {latest}"
        )
    becomes_older = (versions[:, 1:] < versions[:, :-1]) & is_token[:, 1:]
    if bool(becomes_older.any()):
        return "older weights drew a token after newer ones had drawn the one before"
    return ""


def _fault_of_sources(rewards: Rewards | None, expected: tuple[str, ...] | None) -> str:
    if rewards is None or expected is None:
        return ""
    unknown = [name for name in rewards.by_source if name.partition("/")[0] not in expected]
    if unknown:
        names = ", ".join(expected) or "none by name"
        return f"it has scores of the source {unknown[0]!r}, expected {names}"
    missing = [name for name in expected if name not in rewards.by_source]
    if missing:
        return f"it has no scores of the source {missing[0]!r}"
    return ""


def _is_token(completions: Completions) -> Tensor:
    """Return bool [N, T], False on padding."""
    return length_mask(completions.lengths, completions.tokens.shape[1])
