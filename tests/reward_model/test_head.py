"""Features of a frozen trunk, and synthetic negatives."""

from __future__ import annotations

import torch

from reinforce_rl.megatron.model.reward_head import pool
from reinforce_rl.reward_model.data import EncodedPair
from reinforce_rl.reward_model.head import (
    CutSequence,
    load_features,
    pooled_features,
    save_features,
    synthetic_negatives,
)


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


def test_synthetic_negatives_end_early_or_repeat():
    pairs = [EncodedPair(str(i), (9,), (10, 11, 12, 13, 2), (20, 21, 2)) for i in range(40)]
    made = synthetic_negatives(pairs, 0.5, end_id=2, min_tokens=8, max_tokens=12, seed=0)
    early, repeated = ([m.tokens for m in made if (m.tokens[-1] == 2) == is_early] for is_early in (True, False))
    assert len(early) == len(repeated) == 20
    assert all(len(tokens) <= 4 and tokens.count(2) == 1 for tokens in early)
    assert (2,) in early
    assert all(8 <= len(tokens) <= 12 and len(set(tokens)) <= 4 and 2 not in tokens for tokens in repeated)
    assert sum(m.better for m in made) == 20
    assert made == synthetic_negatives(pairs, 0.5, end_id=2, min_tokens=8, max_tokens=12, seed=0)
