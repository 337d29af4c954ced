"""Full-parameter reward-model training on any parallel layout.

The loss is a mean over the global batch, independent of ranks and micro-batches. The model is
evaluated on held-out data at intervals and exported at each new lowest loss. Training stops early
when patience runs out.

Notation: E examples of G sequences each, S tokens, K scores of a sequence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.sampler import PromptSampler, shard
from reinforce_rl.errors import CheckpointError, ConfigError, DataError, Fault
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.hf_folder import HFFolder
from reinforce_rl.megatron.hf_weights import check_headers, export_hf_folder, load_hf_weights
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import DEFAULT_OPTIONS, CausalLM, ModelOptions
from reinforce_rl.megatron.model.reward_head import (
    POOLING_KEY,
    RewardHead,
    counted_lengths,
    head_scores,
)
from reinforce_rl.megatron.optimizer import wrap_data_parallel
from reinforce_rl.megatron.schedule import accumulate_gradients, forward_passes
from reinforce_rl.megatron.weight_map import SCORE_LAYER
from reinforce_rl.monitoring.loggers import METRICS_FILE, JsonlLogger, Loggers
from reinforce_rl.monitoring.progress import Shown, TrainingProgress
from reinforce_rl.monitoring.run import RunMonitor
from reinforce_rl.policy.micro_batches import micro_batches
from reinforce_rl.reward_model.objectives import Best, Evaluation, Objective, Regression

if TYPE_CHECKING:
    from reinforce_rl.config.reward_model import FullConfig
    from reinforce_rl.megatron.checkpointer import Checkpoint, Checkpointer
    from reinforce_rl.megatron.optimizer import ActorOptimizer, OptimizerUpdate
    from reinforce_rl.reward_model.data import Examples

T = TypeVar("T")
Group = Sequence[Sequence[int]]
"""The G sequences of one example."""
MicroBatch = tuple[list[int], list[Group]]
"""The indices of its examples, and their sequences."""

STATE_VERSION = 1
SCORE_NAME = "reward"  # name of a single score in an exported folder
SHOWN: tuple[Shown, ...] = (
    ("loss", "loss", "loss", ".4f"),
    ("accuracy", "accuracy", "accuracy", ".3f"),
    ("calibration_error", "calibration error", "ECE", ".3f"),
    ("grad_norm", "gradient norm", "grad", ".3g"),
    ("lr", "learning rate", "lr", ".2e"),
)


class RewardModelMonitor(RunMonitor):
    """Writes the terminal display and `metrics.jsonl` on the first rank.

    Args:
        start_step: step of the checkpoint to resume from; 0 for none.
        enabled: False on the other ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        total_steps: int,
        start_step: int,
        objective: Objective,
        *,
        enabled: bool,
    ):
        hidden = ("accuracy", "calibration_error") if isinstance(objective, Regression) else ()
        shown = [metric for metric in SHOWN if metric[0] not in hidden]
        phases = ("train_time",)
        progress = TrainingProgress(
            total_steps, start_step, enabled, title="reward model", shown=shown, phases=phases
        )
        metrics = (
            [JsonlLogger(Path(folder) / METRICS_FILE, resume_step=start_step)] if enabled else []
        )
        super().__init__(folder, Loggers(metrics), progress)

    def log_update(
        self, step: int, metrics: dict[str, float], update: OptimizerUpdate, seconds: float
    ) -> None:
        """Log a training step; stored by `commit`."""
        values = {
            **metrics,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "skipped_step": float(update.skipped),
        }
        self._log(values, step, "train/")
        self.metrics.log_metrics({"train_time": seconds}, step, "timers/")
        self.progress.update(step, values, {"train_time": seconds, "step_time": seconds})

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log an evaluation after `step`; stored by `commit`."""
        values = {"loss": evaluation.loss, **evaluation.metrics}
        self.metrics.log_metrics(values, step, "val/")
        self.progress.validation(step, values)


class FullTrainer:
    """Runs passes, optimizer steps, evaluations and checkpoints; every rank makes the same calls.

    Args:
        data: all examples, the same on every rank.
        sampler: order of the training examples; its batches are global.
        export: writes the model at each new best evaluation; a collective call.
        settings: evaluation interval and patience.
    """

    def __init__(
        self,
        model: TrainableRewardModel,
        optimizer: ActorOptimizer,
        objective: Objective,
        data: Examples[Any],
        sampler: PromptSampler,
        checkpointer: Checkpointer,
        monitor: RewardModelMonitor,
        export: Callable[[Best], None],
        total_steps: int,
        settings: FullConfig,
    ):
        self._model = model
        self._optimizer = optimizer
        self._objective = objective
        self._train = data.train
        self._held_out = data.held_out
        self._sampler = sampler
        self._checkpointer = checkpointer
        self._monitor = monitor
        self._export = export
        self._total_steps = total_steps
        self._settings = settings
        self.step = 0
        self.best: Best | None = None
        self._evaluations_since_best = 0
        digest = hashlib.sha256(json.dumps(objective.names).encode())
        for example in (*self._train, None, *self._held_out):
            digest.update(repr(example).encode())
        self._data_digest = digest.hexdigest()

    def fit(self) -> None:
        if self.step == 0:
            self._monitor.log_evaluation(0, self._evaluate())  # initial weights, never exported
            self._monitor.commit(0)
        while self.step < self._total_steps and not self.stopped_early:
            start = time.monotonic()
            self._monitor.phase("train")
            metrics, update = self._train_step([self._train[i] for i in next(self._sampler)])
            self.step += 1
            self._monitor.log_update(self.step, metrics, update, time.monotonic() - start)
            if self.step == self._total_steps or self.step % self._settings.val_check_interval == 0:
                self._monitor.phase("evaluate")
                self._keep_if_best(self._evaluate())
                self._monitor.commit(self.step)
                self._monitor.phase("checkpoint")
                keep = [] if self.best is None else [self.best.step]
                self._checkpointer.save(self.step, self.state_dict(), keep)
            else:
                self._monitor.commit(self.step)

    @property
    def stopped_early(self) -> bool:
        """Whether `patience` evaluations in a row had no lower loss."""
        patience = self._settings.patience
        return patience is not None and self._evaluations_since_best >= patience

    def _train_step(self, batch: list[Any]) -> tuple[dict[str, float], OptimizerUpdate]:
        mesh = self._model.mesh
        objective = self._objective
        mine = shard(batch, mesh.dp_rank, mesh.dp_size)
        count = max(objective.count(batch), 1)

        def loss_of(scores: Tensor, rows: list[int]) -> tuple[Tensor, dict[str, float]]:
            total, sums = objective.loss(scores, [mine[i] for i in rows])
            return total / count, {**sums, "loss": total.item()}

        sums = self._model.accumulate(
            [objective.sequences_of(example) for example in mine], loss_of
        )
        update = self._optimizer.step()
        gathered = [sums_of_pass for part in mesh.gather_over_dp(sums) for sums_of_pass in part]
        means = {
            name: sum(sums_of_pass[name] for sums_of_pass in gathered) / count
            for name in gathered[0]
        }
        return means, update

    def _evaluate(self) -> Evaluation:
        mesh = self._model.mesh
        mine = shard(self._held_out, mesh.dp_rank, mesh.dp_size)
        scores = self._model.scores([self._objective.sequences_of(example) for example in mine])
        every = torch.cat([part for part in mesh.gather_over_dp(scores) if len(part)])
        if not every.isfinite().all():
            raise DataError(
                f"the model's scores of held-out data are not finite after step {self.step}; lower "
                "model.optim.lr",
                key="reward_model.scores.not_finite",
            )
        return self._objective.evaluate(every, self._held_out)

    def _keep_if_best(self, evaluation: Evaluation) -> None:
        self._monitor.log_evaluation(self.step, evaluation)
        if self.best is not None and evaluation.loss >= self.best.evaluation.loss:
            self._evaluations_since_best += 1
            return
        self.best = Best(self.step, evaluation)
        self._evaluations_since_best = 0
        self._monitor.phase("export")
        self._export(self.best)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "sampler": self._sampler.state_dict(),
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "evaluations_since_best": self._evaluations_since_best,
            "data": self._data_digest,
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint of this run; a collective call.

        Raises:
            CheckpointError: the checkpoint has other data or another version, or is damaged.
        """
        state = checkpoint.trainer_state
        if state.get("version") != STATE_VERSION or "evaluations_since_best" not in state:
            raise CheckpointError(
                f"{checkpoint.folder} is not a checkpoint of this program; choose another "
                "output_dir",
                key="reward_model.checkpoint.other_program",
            )
        if state["data"] != self._data_digest:
            raise CheckpointError(
                f"{checkpoint.folder} was made with other data (files, lengths, split or "
                "attributes); restore them, or choose another output_dir",
                key="reward_model.checkpoint.other_data",
            )
        self._sampler.load_state_dict(state["sampler"])
        self._checkpointer.restore(checkpoint)
        self.step = state["step"]
        self._evaluations_since_best = state["evaluations_since_best"]
        self.best = TypeAdapter(Best | None).validate_python(state["best"])


