"""Plan how the batches of a run divide, and the memory of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.data.prompts import PromptDataset, RLHFDatasets, fixed_prompts
from reinforce_rl.data.sampler import shard
from reinforce_rl.megatron.size import WEIGHT_BYTES
from reinforce_rl.policy.build import lora_settings
from reinforce_rl.policy.micro_batches import micro_batches
from reinforce_rl.preflight import memory
from reinforce_rl.rollout.prompts import build_sampler
from reinforce_rl.trainer.inputs import Inputs, layout_of


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
    response = cfg.max_response_tokens
    share = Share.split(rollout.num_rollout_samples, layout.data)
    of_update = cfg.prompts_per_update or rollout.num_rollout_samples
    # Prompts of an optimizer step are drawn from the whole batch: one rank may hold all of them.
    most = share.most if cfg.prompts_per_update is None else min(share.most, of_update)
    train = None if datasets is None else datasets.train
    longest_prompt = cfg.max_prompt_tokens if train is None else _longest_of(train)
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
        epoch=None if train is None else build_sampler(cfg, train).batch_sizes,
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
    response = cfg.max_response_tokens
    used = _policy(cfg, layout, gpu=gpu)
    multiple = layout.sequence_multiple
    positions = -(-(batches.longest - 1) // multiple) * multiple // layout.context

    def micro_batch(sequences: int, size: int, in_flight: int) -> memory.Pass:
        rows = len(_make_micro_batches(cfg, sequences, batches.longest, size)[0])
        # A context-parallel rank may hold the ends of the sequences, with all of the responses.
        return memory.Pass(rows, positions, rows * min(response, positions), in_flight)

    def call(prompts: int, size: int, samples: int, prompt_tokens: int) -> memory.Decoding:
        most = -(-min(prompts, size) // layout.context)
        cache_tokens = rollout.generation_cache_tokens
        if cfg.has_environment:
            # Samples differ after the first turn, so each has a history of its own.
            answer = rollout.length_params.max_length
            history = prompt_tokens + response - answer
            return memory.Decoding(most * samples, 1, history, answer, cache_tokens)
        return memory.Decoding(most, samples, prompt_tokens, response, cache_tokens)

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
    lora = lora_settings(cfg)
    number = cfg.model.activations_checkpoint_num_layers or 1
    full = model.activations_checkpoint_granularity == "full"
    uniform = model.activations_checkpoint_method == "uniform"
    has_copy = cfg.uses_reference and lora is None
    return memory.Policy(
        weight_bytes=WEIGHT_BYTES[cfg.trainer.precision],
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
