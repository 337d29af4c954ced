"""The gradient of a batch equals the formula's, for any cut, padding or spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches import (
    TEMPERATURE,
    VOCAB_SIZE,
    actor_of,
    flat,
    gradient_of,
    relative_difference,
    rows_of,
    sequences,
    whole_batch,
)
from helpers.models import tiny_llama_folder
from helpers.policies import brute_force_scores, named_gradients, transformers_model
from helpers.ranks import call_on_ranks
from torch import Tensor

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import ReinforceBatch
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer

NUM_VALID = 10
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, betas=[0.9, 0.95])
# Rows of the two data-parallel ranks; prompt groups are not split.
SPLITS = {
    "even": ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]),
    "uneven": ([0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]),
    "one rank has none": (list(range(12)), []),
}


def brute_force_gradient(model: Any, batch: ReinforceBatch) -> tuple[float, Tensor]:
    """Return the policy-gradient loss and its gradient on transformers' model.

    The loss is -(sum over valid samples of A * log p(response)) / N.
    """
    rollouts = batch.rollouts
    rows = rollouts.valid
    log_probs = brute_force_scores(
        model,
        rollouts.sequences[rows],
        rollouts.prompt_lengths[rows],
        rollouts.response_lengths[rows],
        temperature=TEMPERATURE,
        width=rollouts.width,
    )[0]
    loss = -(batch.advantages[rows] * log_probs).sum() / int(rows.sum())
    model.zero_grad()
    loss.backward()
    return loss.item(), flat(named_gradients(model))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Heads, groups and vocabulary all need padding at TP=2."""
    root = tmp_path_factory.mktemp("model")
    return tiny_llama_folder(root, vocab_size=VOCAB_SIZE, heads=9, groups=3, hidden=36)


@pytest.fixture(scope="module")
def expected(folder):
    return brute_force_gradient(transformers_model(folder), whole_batch())


def loss_and_gradient(folder, mesh, batch, **sizes):
    actor = actor_of(folder, mesh, with_reference=False, **sizes)
    return actor.get_loss_and_metrics(batch, sequences(NUM_VALID)).loss, gradient_of(actor)


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8, 100])
def test_equals_the_formula_for_every_micro_batch_size(
    micro_batch_size, shared_prefix, folder, mesh, expected
):
    sizes = {"micro_batch_size": micro_batch_size, "shared_prefix": shared_prefix}
    loss, gradient = loss_and_gradient(folder, mesh, whole_batch(), **sizes)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert relative_difference(gradient, expected[1]) < 1e-5
    _, reference = loss_and_gradient(folder, mesh, whole_batch(), micro_batch_size=12)
    assert relative_difference(gradient, reference) < 1e-6


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
def test_tokens_of_an_environment_are_read_and_not_trained_on(
    micro_batch_size, shared_prefix, folder, mesh
):
    batch = whole_batch()
    rollouts = batch.rollouts
    shape = rollouts.response_mask.shape
    policy_mask = torch.rand(shape, generator=torch.Generator().manual_seed(8)) < 0.6
    advantages = batch.advantages.where(policy_mask, torch.nan)
    episodes = replace(
        batch, rollouts=replace(rollouts, policy_mask=policy_mask), advantages=advantages
    )
    # A token without an advantage adds nothing to the formula's loss.
    zeroed = replace(batch, advantages=batch.advantages.where(policy_mask, 0.0))
    expected = brute_force_gradient(transformers_model(folder), zeroed)
    sizes = {"micro_batch_size": micro_batch_size, "shared_prefix": shared_prefix}
    loss, gradient = loss_and_gradient(folder, mesh, episodes, **sizes)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert relative_difference(gradient, expected[1]) < 1e-5
    actor = actor_of(folder, mesh, with_reference=False, **sizes)
    masked = actor.get_inference_log_probs(*episodes.rollouts.sequence_inputs)
    plain = actor.get_inference_log_probs(*rollouts.sequence_inputs)
    assert torch.equal(masked, plain.where(episodes.rollouts.response_mask, 0.0))