class TrainableRewardModel:
    """A trunk and a linear head without bias, as in transformers' classifiers.

    Args:
        lm: a classifier, weights loaded.
        pad_id: with pooling `last`, trailing tokens of this id are ignored; see `counted_lengths`.
        micro_batch_size: sequences per pass; an example's sequences are never split.
    """

    def __init__(
        self,
        lm: CausalLM,
        pooling: str,
        pad_id: int | None,
        micro_batch_size: int,
        optim: OptimConfig,
    ):
        self.lm = lm
        self.mesh = lm.mesh
        self.ddp = wrap_data_parallel(lm, optim)
        self._pooling = pooling
        self._micro_batch_size = micro_batch_size
        self._pad_id = pad_id if pooling == "last" else None

    def accumulate(
        self, groups: Sequence[Group], loss_of: Callable[[Tensor, list[int]], tuple[Tensor, T]]
    ) -> list[T]:
        """Zero the gradient buffers and accumulate a loss's gradient into them; a collective call.

        Args:
            groups: examples of this data-parallel rank; may be empty.
            loss_of: maps scores [E', G, K] and the indices of a micro-batch's E' examples to their
                share of the global loss, with gradient, and an extra result.

        Returns the extra results.
        """

        def loss(hidden: Tensor, part: MicroBatch) -> tuple[Tensor, list[T]]:
            scores = self._score(hidden, part)
            if not part[0]:
                return 0.0 * scores.sum(), []
            share, result = loss_of(scores, part[0])
            return share, [result]

        self.lm.train()
        # A rank without examples still runs one pass: the passes are collective.
        parts = self._micro_batches(groups) or [([], [[[0]]])]
        local_results = accumulate_gradients(self.ddp, parts, self._hidden, loss, self._stage_shape)
        return [
            result for results in self.mesh.from_last_stage(local_results) for result in results
        ]

    def scores(self, groups: Sequence[Group]) -> Tensor:
        """Return scores without gradient, float32 [E, G, K], on the CPU; a collective call.

        All ranks of a block get them.
        """
        if not groups:
            return torch.zeros((0, 1, 1))
        self.lm.eval()
        parts = self._micro_batches(groups)
        by_part = self.mesh.from_last_stage(
            forward_passes(
                self.lm,
                parts,
                self._hidden,
                lambda hidden, part: self._score(hidden, part).float().cpu(),
                self._stage_shape,
            )
        )
        out = torch.zeros((len(groups), *by_part[0].shape[1:]))
        for (rows, _), scores in zip(parts, by_part, strict=True):
            out[rows] = scores
        return out

    def export(
        self, source: str | Path, out: str | Path, names: Sequence[str], pad_id: int | None
    ) -> Path:
        """Write a Hugging Face `...ForSequenceClassification` folder; a collective call.

        Args:
            source: the run's initial model folder.
            out: output folder, replaced if it exists.
            names: names of the K scores; empty for a single score.
            pad_id: the tokenizer's padding token, for transformers.
        """
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        )

        names = tuple(names) or (SCORE_NAME,)
        family = self.lm.architecture.raw["model_type"]
        values = {
            "architectures": [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[family]],
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": "regression",
            "pad_token_id": pad_id,
            POOLING_KEY: self._pooling,
        }
        return export_hf_folder(self.lm, source, out, config_values=values)

    def _micro_batches(self, groups: Sequence[Group]) -> list[MicroBatch]:
        if not groups:
            return []
        lengths = torch.tensor([max(map(len, group)) for group in groups])
        cuts = micro_batches(lengths, max(self._micro_batch_size // len(groups[0]), 1))
        return [(rows, [groups[i] for i in rows]) for rows in (cut.tolist() for cut in cuts)]

    def _hidden(self, model: torch.nn.Module, part: MicroBatch) -> Tensor:
        return model(self._tokens(part)[0])

    def _stage_shape(self, part: MicroBatch) -> tuple[int, int, int]:
        lengths = [len(sequence) for group in part[1] for sequence in group]
        return self.lm.stage_shape(len(lengths), max(lengths))

    def _score(self, hidden: Tensor, part: MicroBatch) -> Tensor:
        """Return [E, G, K], on the last stage."""
        tokens, lengths = self._tokens(part)
        counted = counted_lengths(tokens, lengths, self._pad_id)
        scores = head_scores(
            hidden, self.lm, self.lm.score.weight, counted, tokens.shape[1], self._pooling
        )
        return scores.view(len(part[1]), len(part[1][0]), -1)

    def _tokens(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return tokens int64 [E G, S], right-padded, and lengths int64 [E G]."""
        sequences = [torch.tensor(sequence) for group in part[1] for sequence in group]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        return tokens.to(self.mesh.device), lengths.to(self.mesh.device)


def load_trainable(
    folder: str | Path,
    mesh: Mesh,
    names: Sequence[str],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    options: ModelOptions = DEFAULT_OPTIONS,
) -> CausalLM:
    """Load a Hugging Face folder as a classifier; a language model gets a new head.

    `names` is empty for a single score. A new head's weights are drawn with `seed`, normal with
    variance 1 / (hidden size + 1) (as in arXiv:2203.02155).

    Raises:
        ConfigError: the folder's head has other scores, or the model is not supported.
        CheckpointError: the folder cannot be read.
    """
    architecture = Architecture.from_folder(folder)
    weights = HFFolder(folder)
    if SCORE_LAYER in weights:
        attributes = RewardHead.from_classifier(weights).attributes
        if attributes != tuple(names):
            has, wanted = (
                ", ".join(names_of_scores) or "one reward"
                for names_of_scores in (attributes, names)
            )
            raise ConfigError(
                [
                    Fault(
                        f"the head of {folder} scores {has}, but this run trains {wanted}; set "
                        "full.objective and full.attributes to the head's, or begin with a "
                        "language model's folder",
                        key="reward_model.head.other_scores",
                    )
                ]
            )
    architecture = architecture.as_classifier(max(len(names), 1))
    # Check first: a model of config.json's size takes memory.
    check_headers(architecture, weights)
    lm = CausalLM(architecture, mesh, dtype, options)
    if mesh.is_last_stage:
        generator = torch.Generator().manual_seed(seed)
        start = (
            torch.randn(lm.score.weight.shape, generator=generator)
            / (architecture.hidden_size + 1) ** 0.5
        )
        with torch.no_grad():
            lm.score.weight.copy_(start)
    load_hf_weights(lm, weights)
    return lm
