"""Episodes that the policy read in several contexts: each is exact by itself, and counts once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

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
)
from helpers.models import tiny_llama_folder
from helpers.policies import named_gradients, transformers_model
from helpers.ranks import call_on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reinforce_rl.algorithm.loss import Denominators, LossSettings
from reinforce_rl.config.actor import ReinforceConfig
from reinforce_rl.config.model import OptimConfig
from reinforce_rl.data.batches import ReinforceBatch, RolloutBatch
from reinforce_rl.data.finish_reasons import FINISH_STOP
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model.sequences import split_contexts
from reinforce_rl.megatron.optimizer import build_optimizer
from reinforce_rl.policy.micro_batches import micro_batches_of_episodes
from reinforce_rl.trainer.advantages import reinforce_batch
from reinforce_rl.trainer.state import RunningBaselines
from reinforce_rl.trainer.updates import denominators_of

MAX_LENGTH = 40
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, betas=[0.9, 0.95])


class Context(NamedTuple):
    """What the policy read and wrote in one piece."""

    prompt: list[int]
    pieces: list[tuple[bool, list[int]]]  # (the policy wrote it, tokens)


# Lengths of an episode's contexts: (prompt or history, environment, answer, environment, answer).
# Two prompts with three samples each; the second sample of the first is read in three contexts.
SHAPES = [
    [(4, 0, 3, 2, 2)],
    [(4, 0, 2, 0, 0), (5, 2, 3, 0, 0), (8, 1, 1, 3, 2)],
    [(4, 0, 5, 0, 0), (3, 0, 2, 0, 0)],
    [(2, 0, 1, 1, 1), (6, 3, 4, 0, 0)],
    [(2, 0, 6, 0, 0)],
    [(2, 0, 2, 2, 2)],
]
GROUPS = [0, 0, 0, 1, 1, 1]
INVALID = 4  # row of the sample without a score


def random_episodes() -> list[list[Context]]:
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()

    prompts = {group: tokens(SHAPES[GROUPS.index(group)][0][0]) for group in GROUPS}
    episodes = []
    for group, contexts in zip(GROUPS, SHAPES, strict=True):
        episode = []
        for number, (size, *lengths) in enumerate(contexts):
            prompt = tokens(size) if number else prompts[group]
            whose = itertools.cycle((False, True))
            pieces = [(next(whose), tokens(length)) for length in lengths]
            episode.append(Context(prompt, pieces))
        episodes.append(episode)
    return episodes


def rollouts_of(episodes: list[list[Context]]) -> RolloutBatch:
    sequences = []
    prompt_lengths = []
    policy_masks = []
    history_masks = []
    for episode in episodes:
        row = list(episode[0].prompt)
        is_policy: list[bool] = []
        is_history: list[bool] = []
        for number, context in enumerate(episode):
            if number:
                row += context.prompt
                is_policy += [False] * len(context.prompt)
                is_history += [True] * len(context.prompt)
            for by_policy, tokens in context.pieces:
                row += tokens
                is_policy += [by_policy] * len(tokens)
                is_history += [False] * len(tokens)
        sequences.append(torch.tensor(row))
        prompt_lengths.append(len(episode[0].prompt))
        policy_masks.append(torch.tensor(is_policy))
        history_masks.append(torch.tensor(is_history))
    count = len(episodes)
    valid = torch.ones(count, dtype=torch.bool)
    valid[INVALID] = False
    rewards = torch.tensor([0.5, 2.0, -1.0, 0.25, torch.nan, 1.0])
    return RolloutBatch(
        sequences=pad_sequence(sequences, True),
        prompt_lengths=torch.tensor(prompt_lengths),
        response_lengths=torch.tensor([len(mask) for mask in policy_masks]),
        group_ids=torch.tensor(GROUPS),
        sample_ids=torch.arange(count) % 3,
        finish_reasons=(FINISH_STOP,) * count,
        rewards=rewards,
        valid=valid,
        policy_mask=pad_sequence(policy_masks, True),
        history_mask=pad_sequence(history_masks, True),
    )


def scores_of(model: Any, episode: list[Context]) -> list[Tensor]:
    """Return transformers' log-probs of the policy's tokens, context by context."""
    scores = []
    for context in episode:
        tokens = context.prompt + [token for _, piece in context.pieces for token in piece]
        logits = model(torch.tensor([tokens])).logits[0] / TEMPERATURE
        table = torch.log_softmax(logits, dim=-1)
        place = len(context.prompt)
        for by_policy, piece in context.pieces:
            if by_policy:
                positions = torch.arange(place, place + len(piece))
                scores.append(table[positions - 1, torch.tensor(piece, dtype=torch.long)])
            place += len(piece)
    return scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    return tiny_llama_folder(root, vocab_size=VOCAB_SIZE, heads=4, groups=2, hidden=32)


@pytest.fixture(scope="module")
def expected(folder) -> list[Tensor]:
    """The log-probs of each episode's policy tokens, in order."""
    model = transformers_model(folder, torch.float64)
    with torch.no_grad():
        return [torch.cat(scores_of(model, episode)) for episode in random_episodes()]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_log_probs_are_those_of_each_context(shared_prefix, size, folder, mesh, expected):
    rollouts = rollouts_of(random_episodes())
    actor = actor_of(
        folder,
        mesh,
        with_reference=False,
        shared_prefix=shared_prefix,
        forward_micro_batch_size=size,
        dtype=torch.float64,
    )
    log_probs = actor.get_inference_log_probs(*rollouts.sequence_inputs)
    assert log_probs.shape == rollouts.response_mask.shape
    assert not log_probs[~rollouts.response_mask].any()
    for row, scores in enumerate(expected):
        of_policy = log_probs[row][rollouts.response_mask[row]]
        torch.testing.assert_close(of_policy.double(), scores, atol=1e-6, rtol=0)


