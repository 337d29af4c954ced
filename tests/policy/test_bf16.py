"""bf16: state and sums in fp32, on one process and on two ranks; whole runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.batches import (
    TEMPERATURE,
    VOCAB_SIZE,
    actor_of,
    gradient_of,
    relative_difference,
    sequences,
    whole_batch,
)
from helpers.layouts import BF16_LAYOUTS, SETTINGS, Layout, computed, on_layouts
from helpers.models import tiny_llama_folder
from helpers.ranks import call_on_ranks
from helpers.tiny_run import metrics_of, tiny_config, tiny_trainer, weights, without_times

from reinforce_rl.algorithm.loss import LossSettings
from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.model.log_probs import response_scores
from reinforce_rl.megatron.model.sequences import PaddedSequences
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer

BF16 = torch.bfloat16
# bf16 has 8 bits, so each of a dozen roundings is wrong by up to 0.4 %. Per token, on average, of
# the gradient's norm.
TOKEN_BOUND = 1e-1
MEAN_BOUND = 1e-2
GRADIENT_BOUND = 5e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads, groups and vocabulary need padding at TP=2."""
    root = tmp_path_factory.mktemp("model")
    return tiny_llama_folder(
        root, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36, layers=4, seed=5
    )


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_and_main_weights_are_fp32(distributed, folder, mesh):
    actor = actor_of(folder, mesh, dtype=BF16, optim=OptimConfig(distributed=distributed))
    megatron, scheduler = build_optimizer(actor.ddp, **SETTINGS)
    optimizer = ActorOptimizer(megatron, scheduler)
    parameters = list(actor.lm.parameters())
    assert {p.dtype for p in parameters} == {BF16}
    before = [p.detach().clone() for p in parameters]
    for _ in range(2):
        actor.get_loss_and_metrics(whole_batch(), sequences(10))
        gradients = [p.main_grad for p in parameters]  # type: ignore[attr-defined]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        optimizer.step()
    inner = megatron.optimizer  # type: ignore[attr-defined]
    mains = [main for group in inner.param_groups for main in group["params"]]
    assert {main.dtype for main in mains} == {torch.float32}
    dtypes = {value.dtype for state in inner.state.values() for value in state.values()}
    assert dtypes == {torch.float32}
    # They keep what bf16 rounds off; the model has the rounded values.
    flat = [main.detach().flatten() for main in mains]
    fp32_weights = torch.cat(flat).sort().values
    flat_parameters = [p.detach().flatten() for p in parameters]
    rounded = torch.cat(flat_parameters).sort().values
    assert not torch.equal(fp32_weights, rounded.float())
    assert torch.equal(fp32_weights.to(BF16), rounded)
    for a, b in zip(before, parameters, strict=True):
        assert not torch.equal(a, b)


def test_log_probs_and_entropy_are_fp32_from_the_logits(folder, mesh):
    actor = actor_of(folder, mesh, dtype=BF16)
    rollouts = whole_batch().rollouts
    where = (rollouts.prompt_lengths, rollouts.response_lengths)
    layout = PaddedSequences(actor.lm, rollouts.sequences, *where)
    with torch.no_grad():
        hidden = layout.hidden(actor.lm)
        assert hidden.dtype == BF16
        scores = response_scores(
            layout,
            hidden,
            actor.lm,
            temperature=TEMPERATURE,
            width=rollouts.width,
            chunk_tokens=5,
            with_entropy=True,
        )
        logits = actor.lm.full_logits(hidden.flatten(0, 1)).double()
        table = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    table = table.view(*hidden.shape[:2], -1)
    assert scores.entropy is not None
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    for row, (prompt, response) in enumerate(
        zip(*(lengths.tolist() for lengths in where), strict=True)
    ):
        for column in range(response):
            log_p = table[row, prompt + column - 1]
            token = rollouts.sequences[row, prompt + column]
            log_prob = float(scores.log_probs[row, column])
            assert log_prob == pytest.approx(float(log_p[token]), abs=2e-6)
            expected = float(-(log_p.exp() * log_p).sum())
            assert float(scores.entropy[row, column]) == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_the_first_pass_clips_no_sample(shared_prefix, folder, mesh):
    """Ratios of whole responses are exactly 1 without old log-probs, and with equally cut passes.

    Log-probs computed in another way, as a generator does, differ by bf16's rounding. A response
    adds the differences up.
    """
    sizes = {"micro_batch_size": 3, "forward_micro_batch_size": 3, "shared_prefix": shared_prefix}
    actor = actor_of(folder, mesh, dtype=BF16, **sizes)
    actor.loss = LossSettings(
        importance_ratio="sequence", ratio_clip_low=1e-6, ratio_clip_high=1e-6
    )
    batch = whole_batch()
    trains = torch.ones(len(batch.trains), dtype=torch.bool)
    batch = replace(batch, trains=trains)
    rollouts = batch.rollouts
    where = (
        rollouts.sequences,
        rollouts.prompt_lengths,
        rollouts.response_lengths,
        rollouts.group_ids,
    )

    def sums_with(old, *, on_policy=False):
        known = replace(batch, rollouts=replace(rollouts, log_probs=old))
        return actor.get_loss_and_metrics(known, sequences(12), on_policy=on_policy).sums

    same = actor.get_inference_log_probs(*where)
    for sums in (sums_with(same), sums_with(None, on_policy=True)):
        assert sums["clipped"] == 0
        assert sums["weights"] == sums["squares"] == sums["tokens"]
    other = actor_of(folder, mesh, **sizes).get_inference_log_probs(*where)  # in fp32
    assert sums_with(other)["clipped"] > sums_with(other)["tokens"] / 4


