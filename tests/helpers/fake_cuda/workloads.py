"""Workloads and checks of the fake-CUDA tier."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers.batches import actor_of, rows_of, sequences, whole_batch
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.layouts import SETTINGS, Layout
from torch import Tensor

from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.config.model import ModelConfig, RolloutConfig
from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import CausalLM
from reinforce_rl.megatron.optimizer import (
    DEFAULT_OPTIM,
    ActorOptimizer,
    build_optimizer,
)
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

NEW_TOKENS = 4
PROMPTS = [Prompt(number, "", tuple(range(3, 6 + number))) for number in range(4)]


def small_step(layout: Layout, folder: Path, mesh: Mesh) -> None:
    """Run generation, both policies' log-probs, two updates and an offload.

    Each data-parallel rank has two samples. In the second update an environment wrote some of their
    tokens, and in the third a chat template has rewritten the first one's history.
    """
    options: dict[str, Any] = {"model": layout.model, "optim": layout.optim, "dtype": layout.dtype}
    # Use several micro-batches only if they matter: in a pipeline, and if the last one reduces the
    # gradients.
    size = 1 if layout.pp > 1 or layout.optim.overlap_grad_sync else 2
    actor = actor_of(
        folder,
        mesh,
        with_reference=True,
        updates=layout.updates,
        micro_batch_size=size,
        **options,
    )
    batch = rows_of(whole_batch(), [0, 3])
    rollouts = batch.rollouts
    where = (
        rollouts.sequences,
        rollouts.prompt_lengths,
        rollouts.response_lengths,
        rollouts.group_ids,
    )
    generator = NativeGenerator(actor.lm, actor.tokenizer)
    done = generator.generate(PROMPTS, 2, SamplingParams(max_length=2), seed=3)
    assert done.tokens.shape == (8, 2)
    assert not done.tokens.is_cuda
    width = int(rollouts.response_lengths.max())
    assert actor.get_inference_log_probs(*where).shape == (2, width)
    assert actor.get_init_policy_logprobs(*where).shape == (2, width)
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS), actor.ddp)
    policy_mask = torch.arange(width).expand(2, width) % 2 == 0
    episodes = replace(batch, rollouts=replace(rollouts, policy_mask=policy_mask))
    where_written = episodes.rollouts.sequence_inputs
    assert actor.get_inference_log_probs(*where_written).shape == (2, width)
    history_mask = torch.zeros((2, width), dtype=torch.bool)
    history_mask[0, 1] = True
    contexts = replace(episodes, rollouts=replace(episodes.rollouts, history_mask=history_mask))
    of_contexts = contexts.rollouts.sequence_inputs
    assert actor.get_inference_log_probs(*of_contexts).shape == (2, width)
    for data in (batch, episodes, contexts):  # the optimizer's states exist after the first step
        actor.get_loss_and_metrics(data, sequences(2 * mesh.dp_size))
        assert not optimizer.step().skipped
    with optimizer.offloaded():
        pass


def take_turns(
    machine: Machine,
    world_size: int,
    turn: Callable[[int], None],
    *,
    rehearsals: int = 0,
) -> dict[int, Ledger]:
    """Run `turn` as every rank in order, and return their ledgers.

    Errors of earlier rounds, `rehearsals`, are ignored. Each chain of objects that a later rank
    sends needs a rehearsal.
    """
    machine.network.objects.clear()
    for _ in range(rehearsals):
        for rank in range(world_size):
            with contextlib.suppress(Exception), machine.rank(rank, world_size):
                turn(rank)
    ledgers = {}
    for rank in range(world_size):
        with machine.rank(rank, world_size) as ledgers[rank]:
            turn(rank)
    return ledgers


def run_layout(machine: Machine, layout: Layout, folder: Path) -> dict[int, Ledger]:
    def turn(rank: int) -> None:
        with layout.mesh() as mesh:
            small_step(layout, folder, mesh)

    return take_turns(machine, layout.ranks, turn)


def kernels_by_name(ledger: Ledger) -> Counter[str]:
    counts: Counter[str] = Counter()
    for kernel, count in ledger.kernels.items():
        counts[kernel.name] += count
    return counts


def check_collectives(ledgers: Mapping[int, Ledger]) -> int:
    """Check that ranks of a group call the same collectives in order and sends match receives.

    Returns the number of collectives.
    """
    calls: dict[tuple[int, ...], dict[int, list[Any]]] = {}
    wires: dict[tuple[int, ...], dict[str, list[int]]] = {}
    for rank, ledger in ledgers.items():
        for call in ledger.collectives:
            if call.kind in ("send", "recv"):
                wire = call.ranks if call.kind == "send" else call.ranks[::-1]
                ends = wires.setdefault(wire, {"send": [], "recv": []})
                ends[call.kind].append(call.bytes)
            else:
                measured = [rank for rank in call.ranks if rank in ledgers]
                of_group = calls.setdefault(call.ranks, {rank: [] for rank in measured})
                of_group[rank].append((call.kind, call.bytes, call.on_gpu))
    for group, of_rank in calls.items():
        for (first, expected), (other, actual) in itertools.pairwise(of_rank.items()):
            for number, (here, there) in enumerate(itertools.zip_longest(expected, actual)):
                calls_differ = f"rank {first} makes {here}, rank {other} {there}"
                assert here == there, f"group {group}, call {number}: {calls_differ}"
    for (source, target), ends in wires.items():
        if {source, target} <= ledgers.keys():
            differs = f"what rank {source} sends is not what rank {target} receives"
            assert ends["send"] == ends["recv"], differs
    count = 0
    for of_rank in calls.values():
        count += sum(map(len, of_rank.values()))
    return count


@dataclass(frozen=True)
class Work:
    """A full-length step of one data-parallel rank: `samples` of each of `prompts`."""

    prompts: int = 2
    samples: int = 2
    prompt_tokens: int = 512
    response_tokens: int = 512
    micro_batch: int = 1
    shared_prefix: bool = False
    dtype: torch.dtype = torch.bfloat16

    def sequences(self, vocab_size: int) -> Tensor:
        count = self.prompts * self.samples
        sequences = torch.randint(3, vocab_size, (count, self.prompt_tokens + self.response_tokens))
        first_of_group = torch.arange(count) // self.samples * self.samples
        prompts = sequences[:, : self.prompt_tokens]
        prompts.copy_(prompts[first_of_group])
        return sequences

    def actor(
        self, config: dict[str, Any], mesh: Mesh, **options: Any
    ) -> MegatronGPTReinforceActorModel:
        """Return the actor of a Hugging Face config.json, with uninitialised weights.

        `options` are those of the actor, and `optim`.
        """
        lm = CausalLM(Architecture.from_hf({**config, "eos_token_id": 2}), mesh, self.dtype)
        tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=2)
        settings = ModelConfig(
            micro_batch_size=self.micro_batch,
            seed=0,
            shared_prefix=self.shared_prefix,
            reinforce=RolloutConfig(forward_micro_batch_size=self.micro_batch),
            optim=options.pop("optim", DEFAULT_OPTIM),
        )
        sampling = SamplingParams(max_length=self.response_tokens, stop_token_ids=(2,))
        generator = NativeGenerator(lm, tokenizer)
        return MegatronGPTReinforceActorModel(
            lm, tokenizer, generator, settings, sampling, **options
        )


def batch_of(
    sequences: Tensor,
    prompt_lengths: Tensor,
    response_lengths: Tensor,
    samples: int,
    log_probs: Tensor | None = None,
) -> ReinforceBatch:
    """Return a batch in groups of `samples`, with one value for each kind of log-probs."""
    count = len(sequences)
    rows = torch.arange(count)
    zero = torch.zeros(count)
    rollouts = RolloutBatch(
        sequences=sequences,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        group_ids=rows // samples,
        sample_ids=rows % samples,
        finish_reasons=(FINISH_LENGTH,) * count,
        rewards=zero,
        valid=zero == 0,
        init_log_probs=log_probs,
        log_probs=log_probs,
        generator_log_probs=log_probs,
    )
    advantages = torch.ones(count, rollouts.width)
    return ReinforceBatch(rollouts, zero, zero, zero, advantages, rollouts.valid)


def real_step(
    machine: Machine, config: dict[str, Any], mesh: Mesh, work: Work, **options: Any
) -> dict[str, Ledger]:
    """Run a step at a model's real width; return counts by phase.

    `options` are those of `Work.actor`.
    """
    counting = machine.gpu.counting
    ledgers: dict[str, Ledger] = {}
    with counting() as ledgers["actor"]:
        actor = work.actor(config, mesh, **options)
        optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS), actor.ddp)
    sampling = SamplingParams(max_length=NEW_TOKENS, min_length=NEW_TOKENS, stop_token_ids=(2,))
    prompts = [Prompt(i, "", (3,) * work.prompt_tokens) for i in range(work.prompts)]
    with counting() as ledgers["generate"]:
        actor.generator.generate(prompts, work.samples, sampling, seed=0)
    sequences = work.sequences(actor.lm.architecture.vocab_size)
    prompt_lengths = torch.full((len(sequences),), work.prompt_tokens)
    response_lengths = torch.full((len(sequences),), work.response_tokens)
    batch = batch_of(sequences, prompt_lengths, response_lengths, work.samples)
    group_ids = batch.rollouts.group_ids
    with counting() as ledgers["reference"]:
        actor.get_init_policy_logprobs(sequences, prompt_lengths, response_lengths, group_ids)
    count = float(len(sequences) * mesh.dp_size)
    tokens = float(work.response_tokens)
    for _ in range(2):  # the optimizer's moments exist after the first step
        with counting() as ledgers["update"]:
            actor.get_loss_and_metrics(batch, Denominators(count, count * tokens, tokens))
        with counting() as ledgers["optimizer"]:
            optimizer.step()
    with counting() as ledgers["offloaded"], optimizer.offloaded():
        # Memory that remains allocated during generation.
        ledgers["offloaded"].start = machine.gpu.memory.bytes
    return ledgers
