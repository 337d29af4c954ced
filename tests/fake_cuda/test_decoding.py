"""Decode steps of the native engine at real sizes, and the order of pipeline stages.

Kernels, launches, host syncs and bytes of one step are the difference of eight more tokens, divided
by eight. Two depths give the cost of a layer, and thus of the whole model.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers.fake_cuda.machine import Machine
from helpers.fake_cuda.mode import Ledger
from helpers.fake_cuda.workloads import check_collectives
from helpers.policies import megatron_model
from helpers.public_configs import LLAMA_3_1_8B, LLAMA_3_1_70B
from helpers.weight_updates import PlannedUpdates

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.generation.responses import new_responses
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.model import CausalLM

PROMPTS = 8
SAMPLES = 8
PROMPT_TOKENS = 512
SHORT = 10
STEPS = 8
ROWS = PROMPTS * SAMPLES


class Step(NamedTuple):
    """The cost of a decode step."""

    kernels: float
    launches: float
    syncs: float
    bytes: float

    def plus(self, other: Step, times: float) -> Step:
        return Step(*(a + times * b for a, b in zip(self, other, strict=True)))


def cost_of_a_step(
    machine: Machine, folder: Path, shape: dict, layers: int, tp: int = 1, **options: bool
) -> Step:
    """Return a step's cost for 64 samples on the first of `tp` ranks, from eight more tokens.

    `options` are NativeGenerator's.
    """
    architecture = Architecture.from_hf({**shape, "num_hidden_layers": layers})
    prompts = [Prompt(i, "", tuple(range(3, 3 + PROMPT_TOKENS))) for i in range(PROMPTS)]
    ledgers: list[Ledger] = []
    with machine.rank(0, tp), parallel_mesh(tensor_model_parallel_size=tp) as mesh:
        engine = NativeGenerator(
            CausalLM(architecture, mesh, torch.bfloat16), load_tokenizer(folder), **options
        )
        for length in (SHORT, SHORT + STEPS):
            with machine.gpu.counting() as ledger:
                engine.generate(
                    prompts, SAMPLES, SamplingParams(max_length=length, stop_token_ids=(2,)), seed=0
                )
            ledgers.append(ledger)
    short, long = ledgers
    names = ("num_kernels", "launches", "num_syncs", "bytes")
    return Step(*((getattr(long, name) - getattr(short, name)) / STEPS for name in names))


def whole_model(
    machine: Machine, folder: Path, shape: dict, layers: int, tp: int = 1, **options: bool
) -> Step:
    single = cost_of_a_step(
        machine,
        folder,
        shape,
        1,
        tp,
        **options,
    )
    double = cost_of_a_step(
        machine,
        folder,
        shape,
        2,
        tp,
        **options,
    )
    return single.plus(double.plus(single, -1), layers - 1)


def test_8b_at_batch_64(machine, folders):
    """Without static steps it took 1,123 kernels, 2 syncs and 22.1 GB."""
    step = whole_model(machine, folders[2], LLAMA_3_1_8B, 32, use_graphs=False)
    # without a GPU, torch's rule for `roll` counts 32 of `cat`
    assert step.kernels == step.launches <= 714
    assert step.syncs == 1 / 8
    # query, key and value, output, and three of the MLP
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    weights = 2 * (32 * layer + 128256 * 4096)
    # responses have 14 tokens on average
    cache = 32 * 2 * 8 * 128 * 2 * (PROMPTS * PROMPT_TOKENS + ROWS * 14)
    assert 1.0 < step.bytes / (weights + cache) < 1.2


def test_a_graph_is_one_launch(machine, folders):
    """A sync raises during capture; tensor-parallel sums are captured."""
    eager = cost_of_a_step(
        machine,
        folders[2],
        LLAMA_3_1_70B,
        2,
        tp=8,
        use_graphs=False,
    )
    graphed = cost_of_a_step(machine, folders[2], LLAMA_3_1_70B, 2, tp=8)
    assert graphed.launches == 1
    assert eager.launches == eager.kernels == graphed.kernels > 100
    assert graphed.syncs == eager.syncs == 1 / 8


def test_new_weights_between_graphed_steps(machine, folders):
    """New weights are copied in place, where the graphs read them.

    Then the call stops, and a later one resumes.
    """
    prompts = [Prompt(i, "", tuple(range(4, 7 + i))) for i in range(3)]
    params = SamplingParams(max_length=30)
    with machine.rank(0, 1), parallel_mesh() as mesh:
        lm = megatron_model(folders[4], mesh, torch.bfloat16)
        newer = [parameter.detach() + 1 for parameter in lm.parameters()]

        @torch.no_grad()
        def load() -> None:
            for parameter, value in zip(lm.parameters(), newer, strict=True):
                parameter.copy_(value)

        engine = NativeGenerator(lm, load_tokenizer(folders[4]))
        updates = PlannedUpdates("continue", "load", "stop", load=load, version=5)
        stopped = engine.resume(new_responses(prompts, 2, 0), params, updates)
        ended = engine.resume(stopped, params, PlannedUpdates(version=7))
    assert updates.version == 6
    assert updates.running == [6, 6, 6]
    expected = [0, 0, 1, 1, 2, 2]
    assert [response.prompt.id for response in ended] == expected


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_meet_in_the_same_order(stages, machine, folders):
    """The stages take turns with groups of rows.

    Rows start and end within a bound on the cache.
    """
    ledgers = {}
    prompts = [Prompt(i, "", tuple(range(4, 7 + i))) for i in range(3)]
    for rank in range(stages):
        with machine.rank(rank, stages) as ledger, parallel_mesh(1, stages) as mesh:
            lm = megatron_model(folders[4], mesh, torch.bfloat16)
            engine = NativeGenerator(lm, load_tokenizer(folders[4]), max_tokens=40)
            completions = engine.generate(
                prompts, 2, SamplingParams(max_length=4, stop_token_ids=(2,)), seed=0
            )
            assert completions.tokens.shape == (6, 4)
        ledgers[rank] = ledger
    check_collectives(ledgers)
    kinds = Counter(call.kind for call in ledgers[0].collectives)
    assert kinds["send"] > 3 * stages
    assert kinds["broadcast"] > kinds["send"]
