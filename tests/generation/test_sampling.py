"""Sampling rules against transformers, and the noise against its distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.gumbel import gumbel_noise, noise_keys

from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.sampling import (
    Workspace,
    _fold_halves,
    _xor_shift,
    choose_tokens,
    penalise_repetition,
    token_log_probs,
)

EULER_GAMMA = 0.5772156649


def keys_of(rows: int, positions: int = 1, seed: int = 0) -> torch.Tensor:
    return noise_keys(seed, np.zeros(rows, dtype=np.int64), np.arange(rows), positions)


def workspace(logits: torch.Tensor) -> Workspace:
    return Workspace(*logits.shape, dtype=logits.dtype, device=logits.device)


def drawn_from(logits: torch.Tensor, keys: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return choose_tokens(logits, keys, params, workspace(logits))


def noise(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return gumbel_noise(keys_of(rows, seed=seed)[:, 0], vocab_size)


class TestNoise:
    def test_is_standard_gumbel(self):
        values = noise(400, 1000).double().flatten()
        count = len(values)
        assert values.mean() == pytest.approx(EULER_GAMMA, abs=5 * math.pi / math.sqrt(6 * count))
        assert values.var() == pytest.approx(math.pi**2 / 6, rel=0.02)
        # Kolmogorov-Smirnov: below 1.95 / sqrt(n) with probability 0.999.
        uniform = torch.exp(-torch.exp(-values)).sort().values
        ideal = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        assert (uniform - ideal).abs().max() < 1.95 / math.sqrt(count)

    def test_the_tail_that_makes_a_token_win_is_there(self):
        """The largest of n draws is about log(n) + gamma; a coarse uniform would limit it."""
        largest = noise(2000, 1000).max(dim=1).values.double()
        assert largest.mean() == pytest.approx(
            math.log(1000) + EULER_GAMMA, abs=5 * 1.2825 / math.sqrt(2000)
        )
        assert torch.isfinite(noise(2000, 1000)).all()

    @pytest.mark.parametrize("lag", [1, 2, 64])
    def test_neighbouring_tokens_are_independent(self, lag):
        uniform = torch.exp(-torch.exp(-noise(400, 1000).double())) - 0.5
        in_columns = uniform[:, lag:] * uniform[:, :-lag]
        in_rows = uniform[lag:] * uniform[:-lag]
        for product in (in_columns, in_rows):
            correlation = 12 * product.mean()
            assert abs(correlation) < 5 / math.sqrt(product.numel())

    def test_is_finite_at_both_ends(self):
        """The last 64 of 2^31 steps round up to 1 in float32.

        Once in 3e7 draws no token could be drawn.
        """
        # token 0 gets the last step and the first
        keys = torch.tensor([[-599296117, 0], [0, 0]], dtype=torch.int32)
        last, first = gumbel_noise(keys, 1)[:, 0].tolist()
        assert last == pytest.approx(-math.log(24 * math.log(2)), abs=1e-3)  # of 1 - 2^-24
        assert first == pytest.approx(32 * math.log(2), abs=1e-3)  # of 2^-32

    def test_depends_on_the_key_alone(self):
        keys = keys_of(6, 3)
        together = gumbel_noise(keys.reshape(-1, 2), 50)
        for row in range(18):
            alone = gumbel_noise(keys.reshape(-1, 2)[row : row + 1], 50)
            assert torch.equal(alone[0], together[row])
        # nor does the noise depend on the vocabulary size
        assert torch.equal(gumbel_noise(keys.reshape(-1, 2), 20), together[:, :20])

    def test_does_not_touch_the_keys_or_any_generator(self):
        keys = keys_of(4)[:, 0]
        before = keys.clone()
        state = torch.get_rng_state()
        numpy_state = np.random.get_state()[1].copy()
        gumbel_noise(keys, 10)
        assert torch.equal(keys, before)
        assert torch.equal(torch.get_rng_state(), state)
        assert (np.random.get_state()[1] == numpy_state).all()


class TestKeys:
    def test_all_differ(self):
        ids = np.arange(20)
        keys = []
        for seed in (0, 1, 2, 2**40, -1, 12345678901234567890):
            of_seed = noise_keys(seed, ids.repeat(20), np.tile(ids, 20), 10)
            keys.append(of_seed.reshape(-1, 2))
        all_keys = torch.cat(keys)
        assert len(torch.unique(all_keys, dim=0)) == len(all_keys) == 6 * 20 * 20 * 10

    def test_do_not_depend_on_the_batch_or_the_number_of_positions(self):
        many = noise_keys(5, np.array([3, 9, 4]), np.array([0, 1, 7]), 10)
        alone = noise_keys(5, np.array([9]), np.array([1]), 4)
        assert torch.equal(alone[0], many[1, :4])

    def test_keys_are_pinned(self):
        """Changing the hash would change all runs with a given seed."""
        assert noise_keys(1234, np.array([7]), np.array([3]), 2).tolist() == PINNED_KEYS

    def test_noise_of_related_keys_is_uncorrelated(self):
        """Neighbouring seeds, prompts, samples and positions differ in one or two bits."""
        keys = noise_keys(6, np.array([10]), np.array([4]), 1)[:, 0]
        base = gumbel_noise(keys, 20000)[0]

        def key_of(seed: int, prompt: int, sample: int, step: int) -> torch.Tensor:
            return noise_keys(seed, np.array([prompt]), np.array([sample]), step + 1)[:, step]

        related = [
            key_of(7, 10, 4, 0),
            key_of(6, 11, 4, 0),
            key_of(6, 4, 10, 0),
            key_of(6, 10, 5, 0),
            key_of(6, 10, 4, 1),
        ]
        for key in related:
            pair = torch.stack((base, gumbel_noise(key, 20000)[0]))
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(20000)


PINNED_KEYS = [[[-2118591001, -870940077], [1263410866, -1142391009]]]

LOGITS = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2


def theirs(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """Return the distribution from which transformers would sample."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(float(params.temperature))(None, logits)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_k": 1},
        {"top_k": 100},
        {"top_p": 0.7},
        {"top_p": 0.1},
        {"top_p": 0.01},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_frequencies_equal_the_distribution_of_transformers(options):
    params = SamplingParams(max_length=1, **options)
    draws = 20000
    expected = theirs(params, LOGITS[None])[0]
    tokens = drawn_from(LOGITS.expand(draws, -1), keys_of(draws)[:, 0], params)
    frequencies = torch.bincount(tokens, minlength=12) / draws
    assert (frequencies[expected == 0] == 0).all()
    assert (frequencies[expected > 0.001] > 0).all()
    bound = 5 * torch.sqrt(expected * (1 - expected) / draws) + 1e-6
    assert ((frequencies - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("tokens", "top_p", "kept"),
    [(2, 0.5, 1), (2, 0.5000001, 2), (4, 0.25, 1), (4, 0.5, 2), (4, 0.75, 3), (8, 0.125, 1)],
)
def test_top_p_that_is_reached_exactly_keeps_no_further_token(tokens, top_p, kept):
    """Equally likely tokens, with sums that are exact in float32, beside impossible tokens.

    The kept set equals transformers'.
    """
    logits = torch.cat((torch.zeros(1, tokens), torch.full((1, 3), -math.inf)), dim=1)
    params = SamplingParams(max_length=1, top_p=top_p)
    assert int((theirs(params, logits) > 0).sum()) == kept
    drawn = drawn_from(logits.expand(500, -1), keys_of(500)[:, 0], params)
    assert len(set(drawn.tolist())) == kept  # the choice among equal tokens is open


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options", [{"top_k": 7}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.6}], ids=str
)
def test_kept_sets_equal_transformers(options, seed):
    """Sample rows of many shapes at once.

    The drawn tokens of each row must cover its kept set and never leave it.
    """
    params = SamplingParams(max_length=1, temperature=1.3, **options)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 40, generator=generator) * torch.linspace(0.1, 4, 8)[:, None]
    kept = theirs(params, logits) > 0
    keys = keys_of(8 * 300, seed=seed)[:, 0]
    tokens = drawn_from(logits.repeat_interleave(300, dim=0), keys, params).view(8, 300)
    assert kept.gather(1, tokens).all()
    likely = theirs(params, logits) > 0.04
    for row in range(8):
        assert set(likely[row].nonzero()[:, 0].tolist()) <= set(tokens[row].tolist())


