"""How batches divide, in numbers that were worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.tiny_run import compose, tiny_overrides

from reinforce_rl.config.load import load_config
from reinforce_rl.config.parallelism import Layout
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.lora import LoraSettings
from reinforce_rl.preflight import plan
from reinforce_rl.preflight.memory import Decoding, Pass, Policy, StageShape, rank_memory
from reinforce_rl.preflight.plan import Share, plan_batches
from reinforce_rl.trainer.inputs import layout_of, read_inputs

ROLLOUT = "model.reinforce"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    return tiny_overrides(tmp_path_factory.mktemp("run"))


def plan_of(overrides, *extra):
    cfg = load_config(compose(*overrides, *extra))
    layout = layout_of(cfg)
    inputs = read_inputs(cfg)
    assert layout is not None
    assert inputs.faults == []
    return plan_batches(cfg, layout, inputs.datasets)


def test_batches_that_do_not_divide(overrides):
    """8 prompts in steps of 5, on 2 ranks; sequences of 3 + 5 tokens, 4 of a prompt."""
    plan = plan_of(
        overrides,
        "trainer.devices=2",
        f"{ROLLOUT}.num_rollout_samples=5",
        f"{ROLLOUT}.rollout_micro_batch_size=2",
        "model.micro_batch_size=5",
        f"{ROLLOUT}.forward_micro_batch_size=7",
        "trainer.reinforce.max_epochs=3",
        "trainer.reinforce.val_check_interval=2",
        f"{ROLLOUT}.val_rollout_micro_batch_size=1",
    )
    assert plan.prompts_of_rank == Share(2, 3)
    assert plan.generation_calls == 2  # 2 + 1 prompts
    assert plan.forward_micro_batches == 2  # 12 sequences in sevens
    # 12 in fives
    assert plan.prompts_of_update == Share(5, 3)
    assert plan.updates == 1
    assert plan.micro_batches == 3
    assert plan.longest_prompt == 3
    assert plan.longest == 8
    assert plan.validation == 3
    assert plan.validation_calls == 2
    assert plan.epoch == [5, 3]


def test_several_optimizer_steps_on_a_batch(overrides):
    """4 prompts a step in updates of 2, twice over.

    The last two of them may all lie on one of the two ranks.
    """
    plan = plan_of(
        overrides,
        "trainer.devices=2",
        "model.global_batch_size=4",
        f"{ROLLOUT}.num_rollout_samples=4",
        "trainer.reinforce.num_rollouts_per_prompt=2",
        "trainer.reinforce.reinforce_epochs=2",
        "trainer.reinforce.importance_ratio=token",
        "trainer.reinforce.max_steps=1",
        "model.tokens_per_micro_batch=17",
    )
    assert plan.prompts_of_update == Share(2, 2)
    assert plan.updates == 4
    assert plan.epoch == [4, 4]
    assert plan.micro_batches == 2  # 4 sequences of 8 tokens, two in 17
    assert plan.validation is None


SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}
ARCH = Architecture.from_hf(
    {**SIZES, "model_type": "llama", "vocab_size": 10, "num_hidden_layers": 1}
)
SHAPE = StageShape(1, True, True, ARCH, parameters=1000, trained=1000, largest=384)
POLICY = Policy(4, Layout(1, 1, 1, 1), 1, "host", None, 0, 1, 64, False, fused_adam=True, gpu=True)


def memory_of(shape=SHAPE, **changes):
    policy = dataclasses.replace(POLICY, **changes)
    micro = Pass(rows=2, positions=5, scored=4)
    generations = {"generation": Decoding(2, 3, 4, 2, None)}
    return rank_memory(0, shape, policy, micro, micro, generations)


def phase_of(memory, name):
    return next(phase for phase in memory.phases if phase.name == name)


def test_states_by_precision_and_sharing():
    memory = memory_of()
    assert memory.weights == 4000
    assert memory.gradients == 4000
    assert memory.optimizer == 8000
    assert memory.reference_on_host == 4000
    assert memory.reference_on_device == 0
    narrow = memory_of(weight_bytes=2, optimizer_shards=3, reference="device")
    assert narrow.weights == 2000
    assert narrow.gradients == 4000
    assert narrow.optimizer == 334 * 12
    assert narrow.reference_on_host == 0
    assert narrow.reference_on_device == 2000
    lora = LoraSettings(8, 16.0, ("q_proj",))
    updates = memory_of(dataclasses.replace(SHAPE, trained=100), reference="none", lora=lora)
    assert updates.weights == 4000
    assert updates.gradients == 400
    assert updates.optimizer == 800


def test_a_sleeping_engine_may_keep_its_weights_in_host_memory():
    """TensorRT-LLM 1.2 has RestoreMode.PINNED for all but the cache (py_executor_creator.py)."""
    assert memory_of(engine_copies=True).on_host == 4000 + 4000
    both = memory_of(engine_copies=True, offload_optimizer=True, reference="none")
    assert both.on_host == 4000 + 8000
    assert (
        memory_of(
            engine_copies=True,
            reference="none",
            layout=dataclasses.replace(POLICY.layout, context=2),
        ).on_host
        == 2000
    )
    assert memory_of(engine_copies=True, gpu=False).engine_on_host == 0


LORA = "model.peft.peft_scheme=lora"


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["generation=tensorrt_llm"], True),
        (["generation=vllm"], False),
        (["generation=vllm", LORA], True),
        (["generation=vllm", LORA, "vllm.load_adapters=false"], False),
        (["generation=native"], False),
    ],
)
def test_which_engine_keeps_its_weights_there(tmp_path, overrides, copies):
    config = load_config(compose(*tiny_overrides(tmp_path), *overrides))
    has_lora = LORA in overrides
    assert plan._engine_copies(config, has_lora=has_lora) == copies


def test_what_moves_between_a_gpu_and_its_host():
    memory = memory_of(offload_optimizer=True)
    # moments to the host, gradients nowhere
    assert phase_of(memory, "generation").moved == -8000 - 4000
    assert phase_of(memory, "reference log-probs").moved == 4000
    assert phase_of(memory, "log-probs").moved == 0
    assert memory.on_host == 4000 + 8000
    narrow = memory_of(offload_optimizer=True, weight_bytes=2, optimizer_shards=4)
    # fp32 weights too, of a rank's share
    assert phase_of(narrow, "generation").moved == -250 * 12 - 4000
    assert narrow.on_host == 2000 + 250 * 12
    on_cpu = memory_of(offload_optimizer=True, gpu=False)
    moved_bytes = {phase.moved for phase in on_cpu.phases}
    assert moved_bytes == {0}
    names = {phase.name for phase in memory_of(reference="none").phases}
    assert "reference log-probs" not in names


def test_a_fused_adam_has_no_temporaries():
    assert phase_of(memory_of(), "optimizer step").activations == 0
    assert (
        phase_of(memory_of(fused_adam=False, optimizer_shards=2), "optimizer step").activations
        == 500 * 4
    )


def test_the_cache_of_a_generation():
    """Two prompts of four tokens, three samples of two tokens each, one layer and one group."""
    expected = (2 * 4 + 6 * 2) * 2 * 4 * 4
    assert phase_of(memory_of(), "generation").cache == expected


def test_the_grid_of_many_ranks_is_cut():
    text = Layout(8, 4, 1, 32, True).grid()
    assert text.splitlines()[0].startswith(
        "1024 ranks: 32 data x 4 pipeline x 1 context x 8 tensor parallel with seq"
    )
    assert text.endswith("and 16 more")
    assert "stage 3 [768 769 770 771 772 773 774 775]" in text


def test_what_a_rank_holds_is_all_of_it():
    """fp32 weights, gradients, moments and the reference: 4, 4, 8 and 4 bytes of 1,000 weights."""
    on_device = memory_of(reference="device")
    assert on_device.held == 4000 + 4000 + 8000 + 4000
    assert memory_of(reference="host").held == 4000 + 4000 + 8000
    assert memory_of(reference="none").held == 4000 + 4000 + 8000
    assert memory_of(reference="host").on_host == 4000
    assert memory_of(reference="none").on_host == 0


@pytest.mark.parametrize(
    "changes", [{}, {"reference": "none"}, {"gpu": False}, {"offload_optimizer": True}]
)
def test_the_peak_is_what_is_held_and_the_largest_phase(changes):
    memory = memory_of(**changes)
    totals = [
        phase.activations + phase.logits + phase.cache + phase.moved for phase in memory.phases
    ]
    assert len(set(totals)) > 1
    assert [phase.total for phase in memory.phases] == totals
    assert memory.peak == memory.held + max(totals)
    assert memory.peak_phase.total == max(totals)
