"""Workloads and checks of the fake-CUDA tier."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.batches import actor_of, rows_of, sequences, whole_batch
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.layouts import SETTINGS, Layout
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from reinforce_rl.algorithm.loss import Denominators
from reinforce_rl.config.model import ModelConfig, OptimConfig, RolloutConfig
from reinforce_rl.data.batches import Prompt, ReinforceBatch, RolloutBatch
from reinforce_rl.data.finish_reasons import FINISH_LENGTH
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.model import DEFAULT_OPTIONS, CausalLM, ModelOptions
from reinforce_rl.megatron.optimizer import (
    DEFAULT_OPTIM,
    ActorOptimizer,
    build_optimizer,
)
from reinforce_rl.policy.model import MegatronGPTReinforceActorModel

PROMPTS = [Prompt(number, "", tuple(range(3, 6 + number))) for number in range(4)]


def small_step(layout: Layout, folder: Path, mesh: Mesh) -> None:
    """Run generation, both policies' log-probs, two updates and an offload.

    Each data-parallel rank has two samples.
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
    for _ in range(2):  # the optimizer's states exist after the first step
        actor.get_loss_and_metrics(batch, sequences(2 * mesh.dp_size))
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
                wires.setdefault(wire, {"send": [], "recv": []})[call.kind].append(call.bytes)
            else:
                of_group = calls.setdefault(
                    call.ranks,
                    {rank: [] for rank in call.ranks if rank in ledgers},
                )
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
    return sum(len(made) for of_rank in calls.values() for made in of_rank.values())


@dataclass(frozen=True)
class Work:
    """A full-length step of one data-parallel rank."""

    prompts: int = 2
    samples: int = 2
    prompt_tokens: int = 512
    response_tokens: int = 512
    micro_batch: int = 1
    new_tokens: int = 4

    def batch(self, vocab_size: int) -> ReinforceBatch:
        count = self.prompts * self.samples
        length = self.prompt_tokens + self.response_tokens
        groups = torch.arange(self.prompts).repeat_interleave(self.samples)
        sequences = torch.randint(3, vocab_size, (count, length))
        sequences[:, : self.prompt_tokens] = sequences[groups * self.samples, : self.prompt_tokens]
        zero = torch.zeros(count)
        rollouts = RolloutBatch(
            sequences=sequences,
            prompt_lengths=torch.full((count,), self.prompt_tokens),
            response_lengths=torch.full((count,), self.response_tokens),
            group_ids=groups,
            sample_ids=torch.arange(self.samples).repeat(self.prompts),
            finish_reasons=(FINISH_LENGTH,) * count,
            rewards=zero,
            valid=zero == 0,
        )
        return ReinforceBatch(
            rollouts,
            zero,
            zero,
            zero,
            torch.ones(count, self.response_tokens),
            rollouts.valid,
        )


def real_step(
    machine: Machine,
    config: dict[str, Any],
    mesh: Mesh,
    work: Work,
    *,
    dtype: torch.dtype = torch.bfloat16,
    model: ModelOptions = DEFAULT_OPTIONS,
    optim: OptimConfig = DEFAULT_OPTIM,
) -> dict[str, Ledger]:
    """Run a step at a model's real width, with uninitialised weights; return counts by phase.

    `config` is a Hugging Face config.json.
    """
    counting = machine.gpu.counting
    ledgers: dict[str, Ledger] = {}
    architecture = Architecture.from_hf({**config, "eos_token_id": 2})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0}, "<pad>")),
        pad_token="<pad>",
    )
    sampling = SamplingParams(
        max_length=work.new_tokens,
        min_length=work.new_tokens,
        stop_token_ids=(2,),
    )
    with counting() as ledgers["model"]:
        lm = CausalLM(architecture, mesh, dtype, model)
    generator = NativeGenerator(lm, tokenizer)
    prompts = [Prompt(i, "", (3,) * work.prompt_tokens) for i in range(work.prompts)]
    with counting() as ledgers["generate"]:
        generator.generate(prompts, work.samples, sampling, seed=0)
    with counting() as ledgers["actor"]:
        made = ModelConfig(
            micro_batch_size=work.micro_batch,
            seed=0,
            logits_chunk_tokens=1024,
            shared_prefix=False,
            reinforce=RolloutConfig(forward_micro_batch_size=work.micro_batch),
            optim=optim,
        )
        actor = MegatronGPTReinforceActorModel(lm, tokenizer, generator, made, sampling)
        optimizer = ActorOptimizer(*build_optimizer(actor.ddp, **SETTINGS), actor.ddp)
    batch = work.batch(architecture.vocab_size)
    rollouts = batch.rollouts
    count = len(batch.trains) * mesh.dp_size
    denominators = Denominators(
        float(count),
        float(count * work.response_tokens),
        float(work.response_tokens),
    )
    with counting() as ledgers["reference"]:
        actor.get_init_policy_logprobs(
            rollouts.sequences,
            rollouts.prompt_lengths,
            rollouts.response_lengths,
            rollouts.group_ids,
        )
    for _ in range(2):  # the optimizer's moments exist after the first step
        with counting() as ledgers["update"]:
            actor.get_loss_and_metrics(batch, denominators)
        with counting() as ledgers["optimizer"]:
            optimizer.step()
    with counting() as ledgers["offloaded"], optimizer.offloaded():
        # Memory that remains allocated during generation.
        ledgers["offloaded"].start = machine.gpu.memory.bytes
    return ledgers
