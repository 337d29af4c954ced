"""The arguments of `ReinforceTrainer` that NeMo-Aligner's trainer does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from reinforce_rl.data.batches import Prompt
from reinforce_rl.rollout.local import LocalRollouts
from reinforce_rl.rollout.source import RolloutContext, RolloutSource
from reinforce_rl.runtime.phases import PhaseTracker
from reinforce_rl.runtime.profiling import StepProfiler
from reinforce_rl.runtime.stop import StopRequest
from reinforce_rl.trainer.state import BestCheckpoints
from reinforce_rl.trainer.step_recorder import StepRecorder


@dataclass(frozen=True)
class TrainerServices:
    """What a run adds to NeMo-Aligner's arguments; the defaults are a run without any of it."""

    # Prompts of an optimizer step, over all ranks; None: all of the rollout batch.
    prompts_per_update: int | None = None
    # Which validations' checkpoints are kept; the default keeps none.
    best: BestCheckpoints = field(default_factory=BestCheckpoints)
    # Called with `collate_fn`, as the other two builders; None: no test after the training.
    test_dataloader_builder: Callable[..., Iterable[Sequence[Prompt]]] | None = None
    # The phase of this rank, which the watch over ranks and the progress line read.
    phases: PhaseTracker = field(default_factory=PhaseTracker)
    # Whether this rank was asked to stop, by a signal for instance; the default never is.
    stop: StopRequest = field(default_factory=StopRequest)
    # Traces chosen steps; None traces none.
    profiler: StepProfiler | None = None
    # Called once, by the trainer; by default the trainer's own model generates.
    make_rollout_source: Callable[[RolloutContext], RolloutSource] = LocalRollouts
    # Steps by which the weights that generated a rollout may lag behind the trainer's.
    max_staleness: int = 0
    # Records what each step took and gave, for `reinforce-rl replay`; None records samples only.
    recorder: StepRecorder | None = None
