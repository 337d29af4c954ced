"""Training a reward head: the maths on made features, and the data with its faults."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers.tiny_tokenizer import write_tiny_tokenizer

from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError, DataError
from reinforce_rl.megatron.model.reward_head import pool
from reinforce_rl.reward_model.head.features import CutSequence, load_features, pooled_features, save_features
from reinforce_rl.reward_model.head.synthetic_negatives import degenerate_answers
from reinforce_rl.reward_model.head.training import (
    PairFeatures,
    cross_validate,
    fit_direction,
    head_accuracy,
    pair_accuracy,
    scores,
    train_head,
)
from reinforce_rl.reward_model.pairs import (
    SKIP_LIMIT,
    SKIP_MULTI_TURN,
    SKIP_SAME,
    EncodedPair,
    encode_pairs,
    left_out,
    read_pairs,
    split_by_prompt,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def made_features(pairs: int, width: int = 16, noise: float = 0.5, seed: int = 0) -> tuple[PairFeatures, torch.Tensor]:
    """Pairs whose preference follows from a known direction, and that direction."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(width, generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    first, second = (torch.randn(pairs, width, generator=generator, dtype=torch.float64) + 5 for _ in range(2))
    margin = (first - second) @ direction + noise * torch.randn(pairs, generator=generator, dtype=torch.float64)
    better = (margin > 0)[:, None]
    chosen, rejected = torch.where(better, first, second), torch.where(better, second, first)
    return PairFeatures(chosen, rejected, tuple(f"prompt {i // 2}" for i in range(pairs))), direction


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# The maths


def test_a_known_direction_is_recovered():
    features, direction = made_features(2000)
    trained = train_head(features, "mean")
    cosine = torch.nn.functional.cosine_similarity(trained.head.weight.double(), direction, dim=0)
    assert cosine > 0.98
    fresh, _ = made_features(2000, seed=0)
    assert head_accuracy(trained.head, fresh).value > 0.85


def test_scores_over_the_training_answers_are_standardised():
    features, _ = made_features(300)
    trained = train_head(features, "last")
    values = scores(trained.head, torch.cat((features.chosen, features.rejected)))
    assert float(values.mean()) == pytest.approx(0, abs=1e-4)
    assert float(values.std()) == pytest.approx(1, abs=1e-4)
    assert trained.head.pooling == "last"


def test_standardising_keeps_the_log_odds():
    features, _ = made_features(300)
    trained = train_head(features, "mean", l2_grid=[0.01])
    difference = (features.chosen - features.rejected).double()
    size = difference.square().sum(1).mean().sqrt()
    log_odds = difference @ (fit_direction(difference / size, 0.01) / size)
    ours = (scores(trained.head, features.chosen) - scores(trained.head, features.rejected)) * trained.raw_std
    torch.testing.assert_close(ours, log_odds, atol=1e-4, rtol=1e-4)


def test_the_minimum_is_a_minimum():
    features, _ = made_features(100)
    differences = (features.chosen - features.rejected).double()
    w = fit_direction(differences, 0.1).requires_grad_()
    loss = torch.nn.functional.softplus(-(differences @ w)).mean() + 0.05 * w.dot(w)
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.abs().max() < 1e-6


def test_training_is_deterministic_and_blind_to_the_order_of_pairs():
    features, _ = made_features(200)
    turned = PairFeatures(features.chosen.flip(0), features.rejected.flip(0), features.keys[::-1])
    first, again, other = (train_head(part, "mean") for part in (features, features, turned))
    assert torch.equal(first.head.weight, again.head.weight)
    torch.testing.assert_close(first.head.weight, other.head.weight, atol=1e-5, rtol=1e-4)


def test_noise_gets_more_regularisation_than_signal():
    signal, _ = made_features(120, noise=0.01)
    generator = torch.Generator().manual_seed(1)
    noise = PairFeatures(*(torch.randn(120, 16, generator=generator) for _ in range(2)), signal.keys)
    assert train_head(noise, "mean").l2 > train_head(signal, "mean").l2
    assert train_head(noise, "mean").chosen_validation.loss == pytest.approx(math.log(2), abs=0.05)


