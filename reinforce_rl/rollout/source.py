"""Where a trainer's rollouts come from: `LocalRollouts`, or `RemoteRollouts` of other processes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from reinforce_rl.data.batches import Prompt, RolloutBatch
from reinforce_rl.rewards.base import RewardSource
from reinforce_rl.runtime.phases import PhaseTracker, StepClock
from reinforce_rl.runtime.stop import StopRequest

if TYPE_CHECKING:
    from reinforce_rl.config.actor import ReinforceConfig
    from reinforce_rl.data.prompts import PromptLoader
    from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

BatchIterator = Callable[[Sequence[Prompt], bool], Iterable[Sequence[Prompt]]]


@dataclass(frozen=True)
class RolloutHandle:
    """The prompts of a step, or of a validation, that were submitted together."""

    numbers: list[list[int]]  # of each data-parallel rank's requests, in order
    version: int
    # by prompt, all ranks' results from a checkpoint
    stored: dict[int, dict[str, Any]] | None = None


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a step."""

    prompts: list[Prompt]  # this rank's share
    position: dict[str, Any]  # of the loader after them
    handle: RolloutHandle | None = None  # None until it is submitted to generators


@dataclass(frozen=True)
class StepRollouts:
    """The rollouts of a step."""

    prompts: list[Prompt]  # all that this rank drew
    position: dict[str, Any]  # of the loader after them
    batch: RolloutBatch  # this rank's samples; with dynamic filtering, only of groups to train on
    metrics: dict[str, float]  # means over all ranks and all samples drawn


@dataclass(frozen=True)
class RolloutContext:
    """What a trainer gives the source of its rollouts."""

    cfg: ReinforceConfig
    model: MegatronGPTReinforceActorModel
    rm: RewardSource | None  # None scores nothing
    # Called with (prompts, validation); yields the batches to generate together.
    batch_iterator_cls: BatchIterator
    loader: PromptLoader  # of the prompts of steps
    clock: StepClock
    stop: StopRequest
    # a batch takes more than one optimizer step, so old log-probs are needed
    has_ratios: bool = False
    # Entered around generation.
    while_generating: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    staleness: int = 0  # steps by which the weights that drew a rollout may lag behind
    max_steps: int = sys.maxsize

    @property
    def is_off_policy(self) -> bool:
        """True if a step may train on samples of older weights than its own."""
        return self.staleness > 0

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Surround the generation of a step."""
        with self.clock.phase("generate"), self.while_generating():
            yield


class RolloutSource(Protocol):
    """Samples and scores the prompts of steps and validations; all ranks call it alike.

    Calls that wait raise StoppedEarly if a rank was asked to stop, RewardServerError without an
    answer or with too many failed samples, GenerationError if an engine or a generator cannot
    continue.
    """

    @property
    def is_over(self) -> bool:
        """True if no prompts are left."""
        ...

    def next_batch(self, step: int) -> StepRollouts:
        """Return rollouts of the next prompts; `step`, from 1, keys the sampling noise.

        After an error the same step can be made again, but not with dynamic filtering.
        """
        ...

    def evaluate(
        self,
        name: str,
        step: int,
        prompts: Sequence[Prompt],
        phases: PhaseTracker,
        num_samples: int = 1,
    ) -> RolloutBatch:
        """Sample this rank's prompts as in a validation, and score the responses."""
        ...

    def publish_weights(self, version: int) -> None:
        """Use the policy's current weights, trained by `version` steps, from the next response."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """On rank 0, wait for rollouts of later steps; return them as bytes, under `rollouts`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, whose weights and loader's position are loaded.

        `state` has the `rollouts` of a `state_dict` beside what the trainer stores: the `step`, and
        the ids of the prompts `under_way`, of the loader's position.
        """
        ...

    def close(self) -> None: ...


def draw_prompts(loader: PromptLoader) -> PromptBatch:
    """Draw the prompts of one more step."""
    return PromptBatch(next(loader), loader.state_dict())


def prompts_under_way(loader: PromptLoader, prompt_ids: Sequence[int]) -> Iterator[PromptBatch]:
    """Yield the prompts that an earlier start of the run had drawn, and no step has taken."""
    size = loader.prompts_per_step
    for start in range(0, len(prompt_ids), size):
        rest = prompt_ids[start + size :]
        share = loader.share(prompt_ids[start : start + size])
        yield PromptBatch(share, {**loader.state_dict(), "under_way": rest})
