"""The reference policy keeps the weights of step 0 while the policy changes.

In each of its three forms.
"""

from __future__ import annotations

import pytest
import torch
from helpers.batches import TEMPERATURE, VOCAB_SIZE, actor_of, sequences, whole_batch
from helpers.models import tiny_llama_folder
from helpers.policies import brute_force_scores, transformers_model

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.lora import PROJECTIONS, LoraSettings
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer
from reinforce_rl.policy.model import ReferencePolicy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE)


FORMS = {
    "host": {},
    "device": {"reference_placement": "device"},
    "lora": {"updates": LoraSettings(rank=4, alpha=8.0, targets=PROJECTIONS)},
}


@pytest.fixture(params=FORMS)
def actor(request, folder, mesh):
    return actor_of(folder, mesh, **FORMS[request.param])


@pytest.fixture
def where():
    rollouts = whole_batch().rollouts
    return rollouts.sequences, rollouts.prompt_lengths, rollouts.response_lengths


def train_a_step(actor) -> None:
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, betas=[0.9, 0.95])
    optimizer = ActorOptimizer(*build_optimizer(actor.ddp, optim, clip_grad=0.0, total_steps=10))
    actor.get_loss_and_metrics(whole_batch(), sequences(10))
    optimizer.step()


def weights_of(actor) -> list[torch.Tensor]:
    return [p.detach().clone() for p in actor.lm.parameters()]


def equal(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_at_step_0_both_policies_are_the_same(actor, where):
    assert torch.equal(
        actor.get_init_policy_logprobs(*where), actor.get_inference_log_probs(*where)
    )


def test_the_reference_stays_when_the_actor_learns(actor, where):
    before = actor.get_init_policy_logprobs(*where)
    for _ in range(2):
        train_a_step(actor)
        assert torch.equal(actor.get_init_policy_logprobs(*where), before)
    assert (actor.get_inference_log_probs(*where) - before).abs().max() > 0.05


def test_swapping_leaves_weights_gradients_and_mode(actor, where):
    train_a_step(actor)
    actor.get_loss_and_metrics(whole_batch(), sequences(10))
    trained = [p for p in actor.lm.parameters() if p.requires_grad]
    weights = weights_of(actor)
    gradients = [p.main_grad.clone() for p in trained]
    pointers = [p.data_ptr() for p in actor.lm.parameters()]
    actor.get_init_policy_logprobs(*where)
    assert equal(weights_of(actor), weights)
    assert equal([p.main_grad for p in trained], gradients)
    assert [p.data_ptr() for p in actor.lm.parameters()] == pointers


@pytest.mark.parametrize("on_device", [False, True])
def test_weights_come_back_after_an_exception(on_device, folder, mesh):
    actor = actor_of(folder, mesh)
    reference = ReferencePolicy(actor.lm, on_device=on_device)
    train_a_step(actor)
    weights = weights_of(actor)
    with pytest.raises(RuntimeError, match="inside"), reference.swapped_in():
        assert not equal(weights_of(actor), weights)
        raise RuntimeError("inside")
    assert equal(weights_of(actor), weights)


def test_temperature_of_the_reference(actor, where, folder):
    expected = brute_force_scores(
        transformers_model(folder), *where, temperature=TEMPERATURE, width=8
    )[0].detach()
    train_a_step(actor)
    torch.testing.assert_close(actor.get_init_policy_logprobs(*where), expected, atol=1e-5, rtol=0)
    model = transformers_model(folder)
    at_one, _ = brute_force_scores(model, *where, temperature=1.0, width=8)
    assert (at_one - expected).abs().max() > 0.1


def test_temperature_of_the_actor_after_an_update(actor, where, folder, tmp_path):
    train_a_step(actor)
    updated = transformers_model(actor.export(folder, tmp_path / "exported"))
    expected, _ = brute_force_scores(updated, *where, temperature=TEMPERATURE, width=8)
    log_probs = actor.get_inference_log_probs(*where)
    torch.testing.assert_close(log_probs, expected.detach(), atol=1e-5, rtol=0)


def test_no_copy_without_a_reference(folder, mesh, where):
    actor = actor_of(folder, mesh, with_reference=False)
    with pytest.raises(RuntimeError, match="built without a reference policy"):
        actor.get_init_policy_logprobs(*where)