def batch_of(expected: list[Tensor], **keys: Any) -> tuple[ReinforceBatch, Denominators]:
    """Return the batch of the loss for episodes whose reference likes every token less by 0.1."""
    rollouts = rollouts_of(random_episodes())
    log_probs = torch.zeros(rollouts.response_mask.shape)
    log_probs[rollouts.response_mask] = torch.cat(expected).float()
    rollouts = replace(rollouts, log_probs=log_probs, init_log_probs=log_probs - 0.1)
    cfg = ReinforceConfig(initial_policy_kl_penalty=0.2, num_rollouts_per_prompt=3, **keys)
    batch = reinforce_batch(rollouts, cfg, RunningBaselines(cfg), step=1, max_length=MAX_LENGTH)
    rows = torch.arange(len(GROUPS))
    return batch, denominators_of(batch, rows, MAX_LENGTH, lambda sums: sums)


def test_an_episode_counts_once(expected):
    """Its KL is that of all its contexts, and its advantage compares whole episodes."""
    batch, denominators = batch_of(expected)
    lengths = [len(scores) for scores in expected]
    assert batch.kl.tolist() == pytest.approx([0.1 * length for length in lengths], abs=1e-5)
    trained = [row for row in range(len(GROUPS)) if row != INVALID]
    assert denominators.sequences == len(trained)
    assert denominators.tokens == sum(lengths[row] for row in trained)
    rewards = {
        row: float(batch.rollouts.rewards[row]) - 0.2 * 0.1 * lengths[row] for row in trained
    }
    mask = batch.rollouts.response_mask
    for row in trained:
        others = [rewards[i] for i in trained if GROUPS[i] == GROUPS[row] and i != row]
        advantage = rewards[row] - sum(others) / len(others)
        assert batch.advantages[row][mask[row]].tolist() == pytest.approx(
            [advantage] * lengths[row], abs=1e-5
        )
    assert not batch.advantages[~mask].any()


def brute_force_loss(
    model: Any, batch: ReinforceBatch, aggregation: str, ratio: str, old: list[Tensor]
) -> Tensor:
    """Loop over episodes and contexts."""
    trained = [row for row in range(len(GROUPS)) if batch.trains[row]]
    episodes = random_episodes()
    all_tokens = sum(len(old[row]) for row in trained)
    loss = torch.zeros((), dtype=torch.float64)
    for row in trained:
        scores = torch.cat(scores_of(model, episodes[row]))
        count = len(scores)
        advantage = float(batch.advantages[row].sum()) / count
        difference = scores - old[row]
        if ratio == "none":
            terms = -advantage * scores
        elif ratio == "token":
            terms = -advantage * difference.exp()
        elif ratio == "sequence":
            # once for the whole episode, spread over its tokens
            terms = -advantage * difference.sum().exp() / count * torch.ones(count)
        else:
            terms = -advantage * difference.mean().exp() * torch.ones(count)
        weight = {
            "sequence_sum": 1 / len(trained),
            "sequence_mean": 1 / (len(trained) * count),
            "token_mean": 1 / all_tokens,
            "fixed_length": 1 / (len(trained) * MAX_LENGTH),
        }[aggregation]
        loss = loss + weight * terms.sum()
    return loss


LOSSES = [
    ("sequence_sum", "none"),
    ("sequence_mean", "none"),
    ("token_mean", "token"),
    ("fixed_length", "sequence"),
    ("sequence_mean", "sequence_geometric"),
]


