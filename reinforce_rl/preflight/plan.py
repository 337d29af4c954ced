"""Read and check a run's inputs, and plan how its batches divide, its steps, memory and disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from rich import filesize

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.config.rules import shape_faults
from reinforce_rl.data.data_prefix import resolve_data_prefix
from reinforce_rl.data.prompts import PromptDataset, RLHFDatasets, fixed_prompts
from reinforce_rl.data.sampler import shard
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, Fault, ReinforceError, key_of
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.model.model import layers_of_stages
from reinforce_rl.monitoring.backends import check_logger_classes
from reinforce_rl.policy import build
from reinforce_rl.policy.micro_batches import micro_batches
from reinforce_rl.preflight import memory
from reinforce_rl.rollout import prompts as rollout_prompts
from reinforce_rl.trainer.updates import total_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
gigabytes = partial(filesize.decimal, precision=2)  # of bytes, or in a smaller or larger unit
# Bytes of a response token in a record: of its texts, and of the other columns
# (benchmarks/records.py: 18 in all).
RECORD_BYTES = (2, 16)
RECORD_FILE_BYTES = 20_000  # of a file, besides its tokens


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
        and cfg.trainer.precision in build.DTYPES
    ):
        layers = attempt(lambda: stage_layers(cfg, architecture, layout))
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = attempt(lambda: load_tokenizer(folder))
    if architecture is not None and tokenizer is not None:
        attempt(lambda: build.check_vocabulary(tokenizer, architecture, folder))
        attempt(lambda: build.stop_token_ids(folder, tokenizer))
    if tokenizer is not None and _prompts_can_be_read(cfg):
        datasets = attempt(lambda: rollout_prompts.build_datasets(cfg, tokenizer))
    if (
        architecture is not None
        and datasets is not None
        and cfg.model.reinforce.num_rollout_samples > 0
    ):
        steps = total_steps(
            cfg.trainer.reinforce,
            rollout_prompts.build_sampler(cfg, datasets.train).steps_per_epoch,
        )
        disk = disk_need(
            cfg, memory.ModelSize.from_architecture(architecture, build.lora_settings(cfg)), steps
        )
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
    dtype: torch.dtype = getattr(torch, build.DTYPES[cfg.trainer.precision])
    return layers_of_stages(architecture, layout, dtype, build.model_options(cfg.model))


def _prompts_can_be_read(cfg: TrainConfig) -> bool:
    try:
        resolve_data_prefix(cfg.model.data.data_prefix.model_dump())
    except ConfigError:
        return False
    return cfg.model.max_prompt_tokens >= 1 and cfg.model.data.too_long in ("refuse", "skip")


@dataclass(frozen=True)
class Share:
    """Smallest and largest share of a count split over the data-parallel ranks."""

    least: int
    most: int

    @classmethod
    def split(cls, count: int, ranks: int) -> Share:
        sizes = [len(shard(range(count), rank, ranks)) for rank in range(ranks)]
        return cls(min(sizes), max(sizes))


@dataclass(frozen=True)
class BatchPlan:
    """Division of a step's batch.

    Micro-batches and calls are counted on the rank with most, at full length.
    """

    prompts: int  # per step, over all ranks
    samples: int  # per prompt
    prompts_of_rank: Share  # per step
    generation_calls: int  # per step
    forward_micro_batches: int  # per step
    # per optimizer step: over all ranks, and the most of a single rank
    prompts_of_update: Share
    updates: int  # optimizer steps on a full rollout batch
    micro_batches: int  # per optimizer step
    # tokens of the longest training prompt; the allowed maximum if they cannot be read
    longest_prompt: int
    longest: int  # tokens of the longest sequence, prompt and response
    validation: int | None  # prompts over all ranks, None for no validation
    validation_calls: int  # per validation
    # prompts of each step of an epoch; None if the data set cannot be read
    epoch: Sequence[int] | None


def plan_batches(cfg: TrainConfig, layout: Layout, datasets: RLHFDatasets | None) -> BatchPlan:
    """Plan the batches of a valid configuration; `datasets` is None if it cannot be read."""
    rl = cfg.trainer.reinforce
    rollout = cfg.model.reinforce
    samples = rl.num_rollouts_per_prompt
    response = rollout.length_params.max_length
    share = Share.split(rollout.num_rollout_samples, layout.data)
    of_update = cfg.prompts_per_update or rollout.num_rollout_samples
    # Prompts of an optimizer step are drawn from the whole batch: one rank may hold all of them.
    most = share.most if cfg.prompts_per_update is None else min(share.most, of_update)
    train = None if datasets is None else datasets.train
    longest_prompt = cfg.model.max_prompt_tokens if train is None else _longest_of(train)
    longest = longest_prompt + response
    validation = None
    if datasets is not None and datasets.validation is not None and rl.val_check_interval:
        validation = len(fixed_prompts(datasets.validation, rollout.num_val_samples)[0])
    return BatchPlan(
        prompts=rollout.num_rollout_samples,
        samples=samples,
        prompts_of_rank=share,
        generation_calls=-(-share.most // rollout.rollout_micro_batch_size),
        forward_micro_batches=len(
            _make_micro_batches(
                cfg, share.most * samples, longest, rollout.forward_micro_batch_size
            )
        ),
        prompts_of_update=Share(of_update, most),
        updates=rl.reinforce_epochs * -(-rollout.num_rollout_samples // of_update),
        micro_batches=len(
            _make_micro_batches(cfg, most * samples, longest, cfg.model.micro_batch_size)
        ),
        longest_prompt=longest_prompt,
        longest=longest,
        validation=validation,
        validation_calls=-(
            -Share.split(validation or 0, layout.data).most // rollout.val_rollout_micro_batch_size
        ),
        epoch=None if train is None else rollout_prompts.build_sampler(cfg, train).batch_sizes,
    )


def _longest_of(prompts: PromptDataset) -> int:
    return max(len(prompts[i].tokens) for i in range(len(prompts)))


def _make_micro_batches(
    cfg: TrainConfig, sequences: int, longest: int, size: int
) -> list[torch.Tensor]:
    return micro_batches(torch.full((sequences,), longest), size, cfg.model.tokens_per_micro_batch)


def plan_memory(
    cfg: TrainConfig, inputs: Inputs, batches: BatchPlan, *, gpu: bool
) -> list[memory.RankMemory]:
    """Compute the memory of a rank of each stage at full length.

    Empty if model or layout cannot be read.
    """
    layout = layout_of(cfg)
    data = inputs.datasets
    if inputs.architecture is None or inputs.layers is None or layout is None:
        return []
    rollout = cfg.model.reinforce
    response = cfg.model.reinforce.length_params.max_length
    used = _policy(cfg, layout, gpu=gpu)
    multiple = layout.sequence_multiple
    positions = -(-(batches.longest - 1) // multiple) * multiple // layout.context

    def micro_batch(sequences: int, size: int, in_flight: int) -> memory.Pass:
        rows = len(_make_micro_batches(cfg, sequences, batches.longest, size)[0])
        # A context-parallel rank may hold the ends of the sequences, with all of the responses.
        return memory.Pass(rows, positions, rows * min(response, positions), in_flight)

    def call(prompts: int, size: int, samples: int, prompt_tokens: int) -> memory.Decoding:
        most = -(-min(prompts, size) // layout.context)
        return memory.Decoding(
            most, samples, prompt_tokens, response, rollout.generation_cache_tokens
        )

    of_rank = batches.prompts_of_rank.most
    samples = batches.samples
    generations = {
        "generation": call(
            of_rank, rollout.rollout_micro_batch_size, samples, batches.longest_prompt
        )
    }
    if batches.validation is not None and data is not None and data.validation is not None:
        most = Share.split(batches.validation, layout.data).most
        longest = _longest_of(data.validation)
        generations["validation"] = call(most, rollout.val_rollout_micro_batch_size, 1, longest)
    forward = micro_batch(of_rank * samples, rollout.forward_micro_batch_size, 1)
    ranks = []
    for stage, shape in enumerate(
        memory.stage_shapes(inputs.architecture, layout.tensor, inputs.layers, used.lora)
    ):
        # 1F1B: the first stage has most micro-batches in flight.
        in_flight = min(layout.pipeline - stage, batches.micro_batches)
        train = micro_batch(
            batches.prompts_of_update.most * samples, cfg.model.micro_batch_size, in_flight
        )
        ranks.append(memory.rank_memory(stage, shape, used, train, forward, generations))
    return ranks


def _policy(cfg: TrainConfig, layout: Layout, *, gpu: bool) -> memory.Policy:
    model = cfg.model
    lora = build.lora_settings(cfg)
    number = cfg.model.activations_checkpoint_num_layers or 1
    full = model.activations_checkpoint_granularity == "full"
    uniform = model.activations_checkpoint_method == "uniform"
    has_copy = cfg.uses_reference and lora is None
    return memory.Policy(
        weight_bytes=memory.WEIGHT_BYTES[cfg.trainer.precision],
        layout=layout,
        optimizer_shards=layout.data * layout.context if model.optim.distributed else 1,
        reference=model.reference_placement if has_copy else "none",
        lora=lora,
        recompute=0 if not full else 10**9 if uniform else number,
        recompute_group=number if full and uniform else 1,
        chunk_tokens=model.chunk_tokens(gpu=gpu),
        offload_optimizer=model.reinforce.offload_adam_states,
        fused_adam=model.optim.fused,
        gpu=gpu,
        engine_copies=_engine_copies(cfg, has_lora=lora is not None),
    )


def _engine_copies(cfg: TrainConfig, *, has_lora: bool) -> bool:
    """Return whether the engine moves its weights to host memory while it sleeps."""
    if cfg.placement != "colocated":
        return False
    if cfg.generation == "tensorrt_llm":
        # Version 1.2 does; 1.3 drops them. The version is known only at the start.
        return True
    # The frozen weights are sent once, so the engine keeps them.
    return cfg.generation == "vllm" and has_lora and cfg.vllm.load_adapters


@dataclass(frozen=True)
class DiskNeed:
    folder: Path  # of the run
    # Bytes of a checkpoint: weights, separate fp32 main weights, Adam's moments; with LoRA of its
    # parameters only.
    checkpoint: int
    checkpoints: int  # at a time, including the one being written
    export: int  # bytes of the Hugging Face folder at the end
    records: int  # bytes of the samples of the remaining steps, every response at full length
    held: int  # bytes of checkpoints in the folder, to be replaced by new ones
    free: int  # bytes on the disk

    @property
    def needed(self) -> int:
        """Bytes besides the bytes already held."""
        return max(self.checkpoint * self.checkpoints - self.held, 0) + self.export + self.records

    @property
    def fault(self) -> str | None:
        """The reason not to start the run, if any.

        `records` alone is no reason: few runs come near this bound.
        """
        if self.needed - self.records <= self.free:
            return None
        parts = f"at most {self.checkpoints} x {gigabytes(self.checkpoint)} for checkpoints"
        parts += f", less {gigabytes(self.held)} there already" if self.held else ""
        parts += f", {gigabytes(self.export)} for the Hugging Face folder" if self.export else ""
        parts += f", and {gigabytes(self.records)} for the samples' records"
        return Fault(
            f"exp_manager.explicit_log_dir is {self.folder}, where {gigabytes(self.free)} are "
            f"free; the run needs {gigabytes(self.needed)}: {parts}. Free some space, choose "
            "another disk, or lower exp_manager.checkpoint_callback_params.keep_last or "
            "keep_best; exp_manager.record_tokens_every=0 makes the records smaller",
            key="preflight.disk.too_little_space",
        )

    @property
    def warning(self) -> str | None:
        if self.fault is not None or self.needed <= self.free:
            return None
        return (
            f"{self.folder} has {gigabytes(self.free)} free, and the samples' records take "
            f"{gigabytes(self.records)} if every response is of full length; "
            "exp_manager.record_tokens_every=0 shrinks them"
        )


def disk_need(cfg: TrainConfig, size: memory.ModelSize, steps: int) -> DiskNeed:
    weight = memory.WEIGHT_BYTES[cfg.trainer.precision]
    rl = cfg.trainer.reinforce
    saving = cfg.exp_manager.checkpoint_callback_params
    folder = Path(cfg.exp_manager.explicit_log_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    intervals = [rl.save_interval, rl.val_check_interval if saving.keep_best else 0]
    saves = 1 + sum(max(steps - 1, 0) // interval for interval in intervals if interval > 0)
    held = _size_of((folder / "checkpoints").glob("step_*/**/*"))
    checkpoint = size.trained * (
        weight + (0 if weight == memory.FP32 else memory.FP32) + memory.ADAM_MOMENTS
    )
    checkpoints = min(saving.keep_last + saving.keep_best + 1, saves)
    export = size.parameters * weight if saving.save_hf_on_train_end else 0
    every = cfg.exp_manager.record_tokens_every
    rollout = cfg.model.reinforce
    responses = (
        rollout.num_rollout_samples * rl.num_rollouts_per_prompt * rollout.length_params.max_length
    )
    with_tokens = steps // every if every else 0
    of_texts, of_tokens = (responses * size for size in RECORD_BYTES)
    records = (
        steps * (RECORD_FILE_BYTES + of_texts)
        + with_tokens * of_tokens
        - _size_of(folder.glob("rollouts/*"))
    )
    free = shutil.disk_usage(existing).free
    return DiskNeed(folder, checkpoint, checkpoints, export, max(records, 0), held, free)


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