def test_steps_before_it_leave_nothing_behind(folder, mesh, tmp_path):
    """Several micro-batches after an optimizer step.

    The step holds on to the buffers and must not add to them.
    """
    actor = actor_of(folder, mesh, micro_batch_size=3, with_reference=False)
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, OPTIM, clip_grad=1.0, total_steps=10))
    for step in range(1, 4):
        actor.get_loss_and_metrics(whole_batch(), sequences(NUM_VALID))
        gradient = gradient_of(actor)
        here = transformers_model(actor.export(folder, tmp_path / str(step)))
        assert relative_difference(gradient, brute_force_gradient(here, whole_batch())[1]) < 1e-5, (
            step
        )
        assert optimizer.step().grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_independent_of_padding_and_order(folder, mesh):
    batch = whole_batch()
    _, reference = loss_and_gradient(folder, mesh, batch)
    wider = torch.nn.functional.pad(batch.rollouts.sequences, (0, 9), value=33)
    advantages = torch.nn.functional.pad(batch.advantages, (0, 4), value=torch.nan)
    padded = replace(
        batch, rollouts=replace(batch.rollouts, sequences=wider), advantages=advantages
    )
    rows = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = rows_of(batch, rows)
    for other in (padded, shuffled):
        assert relative_difference(loss_and_gradient(folder, mesh, other)[1], reference) < 1e-6


def test_invalid_samples_play_no_part(folder, mesh):
    """Whatever their fields hold: NaN as reward and advantage, another response."""
    batch = whole_batch()
    _, reference = loss_and_gradient(folder, mesh, batch)
    valid = batch.rollouts.valid[:, None]
    sequences = torch.where(valid, batch.rollouts.sequences, 7)
    advantages = torch.where(batch.rollouts.valid[:, None], batch.advantages, torch.nan)
    spoilt = replace(
        batch, rollouts=replace(batch.rollouts, sequences=sequences), advantages=advantages
    )
    assert torch.equal(loss_and_gradient(folder, mesh, spoilt)[1], reference)
    rows = [i for i in range(12) if batch.rollouts.valid[i]]
    dropped = rows_of(batch, rows)
    assert relative_difference(loss_and_gradient(folder, mesh, dropped)[1], reference) < 1e-6


def test_no_valid_sample_gives_a_zero_gradient(folder, mesh):
    batch = whole_batch()
    nothing = replace(batch, trains=torch.zeros(12, dtype=torch.bool))
    actor = actor_of(folder, mesh, with_reference=False)
    actor.get_loss_and_metrics(batch, sequences(NUM_VALID))
    assert actor.get_loss_and_metrics(nothing, sequences(0)).loss == 0
    assert not gradient_of(actor).any()


def test_negated_advantages_negate_the_gradient(folder, mesh, expected):
    batch = whole_batch()
    loss, gradient = loss_and_gradient(folder, mesh, replace(batch, advantages=-batch.advantages))
    assert loss == pytest.approx(-expected[0], rel=1e-5)
    assert relative_difference(-gradient, expected[1]) < 1e-5


def test_a_step_against_the_gradient_makes_good_responses_likelier(folder, mesh):
    """Checks the sign itself, which two equal formulas with the same mistake would not."""
    batch = rows_of(whole_batch(), [0, 2])
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, batch.rollouts.width)
    batch = replace(batch, advantages=advantages)
    actor = actor_of(folder, mesh, with_reference=False)
    where = (
        batch.rollouts.sequences,
        batch.rollouts.prompt_lengths,
        batch.rollouts.response_lengths,
    )
    before = actor.get_inference_log_probs(*where).sum(dim=1)
    actor.get_loss_and_metrics(batch, sequences(2))
    with torch.no_grad():
        for parameter in actor.lm.parameters():
            parameter -= 1e-3 * parameter.main_grad
    after = actor.get_inference_log_probs(*where).sum(dim=1)
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_log_probs_do_not_depend_on_the_forward_micro_batch_size(size, folder, mesh):
    rollouts = whole_batch().rollouts
    where = (rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths)
    log_probs = actor_of(
        folder, mesh, with_reference=False, forward_micro_batch_size=size
    ).get_inference_log_probs(*where)
    reference = actor_of(
        folder, mesh, with_reference=False, forward_micro_batch_size=4
    ).get_inference_log_probs(*where)
    assert log_probs.shape == (12, 8)
    torch.testing.assert_close(log_probs, reference, atol=2e-6, rtol=0)
    assert not log_probs[~rollouts.response_mask].any()


