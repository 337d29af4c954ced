"""Read and check the inputs of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.config.rules import shape_faults
from reinforce_rl.data.data_prefix import resolve_data_prefix
from reinforce_rl.data.prompts import RLHFDatasets
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, Fault, ReinforceError, key_of
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.model.model import layers_of_stages
from reinforce_rl.megatron.size import ModelSize
from reinforce_rl.monitoring.backends import check_logger_classes
from reinforce_rl.policy.build import (
    DTYPES,
    check_vocabulary,
    lora_settings,
    model_options,
    stop_token_ids,
)
from reinforce_rl.rollout.prompts import build_datasets, build_sampler
from reinforce_rl.trainer.disk import DiskNeed, disk_need
from reinforce_rl.trainer.updates import total_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run; None if one could not be read."""

    architecture: Architecture | None
    layers: list[int] | None  # of each pipeline stage
    tokenizer: PreTrainedTokenizerBase | None
    datasets: RLHFDatasets | None
    disk: DiskNeed | None
    errors: tuple[ReinforceError, ...]  # of inputs that could not be read or cannot be used

    @property
    def faults(self) -> list[str]:
        faults: list[str] = []
        for error in self.errors:
            if isinstance(error, ConfigError):
                faults.extend(error.faults)
            else:
                faults.append(Fault(str(error), key=error.key))
        return [Fault(fault.replace("\n", "\n     "), key=key_of(fault)) for fault in faults]

    def checked(self) -> tuple[PreTrainedTokenizerBase, RLHFDatasets]:
        """Return tokenizer and data sets; raise the fault, or a `ConfigError` of several."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors or self.tokenizer is None or self.datasets is None:
            raise ConfigError(self.faults)
        return self.tokenizer, self.datasets


def read_inputs(cfg: TrainConfig) -> Inputs:
    """Check the inputs that need no GPU, other rank or weights, beyond `load_config`."""
    errors: list[ReinforceError] = []

    def attempt(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except ReinforceError as error:
            errors.append(error)
            return None

    attempt(lambda: check_logger_classes(cfg))
    folder = Path(cfg.pretrained_checkpoint.restore_from_path)
    architecture = None
    layers = None
    tokenizer = None
    datasets = None
    disk = None
    if (folder / "config.json").is_file():
        architecture = attempt(lambda: Architecture.from_folder(folder))
    layout = layout_of(cfg)
    # `load_config` reports sizes that the architecture does not allow.
    has_faulty_sizes = any("_model_parallel_size" in fault for fault in shape_faults(cfg))
    if (
        architecture is not None
        and layout is not None
        and not has_faulty_sizes
        and cfg.trainer.precision in DTYPES
    ):
        layers = attempt(lambda: stage_layers(cfg, architecture, layout))
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = attempt(lambda: load_tokenizer(folder))
    if architecture is not None and tokenizer is not None:
        attempt(lambda: check_vocabulary(tokenizer, architecture, folder))
        attempt(lambda: stop_token_ids(folder, tokenizer))
    if tokenizer is not None and _prompts_can_be_read(cfg):
        datasets = attempt(lambda: build_datasets(cfg, tokenizer))
    if (
        architecture is not None
        and datasets is not None
        and cfg.model.reinforce.num_rollout_samples > 0
    ):
        steps = total_steps(
            cfg.trainer.reinforce,
            build_sampler(cfg, datasets.train).steps_per_epoch,
        )
        disk = disk_need(cfg, ModelSize.from_architecture(architecture, lora_settings(cfg)), steps)
        if disk.fault is not None:
            errors.append(ConfigError([disk.fault]))
    return Inputs(architecture, layers, tokenizer, datasets, disk, tuple(errors))


def layout_of(cfg: TrainConfig) -> Layout | None:
    """Return the configured layout; None if the ranks do not divide (see `load_config`)."""
    model = cfg.model
    world = cfg.training_ranks
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    if min(*sizes, world) < 1 or world % model.block_size:
        return None
    return Layout(*sizes, world // model.block_size, model.sequence_parallel)


def stage_layers(cfg: TrainConfig, architecture: Architecture, layout: Layout) -> list[int]:
    """Return the layers of each pipeline stage. Raises ConfigError: they do not divide."""
    dtype: torch.dtype = getattr(torch, DTYPES[cfg.trainer.precision])
    return layers_of_stages(architecture, layout, dtype, model_options(cfg.model))


def _prompts_can_be_read(cfg: TrainConfig) -> bool:
    try:
        resolve_data_prefix(cfg.model.data.data_prefix.model_dump())
    except ConfigError:
        return False
    return cfg.max_prompt_tokens >= 1 and cfg.model.data.too_long in ("refuse", "skip")