@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize(("aggregation", "ratio"), LOSSES)
def test_the_gradient_is_that_of_a_loop_over_episodes_and_contexts(
    aggregation, ratio, shared_prefix, folder, mesh, expected
):
    batch, denominators = batch_of(expected, loss_aggregation=aggregation)
    # log-probs of an earlier policy, so that ratios differ from 1
    shifts = torch.rand(batch.rollouts.response_mask.shape, generator=torch.Generator())
    assert batch.rollouts.log_probs is not None
    old_log_probs = batch.rollouts.log_probs + 0.02 * (shifts - 0.5)
    batch = replace(batch, rollouts=replace(batch.rollouts, log_probs=old_log_probs))
    old = [
        row[mask].double()
        for row, mask in zip(old_log_probs, batch.rollouts.response_mask, strict=True)
    ]
    model = transformers_model(folder, torch.float64)
    loss = brute_force_loss(model, batch, aggregation, ratio, old)
    loss.backward()
    gradient = flat(named_gradients(model))

    loss_settings = LossSettings(
        loss_aggregation=aggregation,
        importance_ratio=ratio,
        ratio_clip_low=0.9,
        ratio_clip_high=9.0,
    )
    for size in (1, 3, 100):
        actor = actor_of(
            folder,
            mesh,
            with_reference=False,
            loss=loss_settings,
            shared_prefix=shared_prefix,
            micro_batch_size=size,
            dtype=torch.float64,
        )
        share = actor.get_loss_and_metrics(batch, denominators, on_policy=False)
        assert share.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
        assert relative_difference(gradient_of(actor), gradient) < 1e-5


def results_on_ranks(folder, tp_size: int, cp_size: int, expected) -> dict[str, Any]:
    with parallel_mesh(tp_size, context_parallel_size=cp_size) as mesh:
        actor = actor_of(folder, mesh, with_reference=False)
        # It sets what adds gradients over ranks.
        build_optimizer(actor.ddp, OPTIM, clip_grad=1.0, total_steps=10)
        batch, _ = batch_of(expected)
        rows = torch.arange(len(GROUPS)).split(len(GROUPS) // mesh.dp_size)[mesh.dp_rank]
        mine = rows_of(batch, rows.tolist())
        denominators = denominators_of(mine, torch.arange(len(rows)), MAX_LENGTH, mesh.sum_over_dp)
        share = actor.get_loss_and_metrics(mine, denominators)
        loss = mesh.sum_over_dp(torch.tensor(share.loss, dtype=torch.float64))
        return {"loss": float(loss), "gradient": gradient_of(actor)}


@pytest.mark.more
@pytest.mark.parametrize(("tp_size", "cp_size"), [(1, 1), (2, 1), (1, 2)], ids=["DP", "TP", "CP"])
def test_the_gradient_does_not_depend_on_the_layout(tp_size, cp_size, folder, mesh, expected):
    batch, denominators = batch_of(expected)
    actor = actor_of(folder, mesh, with_reference=False)
    loss = actor.get_loss_and_metrics(batch, denominators).loss
    gradient = gradient_of(actor)
    for results in call_on_ranks(results_on_ranks, 2, folder, tp_size, cp_size, expected):
        assert results["loss"] == pytest.approx(loss, rel=1e-5)
        assert relative_difference(results["gradient"], gradient) < 1e-5


def test_contexts_are_cut_out_of_the_row():
    rollouts = rollouts_of(random_episodes())
    mask = rollouts.response_mask
    assert rollouts.history_mask is not None
    contexts = split_contexts(
        rollouts.sequences,
        rollouts.prompt_lengths,
        rollouts.response_lengths,
        rollouts.group_ids,
        mask,
        rollouts.history_mask,
        pad_id=60,
    )
    assert contexts.rows.tolist() == [0, 1, 1, 1, 2, 2, 3, 3, 4, 5]
    expected = [context for episode in random_episodes() for context in episode]
    for number, context in enumerate(expected):
        tokens = [token for _, piece in context.pieces for token in piece]
        whole = [*context.prompt, *tokens]
        row = contexts.sequences[number].tolist()
        assert row == whole + [60] * (len(row) - len(whole))
        assert contexts.prompt_lengths[number] == len(context.prompt)
        assert contexts.response_lengths[number] == len(tokens)
        by_policy = [who for who, piece in context.pieces for _ in piece]
        assert contexts.response_mask[number, : len(tokens)].tolist() == by_policy
        assert not contexts.response_mask[number, len(tokens) :].any()
    # A rewritten history is shared with nobody.
    assert contexts.group_ids[contexts.columns == 0].tolist() == GROUPS
    later = contexts.group_ids[contexts.columns > 0].tolist()
    assert len(set(later)) == len(later)
    assert not set(later) & set(GROUPS)


EPISODES = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), max_size=12)


@settings(deadline=None, max_examples=100)
@given(EPISODES, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 120)))
def test_micro_batches_keep_episodes_whole_and_the_bound(episodes, size, max_tokens):
    rows = [row for row, lengths in enumerate(episodes) for _ in lengths]
    lengths = [length for episode in episodes for length in episode]
    groups = [
        group.tolist()
        for group in micro_batches_of_episodes(
            torch.tensor(lengths, dtype=torch.long),
            torch.tensor(rows, dtype=torch.long),
            size,
            max_tokens,
        )
    ]
    assert sorted(row for group in groups for row in group) == list(range(len(episodes)))

    def fits(group: list[int]) -> bool:
        contexts = [length for row in group for length in episodes[row]]
        if max_tokens is None:
            return len(contexts) <= size
        return len(contexts) * max(contexts) <= max_tokens

    for group in groups:
        assert fits(group) or len(group) == 1
    for left, right in itertools.pairwise(groups):
        assert not fits([*left, right[0]])