def test_the_gradient_is_near_that_of_fp32(folder, mesh):
    """Accumulated in fp32: many small micro-batches lose nothing against one."""
    gradients = {}
    for dtype, size in ((torch.float32, 12), (BF16, 12), (BF16, 1)):
        actor = actor_of(folder, mesh, dtype=dtype, micro_batch_size=size)
        actor.get_loss_and_metrics(whole_batch(), sequences(10))
        gradients[dtype, size] = gradient_of(actor)
    for size in (12, 1):
        difference = relative_difference(gradients[BF16, size], gradients[torch.float32, 12])
        assert difference < GRADIENT_BOUND


@pytest.mark.slow
def test_layouts_of_two_ranks(folder, mesh, tmp_path):
    """The distance to fp32 is at most twice that of one process in bf16."""
    exact = computed(Layout(), folder, mesh)
    single = computed(Layout(dtype=BF16), folder, mesh)
    on_ranks = call_on_ranks(
        on_layouts, 2, list(BF16_LAYOUTS), computed, folder, tmp_path, timeout=600
    )
    assert torch.equal(single["reference_log_probs"], single["log_probs"]), (
        "the reference is the policy of step 0"
    )

    def errors(results: dict) -> list[float]:
        values = []
        for kind in ("log_probs", "log_probs_after"):
            difference = (results[kind] - exact[kind]).abs()
            values.append(float(difference.max()))
            values.append(float(difference.mean()))
        moved = single["weights"] - single["weights_before"]
        distance = (results["weights"] - exact["weights"]).norm()
        values.append(float(distance / moved.norm()))
        if "gradient" in results:
            values.append(relative_difference(results["gradient"], exact["gradient"]))
        return values

    # After three large steps the log-probs have grown to several nats.
    bounds = [TOKEN_BOUND, MEAN_BOUND, 4 * TOKEN_BOUND, 4 * MEAN_BOUND, 1e-1, GRADIENT_BOUND]
    print("one process", errors(single))
    for error, bound in zip(errors(single), bounds, strict=True):
        assert error <= bound
    for name in BF16_LAYOUTS:
        ranks = [of_rank[name] for of_rank in on_ranks]
        print(name, errors(ranks[0]))
        for results in ranks:
            assert torch.equal(results["weights_before"], single["weights_before"]), name
            assert torch.equal(results["reference_log_probs"], results["log_probs"]), name
            for mine, theirs in zip(errors(results), errors(single), strict=False):
                assert mine <= 2 * theirs, name
            for kind in ("log_probs", "log_probs_after"):
                assert results[kind].dtype == torch.float32
                assert torch.equal(results[kind], ranks[0][kind]), (name, kind)
            assert results["losses"] == pytest.approx(single["losses"], rel=2e-2), name
            assert results["norms"] == pytest.approx(single["norms"], rel=2e-2), name
            for kind in ("greedy", "sampled"):
                assert all(results[kind]["tokens"]), name
                assert bool((results[kind]["log_probs"] <= 0).all()), name


LORA = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4")
DISTRIBUTED = ("model.optim.distributed=true", "model.optim.overlap_grad_sync=true")


@pytest.mark.more
@pytest.mark.parametrize("options", [DISTRIBUTED, LORA], ids=["distributed optimizer", "lora"])
def test_a_run_goes_on_bit_for_bit(options, mesh, tmp_path):
    settings = (
        "trainer.precision=bf16",
        "trainer.reinforce.max_epochs=8",
        "model.optim.lr=0.02",
        *options,
    )
    results = []
    for name, cuts in (("whole", (None,)), ("cut", (6, None))):
        folder = tmp_path / name
        folder.mkdir()
        for steps in cuts:
            bound = () if steps is None else (f"trainer.reinforce.max_steps={steps}",)
            with tiny_trainer(tiny_config(folder, *settings, *bound), mesh) as trainer:
                trainer.fit()
        lm = trainer.model.lm
        dtypes = {p.dtype for p in lm.parameters()}
        assert dtypes == {BF16}
        metrics = [without_times(line) for line in metrics_of(folder)]
        results.append((weights(trainer), metrics))
    lines = results[0][1]
    assert lines[0]["train/init_policy_kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[-1]["train/init_policy_kl"] > 0.01
    assert results[1][1] == lines
    pairs = zip(results[0][0], results[1][0], strict=True)
    for a, b in pairs:
        assert torch.equal(a, b)