def test_extra_pairs_are_learnt_but_not_measured():
    features, direction = made_features(400)
    away = torch.zeros(16, dtype=torch.float64)
    away[0] = 1  # a region that no pair shows, and that the preferred direction leans to
    bad = features.chosen.mean(0) + 20 * (away - direction[0] * direction) + 2 * direction
    extra = PairFeatures(features.chosen, bad.expand(400, 16), features.keys)
    plain, taught = train_head(features, "mean"), train_head(features, "mean", extra=extra)
    assert head_accuracy(plain.head, extra).value < 0.5
    assert head_accuracy(taught.head, extra).value > 0.95
    assert head_accuracy(taught.head, features).value > 0.8
    # The extra pairs are many and of one mind against the pairs: they win the fit, and the pairs alone are measured.
    against = PairFeatures(*(part.repeat(5, 1) for part in (features.rejected, features.chosen)), features.keys * 5)
    assert cross_validate(features, [0.01], folds=3, seed=0, extra=against)[0.01].accuracy < 0.2
    values = scores(taught.head, torch.cat((features.chosen, features.rejected)))
    assert float(values.std()) == pytest.approx(1, abs=1e-4)


def test_accuracy_counts_ties_half():
    accuracy = pair_accuracy(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 2.0, 1.0, 1.0]))
    assert accuracy.value == pytest.approx(0.625)
    assert accuracy.count == 4
    assert accuracy.standard_error == pytest.approx(math.sqrt(0.171875 / 4))


def test_unusable_features_are_refused():
    features, _ = made_features(10)
    with pytest.raises(DataError, match="not finite"):
        PairFeatures(features.chosen * float("nan"), features.rejected, features.keys)
    with pytest.raises(DataError, match="same features"):
        train_head(PairFeatures(features.chosen, features.chosen, features.keys), "mean", l2_grid=[0.1])
    with pytest.raises(DataError, match="too few for 5 folds"):
        train_head(PairFeatures(features.chosen[:2], features.rejected[:2], features.keys[:2]), "mean")
    with pytest.raises(ConfigError, match="above 0"):
        fit_direction(features.chosen, 0.0)


# Splitting and reading


def test_no_prompt_is_on_both_sides():
    keys = [f"prompt {i % 60}" for i in range(200)]
    train, held_out = split_by_prompt(keys, 0.25, seed=3)
    assert sorted(train + held_out) == list(range(200))
    assert not {keys[i] for i in train} & {keys[i] for i in held_out}
    assert 0.1 < len(held_out) / 200 < 0.45
    assert split_by_prompt(keys, 0.25, seed=4) != (train, held_out)


def test_a_held_out_prompt_stays_held_out_when_pairs_are_added():
    keys = [f"prompt {i}" for i in range(50)]
    before = {keys[i] for i in split_by_prompt(keys, 0.3, 0)[1]}
    longer = ["new 1", *keys, "new 2"]
    after = {longer[i] for i in split_by_prompt(longer, 0.3, 0)[1]}
    assert before == after - {"new 1", "new 2"}


def test_prompts_that_differ_in_case_and_space_are_one(tmp_path):
    rows = [
        {"prompt": "\n\nHuman: How  are you?\n\nAssistant:", "chosen": "a", "rejected": "b"},
        {"prompt": "how are YOU?", "chosen": "c", "rejected": "d"},
        {"messages": [{"role": "user", "content": "How are you?"}], "chosen": "e", "rejected": "f"},
    ]
    pairs = read_pairs(write_lines(tmp_path / "pairs.jsonl", *rows))
    assert len({pair.prompt_key for pair in pairs}) == 1


