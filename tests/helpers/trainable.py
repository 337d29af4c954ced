"""A tiny reward model at any layout, and its results on fixed examples."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from helpers.batches import gradient_of
from helpers.layouts import SETTINGS, Layout
from torch import Tensor

from reinforce_rl.data.sampler import shard
from reinforce_rl.megatron.checkpointer import Checkpointer
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.reward_model.data import EncodedPair, EncodedRating
from reinforce_rl.reward_model.objectives import Objective, Ranking, Regression
from reinforce_rl.reward_model.train_full import TrainableRewardModel, load_trainable

VOCAB_SIZE = 61
PAD_ID = 0
NAMES = ("kind", "brief", "true")
CASES: dict[str, tuple[Objective, str]] = {
    "ranking": (Ranking(), "last"),
    "regression": (Regression(NAMES), "mean"),
}


def examples_of(objective: Objective, count: int = 7) -> list[Any]:
    """Return examples of unequal lengths, some ending with padding tokens.

    Every third rating is missing.
    """
    rng = random.Random(1)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        drawn = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(least, most))]
        return (*drawn, *([PAD_ID] if rng.random() < 0.3 else []))

    if isinstance(objective, Ranking):
        return [
            EncodedPair(str(i), tokens(1, 6), tokens(1, 20), tokens(1, 20)) for i in range(count)
        ]

    def rating() -> float:
        return math.nan if rng.random() < 0.3 else rng.uniform(-2, 2)

    ratings = [tuple(rating() for _ in NAMES) for _ in range(count)]
    return [EncodedRating(str(i), tokens(1, 20), ratings[i]) for i in range(count)]


def model_of(
    folder: str | Path,
    mesh: Mesh,
    case: str,
    layout: Layout | None = None,
    *,
    micro_batch_size: int = 4,
) -> TrainableRewardModel:
    objective, pooling = CASES[case]
    layout = layout or Layout()
    lm = load_trainable(folder, mesh, objective.names, seed=3, options=layout.model)
    options = {"pad_id": PAD_ID, "micro_batch_size": micro_batch_size, "optim": layout.optim}
    return TrainableRewardModel(lm, pooling=pooling, **options)


def take_gradient(model: TrainableRewardModel, case: str, examples: list[Any]) -> float:
    """Fill the gradient buffers; return the loss over all ranks."""
    objective, _ = CASES[case]
    mesh = model.mesh
    mine = shard(examples, mesh.dp_rank, mesh.dp_size)
    count = objective.count(examples)

    def loss_of(scores: Tensor, rows: list[int]) -> tuple[Tensor, float]:
        total, _ = objective.loss(scores, [mine[i] for i in rows])
        return total / count, total.item() / count

    losses = model.accumulate([objective.sequences_of(example) for example in mine], loss_of)
    return sum(part for parts in mesh.gather_over_dp(losses) for part in parts)


def computed(
    layout: Layout, folder: str | Path, mesh: Mesh, out: Path | None = None
) -> dict[str, Any]:
    """Compute all results that must not depend on the layout; a collective call."""
    results: dict[str, Any] = {}
    for case, (objective, _) in CASES.items():
        model = model_of(folder, mesh, case, layout)
        built = build_optimizer(model.ddp, **SETTINGS)
        optimizer = ActorOptimizer(*built)
        examples = examples_of(objective)
        groups = [objective.sequences_of(example) for example in examples]
        results[f"{case} scores"] = model.scores(groups)
        take_gradient(model, case, examples[:1])  # fewer than the data-parallel ranks
        results[f"{case} gradient of one"] = gradient_of(model)
        results[f"{case} loss"] = take_gradient(model, case, examples)
        results[f"{case} gradient"] = gradient_of(model)
        results[f"{case} norm"] = optimizer.step().grad_norm
        take_gradient(model, case, examples[2:])
        optimizer.step()
        results[f"{case} scores after"] = model.scores(groups)
        if out is not None:
            Checkpointer(out / f"{case}.checkpoints", mesh, model.ddp, *built).save(2, {})
            model.export(folder, out / case, objective.names, PAD_ID)
    return results
