"""Runs resumed at other layouts, and comparisons of their checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.checkpoint_run import OPTIM, Run
from helpers.families import MODELS
from helpers.layouts import LAYOUTS, Layout
from helpers.lora import EVERY
from helpers.models import tiny_family_folder
from megatron.core import dist_checkpointing
from torch import Tensor

from reinforce_rl.megatron.checkpointer import latest_checkpoint
from reinforce_rl.megatron.lora import LoraSettings
from reinforce_rl.megatron.mesh import Mesh

SAVED_AFTER = 2
STEPS = 3
ONE = "one process"
ALL_LAYOUTS = {ONE: Layout(), **LAYOUTS}
EPS = 1e-3  # with a smaller eps, the sign of a near-zero gradient would decide a weight's step


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: str  # a model of `helpers.families`, with four layers so that stages can be uneven
    updates: LoraSettings | None = None  # LoRA settings; None trains all weights
    dtype: torch.dtype = torch.float32


# Tied and untied embeddings; heads, groups and vocabulary that are padded at TP=2.
CASES = {
    "tied": Case("llama_bias_padded"),
    "untied": Case("qwen3_padded"),
    "lora": Case("llama_bias_padded", EVERY),
    "bf16": Case("llama_bias_padded", dtype=torch.bfloat16),
    "bf16 lora": Case("qwen3_padded", EVERY, torch.bfloat16),
}


def write_model(out: Path, case: str) -> Path:
    family, keys = MODELS[CASES[case].model]
    return tiny_family_folder(out / case / "model", family, **{**keys, "num_hidden_layers": 4})


def run_of(out: Path, case: str, layout: str, folder: str, mesh: Mesh) -> Run:
    """Return a new run with checkpoints in OUT/CASE/FOLDER."""
    settings = CASES[case]
    where = ALL_LAYOUTS[layout]
    sharing = where.optim
    optim = OPTIM.model_copy()
    optim.eps = EPS
    optim.distributed = sharing.distributed
    optim.overlap_grad_sync = sharing.overlap_grad_sync
    return Run(
        mesh,
        out / case / "model",
        out / case / folder,
        optim,
        dtype=settings.dtype,
        updates=settings.updates,
        model=where.model,
        asynchronous=True,
    )


def save_and_train(
    out: Path, case: str, layout: str, mesh: Mesh
) -> tuple[list[float], dict[str, Tensor]]:
    """Save, train three steps, and return the losses and this rank's weights."""
    run = run_of(out, case, layout, layout, mesh)
    run.train_on(0, SAVED_AFTER)
    run.checkpointer.save(SAVED_AFTER, {"step": SAVED_AFTER})
    losses = run.train_on(SAVED_AFTER, STEPS)
    run.checkpointer.finish()
    return losses, run.weights()


def load_and_train(
    out: Path, case: str, source: str, layout: str, mesh: Mesh
) -> tuple[list[float], dict[str, Tensor]]:
    """Load, save to OUT/CASE/SOURCE to LAYOUT, then continue like `save_and_train`."""
    run = run_of(out, case, layout, f"{source} to {layout}", mesh)
    run.train_on(50, 1)
    newest = latest_checkpoint(out / case / source)
    assert newest is not None
    run.checkpointer.restore(newest)
    run.checkpointer.save(SAVED_AFTER, {"step": SAVED_AFTER})
    losses = run.train_on(SAVED_AFTER, STEPS)
    run.checkpointer.finish()
    return losses, run.weights()


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the full tensors of the newest checkpoint: weights, moments and fp32 weights."""
    newest = latest_checkpoint(folder)
    assert newest is not None
    stored: dict[str, Any] = dist_checkpointing.load_plain_tensors(str(newest.folder / "model"))
    return {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}