def test_bad_lines_are_named_and_counted(tmp_path):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    bad = [
        "{broken",
        {"prompt": "p", "chosen": "a"},
        {"prompt": 3, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": ["a"], "rejected": "b"},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {"prompt": "\n\nHuman: a\n\nAssistant: b", "chosen": "a", "rejected": "b"},
        {"prompt": [{"role": "robot", "content": "x"}], "chosen": "a", "rejected": "b"},
        {"chosen": "a", "rejected": "b"},
        {"prompt": "\ud800", "chosen": "a", "rejected": "b"},
        *[{}] * 5,
    ]
    path = write_lines(tmp_path / "pairs.jsonl", good, *bad)
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    text = str(caught.value)
    assert text.startswith("14 lines")
    assert "... and 4 more" in text
    reasons = [
        "not valid JSON",
        "the key rejected is missing",
        "prompt is a number",
        "chosen is a list",
        "prompt is empty",
        "ends with an assistant message",
        "role system, user or assistant",
        "the key prompt is missing",
        "half of a surrogate pair",
    ]
    for number, reason in enumerate(reasons, 2):
        line = next(row for row in text.splitlines() if f"{path}:{number}:" in row)
        assert reason in line


def test_an_empty_or_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no line"):
        read_pairs(write_lines(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read_pairs(tmp_path / "none.jsonl")


def test_pairs_that_do_not_fit_are_counted(tmp_path, tokenizer):
    two_turns = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    path = write_lines(
        tmp_path / "pairs.jsonl",
        {"prompt": "one", "chosen": "yes", "rejected": "no"},
        {"prompt": "two", "chosen": "same ", "rejected": "same"},
        {"prompt": "three", "chosen": "x" * 50, "rejected": "no"},
        {"prompt": two_turns, "chosen": "yes", "rejected": "no"},
        {"prompt": "four", "chosen": "yes", "rejected": "no"},
    )
    pairs = read_pairs(path)
    encoded = encode_pairs(pairs, tokenizer, max_length=30, max_pairs=1, single_turn_only=True)
    assert len(encoded.pairs) == 1
    too_long = "62 to 62 tokens, above data.max_length=30; data.max_length=62 keeps all"
    assert encoded.skipped == {SKIP_SAME: 1, too_long: 1, SKIP_MULTI_TURN: 1, SKIP_LIMIT: 1}
    assert left_out(encoded.skipped, 5) == [
        f"WARNING: 1 of 5 (20%) left out: {SKIP_SAME}",
        f"  1 of 5 (20%) left out: {SKIP_MULTI_TURN}",
        f"WARNING: 1 of 5 (20%) left out: {too_long}",
        f"  1 of 5 (20%) left out: {SKIP_LIMIT}",
    ]
    assert left_out({too_long: 1}, 10) == [f"  1 of 10 (10%) left out: {too_long}"], "no more than a tenth"
    assert len(encode_pairs(pairs, tokenizer, max_length=62).pairs) == 4, "the remedy is one"
    cut = encode_pairs(pairs, tokenizer, max_length=30, max_answer_tokens=10)
    assert too_long not in cut.skipped
    with pytest.raises(DataError, match="none of 5 pairs"):
        encode_pairs(pairs, tokenizer, max_length=3)


# Features


def test_cuts_of_one_pass_equal_passes_over_the_cut_sequences():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(20, 8, generator=generator)

    def causal(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(table[tokens], dim=1).sin()

    sequences = [CutSequence((1, 2, 3, 4, 5), (5, 2)), CutSequence((6, 7), (2,)), CutSequence((8, 9, 10), (1, 3))]
    seen: list[int] = []
    features = pooled_features(causal, sequences, ("mean", "last"), micro_batch_size=2, on_progress=seen.append)
    assert sum(seen) == 10
    for pooling, values in features.items():
        row = 0
        for sequence in sequences:
            for cut in sequence.cuts:
                alone = causal(torch.tensor([sequence.tokens[:cut]]))
                torch.testing.assert_close(values[row], pool(alone, torch.tensor([cut]), pooling)[0])
                row += 1
        assert row == len(values)


def test_cached_features_are_only_used_for_the_same_data(tmp_path):
    path = tmp_path / "cache" / "features.safetensors"
    assert load_features(path, "a") is None
    save_features(path, {"mean": torch.ones(2, 3)}, "a")
    loaded = load_features(path, "a")
    assert loaded is not None and torch.equal(loaded["mean"], torch.ones(2, 3))
    assert load_features(path, "b") is None


def test_degenerate_answers_end_early_or_repeat():
    pairs = [EncodedPair(str(i), (9,), (10, 11, 12, 13, 2), (20, 21, 2)) for i in range(40)]
    made = degenerate_answers(pairs, 0.5, end_id=2, min_tokens=8, max_tokens=12, seed=0)
    early, repeated = ([m.tokens for m in made if (m.tokens[-1] == 2) == is_early] for is_early in (True, False))
    assert len(early) == len(repeated) == 20
    assert all(len(tokens) <= 4 and tokens.count(2) == 1 for tokens in early)
    assert (2,) in early
    assert all(8 <= len(tokens) <= 12 and len(set(tokens)) <= 4 and 2 not in tokens for tokens in repeated)
    assert sum(m.better for m in made) == 20
    assert made == degenerate_answers(pairs, 0.5, end_id=2, min_tokens=8, max_tokens=12, seed=0)