def test_greedy_takes_the_likeliest_whatever_else_is_set():
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_length=1, use_greedy=True, temperature=5.0, top_k=3, top_p=0.5)
    assert torch.equal(drawn_from(logits, keys_of(50)[:, 0], params), logits.argmax(dim=1))


def test_banned_tokens_are_never_drawn():
    logits = LOGITS.clone()
    logits[LOGITS.argmax()] = float("-inf")
    for options in ({}, {"top_k": 11}, {"top_p": 0.99}, {"temperature": 10.0}):
        tokens = drawn_from(
            logits.expand(3000, -1), keys_of(3000)[:, 0], SamplingParams(max_length=1, **options)
        )
        assert int(LOGITS.argmax()) not in tokens.tolist()


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_repetition_penalty_equals_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 30, generator=generator)
    earlier = torch.randint(0, 30, (5, 12), generator=generator)
    seen = torch.zeros(5, 30, dtype=torch.bool).scatter(1, earlier, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(earlier, logits)
    assert torch.equal(penalise_repetition(logits, seen, penalty), expected)


def test_log_probs_are_at_the_temperature():
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.arange(6)
    expected = torch.log_softmax(logits / 0.7, dim=-1)[torch.arange(6), tokens]
    torch.testing.assert_close(token_log_probs(logits, tokens, 0.7, workspace(logits)), expected)


def test_bits_are_mixed_on_a_gpu_as_on_a_cpu():
    """A GPU uses half-words in place instead of a shift, a mask and an exclusive or."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 1001), dtype=torch.int32, generator=generator)
    folded = bits.clone()
    _fold_halves(folded)
    _xor_shift(bits, torch.empty_like(bits), 16)
    assert torch.equal(folded, bits)
