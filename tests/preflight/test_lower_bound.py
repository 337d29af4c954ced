"""How the costs of ranks become the lower bound of a step, against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.public_configs import LLAMA_3_1_8B

from reinforce_rl.config.actor import TrainConfig
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.deep import with_keys
from reinforce_rl.preflight.hardware import MACHINES
from reinforce_rl.preflight.lower_bound import Job, Lengths, PhaseBound, Role, lower_bound
from reinforce_rl.preflight.plan import BatchPlan, Share
from reinforce_rl.preflight.rank import Cost, Traffic

PEAK = 989.4e12
BANDWIDTH = 3.35e12
CACHE = 50e6
PARAMETERS = 8_030_261_248
TABLE = 128256 * 4096
KEYS_AND_VALUES = 2 * 2 * 32 * 1024  # bytes of a token in bf16
PASSES = ("log-probs", "reference log-probs", "training")
ONE_RANK = Layout(1, 1, 1, 1, False)


def job_of(layout: Layout = ONE_RANK, **keys: Any) -> Job:
    """8 prompts of 500 tokens on average with 4 responses of 101 each, of Llama 3.1 8B on H100s."""
    changes = {
        "trainer.precision": "bf16",
        "trainer.reinforce.reinforce_epochs": 1,
        "model.micro_batch_size": 2,
        "model.reinforce.forward_micro_batch_size": 4,
        "model.reinforce.offload_adam_states": False,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    stages = layout.pipeline
    batches = BatchPlan(
        prompts=8,
        samples=4,
        prompts_of_rank=Share(8, 8),
        generation_calls=1,
        forward_micro_batches=8,
        prompts_of_update=Share(8, 8),
        updates=1,
        micro_batches=16,
        longest_prompt=512,
        longest=768,
        validation=None,
        validation_calls=0,
        epoch=None,
    )
    return Job(
        cfg=with_keys(TrainConfig(), changes),
        architecture=Architecture.from_hf(LLAMA_3_1_8B),
        layout=layout,
        layers=(32 // stages,) * stages,
        batches=batches,
        machine=MACHINES["h100"],
        full=Lengths(512, 256),
        mean=Lengths(500, 101),
    )


def role_of(stage: int = 0, **costs: Cost) -> Role:
    """A rank whose costs are the given ones; `_` stands for a blank."""
    named = {name.replace("_", " "): cost for name, cost in costs.items()}
    every = {"prefill": Cost(), "decode": Cost({"passes": 1 / 32}), "optimizer": Cost()}
    for name in PASSES:
        every |= {f"{name} once": Cost(), f"{name} each": Cost()}
    peaks = {"resident": 16e9, "away": 0.0, "generation": 20e9, "training": 70e9}
    return Role(stage, every | named, peaks)


def phase_of(name: str, job: Job, *roles: Role) -> PhaseBound:
    (phase,) = (phase for phase in lower_bound(job, roles).phases if phase.name == name)
    return phase


def test_generation_reads_weights_and_keys_in_every_step():
    decode = Cost({"flops": 16e9, "passes": 1 / 32})
    role = role_of(prefill=Cost({"flops": 8e12}), decode=decode)
    phase = phase_of("generation", job_of(generation="native"), role)
    # 100 tokens of each response are decoded, 32 together.
    cached = 8 * 100 * 500 + 32 * 100**2 / 2
    moved = 100 * 2 * (PARAMETERS - TABLE) + KEYS_AND_VALUES * cached
    expected = (moved - 100 * CACHE) / BANDWIDTH
    assert phase.parts["memory bandwidth"] == pytest.approx(expected)
    expected = (8 * 8e12 + 3200 * 16e9) / PEAK
    assert phase.parts["matrix products"] == pytest.approx(expected)
    assert phase.bound == "memory bandwidth"
    assert phase.seconds == phase.parts["memory bandwidth"]


def test_passes_cost_what_a_micro_batch_does_and_read_the_weights():
    traffic = Traffic("data", "reduce_scatter", 8, 1)
    costs = {
        "training_each": Cost({"flops": 2e12}),
        "training_once": Cost({"flops": 3e12}, {traffic: 1.0}, {traffic: 9e9}),
    }
    phase = phase_of("training", job_of(generation="native"), role_of(**costs))
    expected = (3e12 + 16 * 2e12) / PEAK
    assert phase.parts["matrix products"] == pytest.approx(expected)
    expected = 7 / 8 * 9e9 / 450e9
    assert phase.parts["collectives"] == pytest.approx(expected)
    read = 16 * (2 * (PARAMETERS - TABLE) - CACHE)
    assert phase.parts["memory bandwidth"] == pytest.approx(read / BANDWIDTH)


def test_micro_batches_by_tokens_are_as_few_as_the_tokens_allow():
    job = job_of(model__tokens_per_micro_batch=4096)
    assert job.fewest_micro_batches(32, 2) == pytest.approx(32 * 601 / 4096)
    # A longer sequence has a pass of its own.
    assert job_of(model__tokens_per_micro_batch=100).fewest_micro_batches(32, 2) == 32


def test_the_busiest_stage_counts_and_its_weights_are_its_own():
    layout = Layout(1, 2, 1, 1, False)
    job = job_of(layout, generation="native")
    each = Cost({"flops": 2e12})
    first = role_of(0, training_each=each)
    last = role_of(1, training_each=Cost({"flops": 3e12}))
    phase = phase_of("training", job, first, last)
    assert phase.parts["matrix products"] == pytest.approx(16 * 3e12 / PEAK)
    # The last stage reads the output layer, the first one nearly nothing of the embedding.
    expected = 16 * (job.read_by_pass(job.shapes[1]) - CACHE) / BANDWIDTH
    assert phase.parts["memory bandwidth"] == pytest.approx(
        expected,
    )
    layers = (PARAMETERS - 2 * TABLE - 4096) // 2
    expected = [
        2 * layers,
        2 * (layers + TABLE + 4096),
    ]
    assert [job.read_by_pass(shape) for shape in job.shapes] == expected


def test_data_parallel_ranks_share_sequences_and_optimizer():
    layout = Layout(1, 1, 1, 8, False)
    optim = {"model__optim__distributed": True}
    job = job_of(layout, generation="native", **optim)
    each = Cost({"flops": 2e12})
    training = phase_of("training", job, role_of(training_each=each))
    assert training.parts["matrix products"] == pytest.approx(2 * 2e12 / PEAK)
    optimizer = phase_of("optimizer", job, role_of())
    expected = (28 * PARAMETERS / 8 - 2 * CACHE) / BANDWIDTH
    assert optimizer.seconds == pytest.approx(expected)


def test_transfers_take_pcie():
    job = job_of(generation="native")
    reference = phase_of("reference log-probs", job, role_of())
    assert reference.parts["PCIe"] == pytest.approx(2 * PARAMETERS / 64e9)
    role = role_of()
    moves = replace(role, peaks={**role.peaks, "away": 96e9})
    assert phase_of("offload and back", job, moves).seconds == pytest.approx(2 * 96 / 64)
    overlapped = job_of(generation="native", model__reinforce__overlap_offload=True)
    assert phase_of("offload and back", overlapped, moves).seconds == pytest.approx(96 / 64)


def test_an_engine_is_bound_by_its_sizes():
    job = job_of(generation="vllm", engine__max_batch_size=16)
    phase = phase_of("generation", job, role_of())
    # 32 responses, 16 at a time; norms are counted nowhere.
    matrices = PARAMETERS - 2 * TABLE - 65 * 4096
    cached = 8 * 100 * 500 + 32 * 100**2 / 2
    moved = 200 * 2 * (matrices + TABLE) + KEYS_AND_VALUES * cached
    expected = (moved - 200 * CACHE) / BANDWIDTH
    assert phase.parts["memory bandwidth"] == pytest.approx(expected)
    pairs = 8 * 500**2 / 2 + 32 * 100 * 500 + 32 * 100**2 / 2
    products = 2 * matrices * (8 * 500 + 32 * 100)
    logits = 2 * TABLE * 32 * 101
    attention = 4 * 32 * 4096 * pairs
    flops = products + logits + attention
    assert phase.parts["matrix products"] == pytest.approx(flops / PEAK)
    refit = phase_of("weights to the engine", job, role_of())
    expected = (4 * PARAMETERS - 2 * CACHE) / BANDWIDTH
    assert refit.seconds == pytest.approx(expected)


def test_a_step_is_the_sum_of_its_phases_and_fits_or_not():
    step = lower_bound(job_of(generation="native"), [role_of()])
    expected = sum(phase.seconds for phase in step.phases)
    assert step.seconds == pytest.approx(expected)
    assert step.tokens == 32 * 601
    assert step.fits is True
    assert step.worst == "training"
    role = role_of()
    larger = replace(role, peaks={**role.peaks, "training": 78e9})
    assert not lower_bound(job_of(generation="native"), [larger]).fits