def test_log_probs_of_no_sequences(folder, mesh):
    nothing = torch.zeros(0, dtype=torch.long)
    actor = actor_of(folder, mesh, with_reference=False)
    log_probs = actor.get_inference_log_probs(nothing[:, None], nothing, nothing)
    assert log_probs.shape == (0, 0)


def gradients_of_two_ranks(folder, tp_size):
    with parallel_mesh(tp_size) as mesh:
        actor = actor_of(folder, mesh, with_reference=False)
        optim = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95])
        optimizer = ActorOptimizer(
            *build_optimizer(actor.ddp, optim, clip_grad=1.0, total_steps=10)
        )
        batch = whole_batch()
        results = {}
        for name, split in SPLITS.items():
            mine = rows_of(batch, split[mesh.dp_rank]) if mesh.dp_size == 2 else batch
            share = actor.get_loss_and_metrics(mine, sequences(10))
            loss = mesh.sum_over_dp(torch.tensor(share.loss, dtype=torch.float64))
            results[name] = {"loss": float(loss), "gradient": gradient_of(actor)}
        # All samples of a rank are invalid.
        all_invalid = whole_batch()
        all_invalid.trains[6:] = False
        mine = (
            rows_of(all_invalid, SPLITS["even"][mesh.dp_rank]) if mesh.dp_size == 2 else all_invalid
        )
        actor.get_loss_and_metrics(mine, sequences(5))
        results["one rank has no valid one"] = {"gradient": gradient_of(actor)}

        actor.get_loss_and_metrics(
            rows_of(batch, SPLITS["even"][mesh.dp_rank]) if mesh.dp_size == 2 else batch,
            sequences(10),
        )
        optimizer.megatron.prepare_grads()
        results["foreach norm"] = optimizer._foreach_norm()
        results["norm"] = optimizer.step().grad_norm
        results["log_probs"] = actor.get_inference_log_probs(
            batch.rollouts.sequences,
            batch.rollouts.prompt_lengths,
            batch.rollouts.response_lengths,
        )
    return results


@pytest.mark.more
@pytest.mark.parametrize("tp_size", [1, 2], ids=["DP=2", "TP=2"])
def test_two_ranks_equal_one(tp_size, folder, mesh, expected):
    ranks = call_on_ranks(gradients_of_two_ranks, 2, folder, tp_size)
    loss, gradient = loss_and_gradient(folder, mesh, whole_batch())
    half = whole_batch()
    half.trains[6:] = False
    actor = actor_of(folder, mesh, with_reference=False)
    actor.get_loss_and_metrics(half, sequences(5))
    gradients = dict.fromkeys(("even", "uneven", "one rank has none"), gradient)
    gradients["one rank has no valid one"] = gradient_of(actor)
    for results in ranks:
        for name, one_process in gradients.items():
            assert relative_difference(results[name]["gradient"], one_process) <= 1e-5, name
        for name in ("even", "uneven", "one rank has none"):
            assert results[name]["loss"] == pytest.approx(loss, rel=1e-5)
        # Padding and copies of a weight on several ranks must not count in the norm by which all
        # ranks clip.
        assert results["norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
        assert results["foreach norm"] == pytest.approx(
            results["norm"], rel=1e-6
        )  # the sizes of a GPU
    # After the step, all ranks have one policy.
    assert torch.equal(ranks[0]["log_probs"], ranks[1]["log_probs"])
