"""A reward head: features of a frozen trunk, synthetic negatives, and its fit on made features."""

from __future__ import annotations

import pytest
import torch
from helpers.errors import raises_error
from helpers.full_disk import files_of_at_most

from reinforce_rl.config.reward_model import PrefixesConfig
from reinforce_rl.megatron.model.reward_head import pool
from reinforce_rl.reward_model.data import EncodedPair
from reinforce_rl.reward_model.head import (
    CutSequence,
    PairFeatures,
    fit_direction,
    head_accuracy,
    load_features,
    pooled_features,
    save_features,
    scores,
    synthetic_negatives,
    train_head,
)

L2 = 1e-3


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_cuts_of_one_pass_equal_passes_over_the_cut_sequences(pooling):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(20, 8, generator=generator)

    def causal(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(table[tokens], dim=1).sin()

    sequences = [
        CutSequence((1, 2, 3, 4, 5), (5, 2)),
        CutSequence((6, 7), (2,)),
        CutSequence((8, 9, 10), (1, 3)),
    ]
    seen: list[int] = []
    values = pooled_features(
        causal, sequences, pooling, micro_batch_size=2, on_progress=seen.append
    )
    assert sum(seen) == 10
    row = 0
    for sequence in sequences:
        for cut in sequence.cuts:
            alone = causal(torch.tensor([sequence.tokens[:cut]]))
            expected = pool(alone, torch.tensor([cut]), pooling)[0]
            torch.testing.assert_close(values[row], expected)
            row += 1
    assert row == len(values)


def test_features_that_find_no_space_are_one_message_and_leave_nothing(tmp_path):
    path = tmp_path / "features.safetensors"
    values = (path, "File too large", "GB are free on /")
    with files_of_at_most(1000), raises_error("reward_model.file.not_written", *values):
        save_features(path, torch.ones(100, 30), "a")
    assert list(tmp_path.iterdir()) == []


def test_cached_features_are_only_used_for_the_same_data(tmp_path):
    path = tmp_path / "cache" / "features.safetensors"
    assert load_features(path, "a") is None
    save_features(path, torch.ones(2, 3), "a")
    loaded = load_features(path, "a")
    assert loaded is not None
    assert torch.equal(loaded, torch.ones(2, 3))
    assert load_features(path, "b") is None


def test_synthetic_negatives_end_early_or_repeat():
    pairs = [EncodedPair(str(i), (9,), (10, 11, 12, 13, 2), (20, 21, 2)) for i in range(40)]
    cuts = PrefixesConfig(min_tokens=8, max_tokens=12)
    made = synthetic_negatives(pairs, 0.5, cuts, end=(2,), seed=0)
    early = [m.tokens for m in made if m.tokens[-1] == 2]
    repeated = [m.tokens for m in made if m.tokens[-1] != 2]
    assert len(early) == len(repeated) == 20
    for tokens in early:
        assert len(tokens) <= 4
        assert tokens.count(2) == 1
    assert (2,) in early
    for tokens in repeated:
        assert 8 <= len(tokens) <= 12
        assert len(set(tokens)) <= 4
        assert 2 not in tokens
    assert sum(m.better for m in made) == 20
    assert made == synthetic_negatives(pairs, 0.5, cuts, end=(2,), seed=0)


def made_features(
    pairs: int, width: int = 16, noise: float = 0.5, seed: int = 0
) -> tuple[PairFeatures, torch.Tensor]:
    """Pairs whose preference follows from a known direction, and that direction."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(width, generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    first = torch.randn(pairs, width, generator=generator, dtype=torch.float64) + 5
    second = torch.randn(pairs, width, generator=generator, dtype=torch.float64) + 5
    unit_noise = torch.randn(pairs, generator=generator, dtype=torch.float64)
    margin = (first - second) @ direction + noise * unit_noise
    better = (margin > 0)[:, None]
    chosen = torch.where(better, first, second)
    rejected = torch.where(better, second, first)
    return PairFeatures(chosen, rejected), direction


def test_a_known_direction_is_recovered():
    features, direction = made_features(2000)
    trained = train_head(features, "mean", L2)
    cosine = torch.nn.functional.cosine_similarity(trained.head.weight.double(), direction, dim=0)
    assert cosine > 0.98
    fresh, _ = made_features(2000, seed=0)
    assert head_accuracy(trained.head, fresh).value > 0.85


def test_scores_over_the_training_answers_are_standardised():
    features, _ = made_features(300)
    trained = train_head(features, "last", L2)
    values = scores(trained.head, torch.cat((features.chosen, features.rejected)))
    assert float(values.mean()) == pytest.approx(0, abs=1e-4)
    assert float(values.std()) == pytest.approx(1, abs=1e-4)
    assert trained.head.pooling == "last"


def test_standardising_keeps_the_log_odds():
    features, _ = made_features(300)
    trained = train_head(features, "mean", 0.01)
    difference = (features.chosen - features.rejected).double()
    size = difference.square().sum(1).mean().sqrt()
    log_odds = difference @ (fit_direction(difference / size, 0.01) / size)
    margins = scores(trained.head, features.chosen) - scores(trained.head, features.rejected)
    ours = (margins) * trained.raw_std
    torch.testing.assert_close(ours, log_odds, atol=1e-4, rtol=1e-4)


def test_the_minimum_is_a_minimum():
    features, _ = made_features(100)
    differences = (features.chosen - features.rejected).double()
    w = fit_direction(differences, 0.1).requires_grad_()
    ranking = torch.nn.functional.softplus(-(differences @ w)).mean()
    loss = ranking + 0.05 * w.dot(w)
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.abs().max() < 1e-6


def test_training_is_deterministic_and_blind_to_the_order_of_pairs():
    features, _ = made_features(200)
    turned = PairFeatures(features.chosen.flip(0), features.rejected.flip(0))
    first = train_head(features, "mean", L2)
    again = train_head(features, "mean", L2)
    other = train_head(turned, "mean", L2)
    assert torch.equal(first.head.weight, again.head.weight)
    torch.testing.assert_close(first.head.weight, other.head.weight, atol=1e-5, rtol=1e-4)


def test_extra_pairs_are_learnt_but_not_standardised_by():
    features, direction = made_features(400)
    away = torch.zeros(16, dtype=torch.float64)
    away[0] = 1  # a region without pairs, on the side of the preferred direction
    orthogonal = away - direction[0] * direction
    bad = features.chosen.mean(0) + 20 * orthogonal + 2 * direction
    extra = PairFeatures(features.chosen, bad.expand(400, 16))
    plain = train_head(features, "mean", L2)
    taught = train_head(features, "mean", L2, extra=extra)
    assert head_accuracy(plain.head, extra).value < 0.5
    assert head_accuracy(taught.head, extra).value > 0.95
    assert head_accuracy(taught.head, features).value > 0.8
    # The many extra pairs all contradict the pairs: they dominate the fit.
    chosen = features.chosen.repeat(5, 1)
    rejected = features.rejected.repeat(5, 1)
    against = PairFeatures(rejected, chosen)
    assert head_accuracy(train_head(features, "mean", L2, extra=against).head, features).value < 0.2
    values = scores(taught.head, torch.cat((features.chosen, features.rejected)))
    assert float(values.std()) == pytest.approx(1, abs=1e-4)


def test_unusable_features_are_refused():
    features, _ = made_features(10)
    with raises_error("reward_model.features.not_finite"):
        PairFeatures(features.chosen * float("nan"), features.rejected)
    with raises_error("reward_model.features.all_the_same"):
        train_head(PairFeatures(features.chosen, features.chosen), "mean", L2)
