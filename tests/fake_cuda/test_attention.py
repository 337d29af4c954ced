"""Attention kernels, their cost at the sizes of an 8B model, and the host's syncs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.fake_cuda.workloads import Work, batch_of, kernels_by_name
from helpers.public_configs import LLAMA_3_1_8B

from reinforce_rl.algorithm.loss import Denominators, LossSettings
from reinforce_rl.megatron.mesh import parallel_mesh

LAYERS = 2
MODEL = {**LLAMA_3_1_8B, "num_hidden_layers": LAYERS}
DENSE = "_scaled_dot_product_flash_attention"
RAGGED = "_flash_attention_forward"
EFFICIENT = "_scaled_dot_product_efficient_attention"
# The unfused kernel, and cuDNN's.
NEVER = {"_safe_softmax", "_softmax", "bmm", "_scaled_dot_product_cudnn_attention"}


@pytest.fixture(scope="module", autouse=True)
def nothing_to_free_later() -> Iterator[None]:
    """Models of this size are in cycles, and would be freed while a later test measures."""
    yield
    gc.collect()


@dataclass(frozen=True)
class Case(Work):
    """Work on a layout, in micro-batches of several sequences."""

    samples: int = 4
    prompt_tokens: int = 501
    micro_batch: int = 4
    tp: int = 1
    cp: int = 1
    sp: bool = False
    window: int | None = None


def passes(machine: Machine, case: Case, rank: int = 0) -> tuple[Ledger, Ledger]:
    """Return the ledgers of log-probs and of an update on one rank."""
    window = {"model_type": "mistral", "sliding_window": case.window} if case.window else {}
    sequences = case.sequences(1000)
    count = len(sequences)
    prompt_lengths = torch.full((count,), case.prompt_tokens)
    # The last response of a group is shorter, and the first response of all is empty.
    lengths = torch.full((count,), case.response_tokens)
    if count > 1:
        lengths[case.samples - 1 :: case.samples] -= 100
        lengths[0] = 0
    loss = LossSettings(
        importance_ratio="sequence", generator_correction="token", entropy_bonus=0.01
    )
    with (
        machine.rank(rank, case.tp * case.cp),
        parallel_mesh(case.tp, 1, case.cp, sequence_parallel=case.sp) as mesh,
    ):
        actor = case.actor({**MODEL, **window}, mesh, loss=loss, with_reference=False)
        groups = torch.arange(count) // case.samples
        with machine.gpu.counting() as forward:
            log_probs = actor.get_inference_log_probs(sequences, prompt_lengths, lengths, groups)
        batch = batch_of(sequences, prompt_lengths, lengths, case.samples, log_probs)
        denominators = Denominators(float(count), float(lengths.sum()), float(case.response_tokens))
        with machine.gpu.counting() as update:
            actor.get_loss_and_metrics(batch, denominators, kl_coefficient=0.1, on_policy=False)
    return forward, update


# The kernel and its calls per layer and pass; kernels of two passes for log-probs, and of two for
# an update.
CASES = {
    "padded": (Case(), DENSE, 1, (284, 937)),
    "window": (Case(window=64), RAGGED, 1, (308, 969)),
    "shared prefix": (Case(shared_prefix=True), RAGGED, 1, (292, 991)),
    "shared prefix, window": (Case(shared_prefix=True, window=64), RAGGED, 1, (292, 991)),
    "TP2 SP, shared prefix": (Case(tp=2, sp=True, shared_prefix=True), RAGGED, 1, (308, 1009)),
    "CP2": (Case(cp=2), DENSE, 2, (286, 925)),
    "CP2, window": (Case(cp=2, window=64), RAGGED, 2, (326, 973)),
    "fp32": (Case(dtype=torch.float32), EFFICIENT, 1, (280, 935)),
    "fp32, shared prefix": (
        Case(dtype=torch.float32, shared_prefix=True),
        EFFICIENT,
        2,
        (358, 1103),
    ),
}


@pytest.mark.parametrize(("case", "kernel", "calls", "budgets"), CASES.values(), ids=CASES.keys())
def test_kernels_and_syncs(
    machine: Machine, case: Case, kernel: str, calls: int, budgets: tuple[int, int]
) -> None:
    """Attention is of one kind, never the unfused one; one copy to the host comes at the end."""
    for ledger, budget in zip(passes(machine, case), budgets, strict=True):
        kernels = kernels_by_name(ledger)
        assert kernels[kernel] == 2 * calls * LAYERS
        assert not ({DENSE, RAGGED, EFFICIENT, *NEVER} - {kernel}) & kernels.keys()
        # megatron's embedding sets masked elements to a number, for which CUDA has a kernel without
        # a sync.
        waits = {
            where: n
            for where, n in ledger.syncs.items()
            if case.tp == 1 or "boolean index" not in where
        }
        assert sum(waits.values()) == 1, waits
        assert ledger.num_kernels <= budget


def test_a_shared_prefix_is_less_work(machine: Machine) -> None:
    """Prompts are read once, with hardly more kernels than for padded rows."""
    pairs = zip(passes(machine, Case()), passes(machine, Case(shared_prefix=True)), strict=True)
    for padded, packed in pairs:
        assert packed.flops < 0.75 * padded.flops
        assert packed.peak - packed.start < padded.peak - padded.start
        assert packed.num_kernels < 1.1 * padded.num_kernels


def test_32k_tokens_on_two_context_parallel_ranks(machine: Machine) -> None:
    """Ranks gather all keys and values and scatter their gradients.

    There are no score matrices and no masks.
    """
    case = Case(
        cp=2, micro_batch=1, prompts=1, samples=1, prompt_tokens=16384, response_tokens=16385
    )
    for rank in (0, 1):
        forward, update = passes(machine, case, rank)
        keys = 2 * 32768 * 8 * 128 * 2  # bytes of a layer's keys and values in bf16
        for ledger in (forward, update):
            gathered = [call.bytes for call in ledger.collectives if call.kind == "all_gather"]
            assert gathered == [keys] * LAYERS
        scattered = [call.bytes for call in update.collectives if call.kind == "reduce_scatter"]
        assert scattered == [keys] * LAYERS
        # With masks and the unfused kernel: 37 and 82 GB.
        assert forward.peak - forward.start < 2.2e9
        assert update.peak - update.start < 10e9
