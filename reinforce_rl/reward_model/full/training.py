"""Training all weights of a reward model: `fit` on one screen.

The loss of a batch is a mean over the whole of it, whatever ranks and micro-batches it is cut into. A held-out part
is evaluated now and then; the model is exported whenever its loss there is the lowest so far, and the run ends early
where it has not fallen for long enough.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from reinforce_rl.data.sampler import PromptSampler, shard
from reinforce_rl.errors import CheckpointError, DataError
from reinforce_rl.reward_model.objectives import Evaluation, Objective

if TYPE_CHECKING:
    from collections.abc import Callable

    from reinforce_rl.megatron.checkpoint.checkpointer import Checkpoint, Checkpointer
    from reinforce_rl.megatron.optimizer import ActorOptimizer, OptimizerUpdate
    from reinforce_rl.reward_model.full.monitor import FullTrainingMonitor
    from reinforce_rl.reward_model.trainable import TrainableRewardModel

STATE_VERSION = 1

Example = TypeVar("Example")


@dataclass(frozen=True)
class FullTrainingSettings:
    """How long and how often, in optimizer steps.

    Attributes:
        total_steps: at most.
        val_check_interval: between two evaluations; each is followed by a checkpoint.
        patience: evaluations without a lower loss, after which the run ends; None for never.
    """

    total_steps: int
    val_check_interval: int
    patience: int | None


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest loss so far, and its step."""

    step: int
    evaluation: Evaluation


class FullTrainer(Generic[Example]):
    """Coordinates passes, optimizer steps, evaluations and checkpoints. Every rank runs the same code.

    Args:
        model: trained.
        optimizer: applies the gradient.
        objective: ranking or regression.
        train, held_out: all examples, the same on every rank.
        sampler: the order of the training examples; its batches are global.
        checkpointer: saves and restores.
        monitor: what people see and what is written down.
        export: writes the model, for the best evaluation so far; a collective call.
        settings: how long and how often.
    """

    def __init__(
        self,
        model: TrainableRewardModel,
        optimizer: ActorOptimizer,
        objective: Objective[Example],
        train: Sequence[Example],
        held_out: Sequence[Example],
        sampler: PromptSampler,
        checkpointer: Checkpointer,
        monitor: FullTrainingMonitor,
        export: Callable[[Best], None],
        settings: FullTrainingSettings,
    ):
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._train, self._held_out, self._sampler = train, held_out, sampler
        self._checkpointer, self._monitor, self._export = checkpointer, monitor, export
        self._settings = settings
        self.step = 0
        self.best: Best | None = None
        self._evaluations_since_best = 0
        self._data_digest = data_digest(objective.names, train, held_out)

    def fit(self) -> None:
        """Train until the last step, or until patience runs out."""
        if self.step == 0:
            self._monitor.log_evaluation(0, self._evaluate())  # where it began; nothing to keep
            self._monitor.commit(0)
        while self.step < self._settings.total_steps and not self.stopped_early:
            start = time.monotonic()
            self._monitor.phase("train")
            metrics, update = self._train_step([self._train[i] for i in next(self._sampler)])
            self.step += 1
            self._monitor.log_step(self.step, metrics, update, time.monotonic() - start)
            at_the_end = self.step == self._settings.total_steps
            if at_the_end or self.step % self._settings.val_check_interval == 0:
                self._monitor.phase("evaluate")
                self._take_in(self._evaluate())
                self._monitor.commit(self.step)
                self._monitor.phase("checkpoint")
                keep = [] if self.best is None else [self.best.step]
                self._checkpointer.save(self.step, self.state_dict(), keep)
            else:
                self._monitor.commit(self.step)

    @property
    def stopped_early(self) -> bool:
        """True once `patience` evaluations in a row did not find a lower loss."""
        patience = self._settings.patience
        return patience is not None and self._evaluations_since_best >= patience

    def _train_step(self, batch: list[Example]) -> tuple[dict[str, float], OptimizerUpdate]:
        mesh, objective = self._model.mesh, self._objective
        mine = shard(batch, mesh.dp_rank, mesh.dp_size)
        count = max(objective.count(batch), 1)

        def loss_of(scores: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
            total, sums = objective.loss(scores, [mine[i] for i in rows])
            return total / count, {**sums, "loss": total.item()}

        sums = self._model.accumulate([objective.sequences_of(example) for example in mine], loss_of)
        update = self._optimizer.step()
        every = [one for part in mesh.gather_over_dp(sums) for one in part]
        return {name: sum(one[name] for one in every) / count for name in every[0]}, update

    def _evaluate(self) -> Evaluation:
        mesh = self._model.mesh
        mine = shard(self._held_out, mesh.dp_rank, mesh.dp_size)
        scores = self._model.scores([self._objective.sequences_of(example) for example in mine])
        every = torch.cat([part for part in mesh.gather_over_dp(scores) if len(part)])
        if not every.isfinite().all():
            raise DataError(
                f"the model's scores of held-out data are not finite after step {self.step}; lower model.optim.lr"
            )
        return self._objective.evaluate(every, self._held_out)

    def _take_in(self, evaluation: Evaluation) -> None:
        self._monitor.log_evaluation(self.step, evaluation)
        if self.best is not None and evaluation.loss >= self.best.evaluation.loss:
            self._evaluations_since_best += 1
            return
        self.best, self._evaluations_since_best = Best(self.step, evaluation), 0
        self._monitor.phase("export")
        self._export(self.best)

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "sampler": self._sampler.state_dict(),
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "evaluations_since_best": self._evaluations_since_best,
            "data": self._data_digest,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of this run; a collective call.

        Raises:
            CheckpointError: it is of other data or another program, or damaged.
        """
        state = checkpoint.trainer_state
        if state.get("version") != STATE_VERSION or "evaluations_since_best" not in state:
            raise CheckpointError(f"{checkpoint.folder} is no checkpoint of this program; choose another output_dir")
        if state["data"] != self._data_digest:
            raise CheckpointError(
                f"{checkpoint.folder} was made with other data (files, lengths, split or attributes); set them back, "
                "or start a new run with another output_dir"
            )
        self._sampler.load_state_dict(state["sampler"])
        self._checkpointer.restore(checkpoint)
        self.step, self._evaluations_since_best = state["step"], state["evaluations_since_best"]
        if state["best"] is not None:
            self.best = best_of(state["best"])


def data_digest(names: Sequence[str], train: Sequence[object], held_out: Sequence[object]) -> str:
    """sha256 (hex) over what a run learns from and is measured on."""
    digest = hashlib.sha256(json.dumps(names).encode())
    for example in (*train, None, *held_out):
        digest.update(repr(example).encode())
    return digest.hexdigest()


def best_of(state: dict[str, Any]) -> Best:
    """Inverse of `dataclasses.asdict`."""
    from reinforce_rl.reward_model.evaluation import ReliabilityBin

    evaluation = state["evaluation"]
    bins = tuple(ReliabilityBin(**one) for one in evaluation["reliability"])
    return Best(state["step"], Evaluation(evaluation["loss"], evaluation["metrics"], bins))
