"""How a call is divided into forward passes and dealt to copies of the model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.models import tiny_llama_folder

from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model.reward_head import RewardHead
from reinforce_rl.reward_model.scorer import Batching, MegatronRewardModel, load_trunk, share

CUTS = [
    Batching(1),
    Batching(5),
    Batching(64),
    Batching(8, 100),
    Batching(8, 100, 16),
    Batching(3, None, 7),
]


def some_sequences(count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, longest, count)
    return [rng.integers(1, 60, length).tolist() for length in lengths]


@pytest.mark.parametrize("batching", CUTS)
@pytest.mark.parametrize("count", [0, 1, 30])
def test_every_sequence_is_in_one_pass_unchanged(batching, count):
    sequences = some_sequences(count)
    tokens_of_rows: dict[int, list[int]] = {}
    for micro_batch in batching.plan(sequences):
        assert micro_batch.tokens.dtype == np.int64
        assert micro_batch.lengths.dtype == np.int64
        assert micro_batch.rows.dtype == np.int64
        assert micro_batch.tokens.shape[1] % batching.pad_to_multiple == 0
        assert micro_batch.tokens.shape[1] - micro_batch.lengths.max() < batching.pad_to_multiple
        if batching.tokens_per_micro_batch is None:
            assert len(micro_batch.rows) <= batching.micro_batch_size
        else:
            is_within = micro_batch.tokens.size <= batching.tokens_per_micro_batch
            assert is_within or len(micro_batch.rows) == 1
        triples = zip(
            micro_batch.rows.tolist(),
            micro_batch.tokens.tolist(),
            micro_batch.lengths.tolist(),
            strict=True,
        )
        for row, tokens, length in triples:
            assert row not in tokens_of_rows
            tokens_of_rows[row] = tokens[:length]
            assert not any(tokens[length:])
    assert [tokens_of_rows[row] for row in range(count)] == sequences


def test_passes_hold_sequences_of_like_length():
    micro_batches = Batching(4).plan(some_sequences(30))
    widths = [
        (micro_batch.lengths.min(), micro_batch.lengths.max()) for micro_batch in micro_batches
    ]
    for this, following in itertools.pairwise(widths):
        assert this[0] >= following[1]


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
def test_passes_are_dealt_once_and_evenly(blocks):
    passes = Batching(8, 64).plan(some_sequences(60))
    dealt = share(passes, blocks)
    expected = list(range(len(passes)))
    assert sorted(index for local_passes in dealt for index in local_passes) == expected
    loads = [sum(passes[index].tokens.size for index in local_passes) for local_passes in dealt]
    largest = max(micro_batch.tokens.size for micro_batch in passes)
    fair = max(sum(loads) / blocks, largest)
    assert max(loads) <= 4 / 3 * fair


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_scores_do_not_depend_on_the_batching(pooling, tmp_path, mesh: Mesh):
    lm = load_trunk(tiny_llama_folder(tmp_path), mesh)
    weight = torch.randn(32, generator=torch.Generator().manual_seed(0))
    head = RewardHead(weight, torch.tensor(0.5), pooling)
    sequences = some_sequences(30)
    expected = MegatronRewardModel(lm, head, batching=Batching(1)).score(sequences)
    assert np.std(expected) > 0.1
    for batching in CUTS[1:]:
        scores = MegatronRewardModel(lm, head, batching=batching).score(sequences)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        assert MegatronRewardModel(lm, head, batching=batching).score(sequences) == scores
