"""Read and check a run's inputs (model folder, layout, tokenizer, prompts, disk), at its start and in preflight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.config.rules import shape_faults
from reinforce_rl.data.jsonl import resolve_data_prefix
from reinforce_rl.data.prompts import RLHFDatasets
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, ReinforceError
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.model.model import layers_of_stages
from reinforce_rl.preflight.memory import ModelSize
from reinforce_rl.preflight.plan import DiskNeed, disk_need
from reinforce_rl.trainer.build import DTYPES, build_datasets, build_sampler, lora_settings, model_options
from reinforce_rl.trainer.updates import total_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run; None for what could not be read."""

    architecture: Architecture | None
    layers: list[int] | None  # of each pipeline stage
    tokenizer: PreTrainedTokenizerBase | None
    datasets: RLHFDatasets | None
    disk: DiskNeed | None
    errors: tuple[ReinforceError, ...]  # why an input could not be read or cannot be used

    @property
    def faults(self) -> list[str]:
        return [
            fault.replace("\n", "\n     ")
            for error in self.errors
            for fault in (error.faults if isinstance(error, ConfigError) else [str(error)])
        ]

    def checked(self) -> tuple[PreTrainedTokenizerBase, RLHFDatasets]:
        """Return tokenizer and data sets; raise the fault, or a `ConfigError` of several."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors or self.tokenizer is None or self.datasets is None:
            raise ConfigError(self.faults)
        return self.tokenizer, self.datasets


def read_inputs(cfg: TrainConfig) -> Inputs:
    """Check what needs no GPU, other rank or weights, and what `load_config` does not check already."""
    errors: list[ReinforceError] = []

    def attempt(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except ReinforceError as error:
            errors.append(error)
            return None

    folder = Path(cfg.pretrained_checkpoint.restore_from_path)
    architecture = layers = tokenizer = datasets = disk = None
    if (folder / "config.json").is_file():
        architecture = attempt(lambda: Architecture.from_folder(folder))
    layout = layout_of(cfg)
    said = any("_model_parallel_size" in fault for fault in shape_faults(cfg))
    if architecture is not None and layout is not None and not said and cfg.trainer.precision in DTYPES:
        dtype = getattr(torch, DTYPES[cfg.trainer.precision])
        layers = attempt(lambda: layers_of_stages(architecture, layout, dtype, model_options(cfg)))
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = attempt(lambda: load_tokenizer(folder))
    if architecture is not None and tokenizer is not None and len(tokenizer) > architecture.vocab_size:
        errors.append(
            ConfigError(
                [
                    f"the tokenizer of {folder} has {len(tokenizer)} tokens, its model only "
                    f"{architecture.vocab_size} embeddings; is this the tokenizer of another model?"
                ]
            )
        )
    if tokenizer is not None and _prompts_can_be_read(cfg):
        datasets = attempt(lambda: build_datasets(cfg, tokenizer))
    if architecture is not None and datasets is not None and cfg.model.reinforce.num_rollout_samples > 0:
        disk = _disk(cfg, architecture, datasets)
        if disk.fault is not None:
            errors.append(ConfigError([disk.fault]))
    return Inputs(architecture, layers, tokenizer, datasets, disk, tuple(errors))


def layout_of(cfg: TrainConfig) -> Layout | None:
    """Return the configured layout; None if the ranks do not divide, which `load_config` reports."""
    model = cfg.model
    sizes = (model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size)
    world = cfg.trainer.world_size
    if min(*sizes, world) < 1 or world % model.block_size:
        return None
    return Layout(*sizes, world // model.block_size, model.sequence_parallel)


def _prompts_can_be_read(cfg: TrainConfig) -> bool:
    try:
        resolve_data_prefix(cfg.model.data.data_prefix.model_dump())
    except ConfigError:
        return False
    return cfg.model.max_prompt_tokens >= 1 and cfg.model.data.too_long in ("refuse", "skip")


def _disk(cfg: TrainConfig, architecture: Architecture, datasets: RLHFDatasets) -> DiskNeed:
    steps = total_steps(cfg.trainer.reinforce, build_sampler(cfg, datasets.train).steps_per_epoch)
    return disk_need(cfg, ModelSize.from_architecture(architecture, lora_settings(cfg)), steps)
