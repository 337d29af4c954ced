"""What trainers and generators tell each other; `message_codec` puts it on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforce_rl.data.batches import Completions, Prompt, length_mask
from reinforce_rl.errors import ReinforceError
from reinforce_rl.rewards.base import Rewards

RANKS = 4096  # ranks of a generator have the numbers from RANKS times its own on
HELLO = b"generator"


# From a generator


@dataclass(frozen=True)
class Arrival:
    """A rank of a generator that is a program of its own has come."""

    size: int  # ranks of this generator
    name: str  # host and process
    settings: Mapping[str, Any]  # must equal the trainers' settings


@dataclass(frozen=True)
class WorkRequest:
    """A generator asks for works."""

    count: int  # a negative count withdraws earlier requests


@dataclass(frozen=True)
class Result:
    """The answer to a `Work`."""

    number: int
    prompt_ids: tuple[int, ...]
    completions: Completions | None = None  # None after a failure
    rewards: Rewards | None = None
    failure: ReinforceError | None = None  # of the engine if there are no completions, else of the reward source


@dataclass(frozen=True)
class GeneratorFailed:
    """A generator cannot go on."""

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
class Work:
    """A micro-batch of prompts to answer."""

    number: int
    step: int  # 0 of a validation
    version: int  # of the weights
    prompts: tuple[Prompt, ...]
    num_samples: int
    seed: int
    or_newer: bool = False  # of weights of this version or, rather, newer ones; then of one prompt

    @property
    def validation(self) -> bool:
        return self.step == 0


@dataclass(frozen=True)
class Works:
    works: tuple[Work, ...]


@dataclass(frozen=True)
class WeightsAnnounced:
    """All generators are to receive the weights of a version now."""

    version: int


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
    Arrival
    | WorkRequest
    | Result
    | GeneratorFailed
    | Received
    | EndReceived
    | Works
    | WeightsAnnounced
    | RunEnded
    | NewWeights
    | Abandoned
    | Dismissed
)


def fault_of_result(work: Work, result: Result, *, newest: int, vocab_size: int) -> str:
    """Say why a result cannot be the answer to this work; empty if it can.

    Args:
        newest: version of the weights that generators may have.
        vocab_size: of the model; a token id beyond it has no embedding.
    """
    if result.prompt_ids != tuple(prompt.id for prompt in work.prompts):
        return f"its prompts are {result.prompt_ids}, expected those of work {work.number}"
    completions = result.completions
    if completions is None:
        return "" if result.failure is not None else "it has neither responses nor a failure"
    count = len(work.prompts) * work.num_samples
    if len(completions.lengths) != count:
        return f"it has {len(completions.lengths)} responses, expected {count}"
    versions = completions.weight_versions
    if versions is None:
        return "it does not say which weights drew its tokens"
    is_token = length_mask(completions.lengths, completions.tokens.shape[1])
    if not bool(is_token.any()):
        return ""
    ids = completions.tokens[is_token]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return f"it has token ids outside of 0 to {vocab_size - 1}"
    first = int(versions[is_token].min())
    last = int(versions[is_token].max())
    oldest = 0 if work.or_newer else work.version
    latest = newest if work.or_newer else work.version
    if first < oldest or last > latest:
        return f"weights of versions {first} to {last} drew its tokens, expected {oldest} to {latest}"
    return ""
