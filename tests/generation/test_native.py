"""The native engine against transformers' `generate`.

A sample depends on its key only.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.errors import raises_error
from helpers.flash import decode_statically
from helpers.gumbel import gumbel_noise, noise_keys
from helpers.models import smollm2_folder, tiny_llama_folder
from helpers.policies import (
    megatron_model,
    random_prompts,
    response_log_probs,
    transformers_model,
)
from helpers.ranks import call_on_ranks

from reinforce_rl.data.batches import Prompt, join_prompts_and_responses
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.model import model as model_module

EOS = 2


def prompt_of(index: int, tokens: list[int]) -> Prompt:
    return Prompt(index, "", tuple(tokens))


@pytest.fixture(scope="module")
def engine(lm, folder):
    return NativeGenerator(lm, load_tokenizer(folder))


def rows_of(completions) -> list[tuple[list[int], str, list[float]]]:
    """Return each row's tokens, finish reason and log-probs without padding."""
    lengths = completions.lengths.tolist()
    tokens = [row[:n] for row, n in zip(completions.tokens.tolist(), lengths, strict=True)]
    log_probs = [row[:n] for row, n in zip(completions.log_probs.tolist(), lengths, strict=True)]
    return list(zip(tokens, completions.finish_reasons, log_probs, strict=True))


def texts_of(completions) -> list[tuple[list[int], str]]:
    return [(tokens, reason) for tokens, reason, _ in rows_of(completions)]


def greedy_of_transformers(model, prompts, **options) -> list[list[int]]:
    """Generate for one prompt at a time, so that transformers needs no padding."""
    responses = []
    for prompt in prompts:
        tokens = torch.tensor([prompt.tokens])
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        responses.append(out[0, len(prompt.tokens) :].tolist())
    return responses


class TestGreedy:
    @pytest.mark.parametrize("penalty", [1.0, 1.5])
    def test_tiny_model_equals_transformers(self, penalty, engine, folder, prompts):
        params = SamplingParams(max_length=20, use_greedy=True, repetition_penalty=penalty)
        free = texts_of(engine.generate(prompts, 1, params, seed=0))
        stops = (EOS, free[0][0][3], free[1][0][10])  # some rows end early, at different tokens
        completions = engine.generate(prompts, 1, replace(params, stop_token_ids=stops), seed=0)
        texts = texts_of(completions)
        model = transformers_model(folder, torch.float64)
        expected = greedy_of_transformers(
            model, prompts, max_new_tokens=20, eos_token_id=list(stops), repetition_penalty=penalty
        )
        assert [tokens for tokens, _ in texts] == expected
        assert [reason for _, reason in texts] == [
            "stop" if t[-1] in stops else "length" for t in expected
        ]
        # otherwise no row would have left the batch early
        lengths = {len(tokens) for tokens in expected}
        assert len(lengths) > 1

    @pytest.mark.slow
    def test_real_weights_equal_transformers(self, mesh):
        """Eight prompts of unequal length in one batch."""
        folder = smollm2_folder()
        tokenizer = load_tokenizer(folder)
        texts = [
            "Hi",
            "Write one sentence about the sea.",
            "What is the capital of France, and what is it known for?",
            "List three kinds of tree.",
            (
                "My neighbour is loud at night. Please help me to write a short and polite note to "
                "him about it."
            ),
            "2 + 2 =",
            "Why is the sky blue?",
            "Say no more than one word.",
        ]
        chats = [[{"role": "user", "content": text}] for text in texts]
        rendered = [
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
            for c in chats
        ]
        prompts = [prompt_of(i, tokenizer(str(text)).input_ids) for i, text in enumerate(rendered)]
        lengths = {len(prompt.tokens) for prompt in prompts}
        assert len(lengths) > 4
        lm = megatron_model(folder, mesh)
        params = SamplingParams(
            max_length=24, use_greedy=True, stop_token_ids=(tokenizer.eos_token_id,)
        )
        completions = NativeGenerator(lm, tokenizer).generate(prompts, 1, params, seed=0)
        responses = texts_of(completions)
        expected = greedy_of_transformers(
            transformers_model(folder),
            prompts,
            max_new_tokens=24,
            eos_token_id=tokenizer.eos_token_id,
        )
        assert [tokens for tokens, _ in responses] == expected


class TestSamplesDependOnTheirKeysAlone:
    PARAMS = SamplingParams(max_length=16, stop_token_ids=(EOS, 5, 6, 7, 8, 9, 10, 11))

    @pytest.fixture(scope="class")
    def together(self, engine, prompts):
        rows = rows_of(engine.generate(prompts, 4, self.PARAMS, seed=3))
        lengths = [len(tokens) for tokens, _, _ in rows]
        # Many rows leave the batch, at different steps.
        assert min(lengths) <= 4 < 12 < max(lengths)
        return rows

    def assert_same(self, rows, other):
        expected = [row[:2] for row in other]
        assert [row[:2] for row in rows] == expected
        for (_, _, mine), (_, _, others) in zip(rows, other, strict=True):
            assert mine == pytest.approx(others, abs=1e-6)

    def test_alone(self, engine, prompts, together):
        for i, prompt in enumerate(prompts):
            completions = engine.generate([prompt], 4, self.PARAMS, seed=3)
            self.assert_same(
                rows_of(completions),
                together[4 * i : 4 * i + 4],
            )

    def test_in_another_order_with_another_padding(self, engine, prompts, together):
        order = [3, 0, 2]
        completions = engine.generate([prompts[i] for i in order], 4, self.PARAMS, seed=3)
        reordered = rows_of(completions)
        self.assert_same(reordered, [row for i in order for row in together[4 * i : 4 * i + 4]])

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_fewer_samples_are_the_first_of_more(self, count, engine, prompts, together):
        fewer = rows_of(engine.generate(prompts, count, self.PARAMS, seed=3))
        first = [row for i in range(5) for row in together[4 * i : 4 * i + count]]
        self.assert_same(fewer, first)

    @pytest.mark.parametrize("max_tokens", [1, 40, 75, 120, 10**6])
    def test_with_a_bound_on_the_cache(self, max_tokens, lm, folder, prompts, together):
        """From one sample at a time to all of them; samples that end make room for others."""
        engine = NativeGenerator(lm, load_tokenizer(folder), max_tokens)
        completions = engine.generate(prompts, 4, self.PARAMS, seed=3)
        self.assert_same(rows_of(completions), together)
        some = replace(
            self.PARAMS, min_length=6, repetition_penalty=1.3, end_strings=("e",), temperature=0.8
        )
        unbounded = NativeGenerator(lm, load_tokenizer(folder)).generate(prompts, 4, some, seed=4)
        rows = rows_of(engine.generate(prompts, 4, some, seed=4))
        self.assert_same(rows, rows_of(unbounded))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_through_megatrons_own_layers(self, dtype, folder, mesh, prompts, monkeypatch):
        """The tokens are equal in float64.

        With this model they are equal in float32 too, from weights that oneDNN has packed.
        """
        model = megatron_model(folder, mesh, dtype)
        steps = []
        decode = model_module.decode_layers
        monkeypatch.setattr(
            model_module, "decode_layers", lambda *args: steps.append(1) or decode(*args)
        )
        drawn = {}
        for is_lean in (True, False):
            made = NativeGenerator(model, load_tokenizer(folder), is_lean=is_lean)
            completions = made.generate(prompts, 4, self.PARAMS, seed=3)
            drawn[is_lean] = rows_of(completions), len(steps)
            steps.clear()
        assert drawn[True][1] > 0 == drawn[False][1]
        for (tokens, reason, mine), other in zip(
            *(rows for rows, _ in drawn.values()), strict=True
        ):
            assert (tokens, reason) == other[:2]
            assert mine == pytest.approx(other[2], abs=1e-5)

    def test_when_no_response_finishes_early(self, engine, prompts, together):
        """Without stop tokens each response begins with the response that has them."""
        completions = engine.generate(prompts, 4, replace(self.PARAMS, stop_token_ids=()), seed=3)
        unstopped = rows_of(completions)
        for (tokens, _, _), (longer, reason, _) in zip(together, unstopped, strict=True):
            assert longer[: len(tokens)] == tokens
            assert len(longer) == 16
            assert reason == "length"

    def test_a_smaller_limit_cuts_only(self, engine, prompts, together):
        completions = engine.generate(prompts, 4, replace(self.PARAMS, max_length=5), seed=3)
        shorter = rows_of(completions)
        expected = [tokens[:5] for tokens, _, _ in together]
        assert [tokens for tokens, _, _ in shorter] == expected

    def test_seed_prompt_and_sample_make_a_difference(self, engine, prompts, together):
        tokens = [tokens for tokens, _, _ in together]
        assert len({tuple(t) for t in tokens}) > 15
        completions = engine.generate(prompts, 4, self.PARAMS, seed=4)
        assert [t for t, _ in texts_of(completions)] != tokens
        twins = [replace(prompts[0], id=1), replace(prompts[0], id=2)]
        first, second = texts_of(engine.generate(twins, 1, self.PARAMS, seed=3))
        assert first != second

    def test_global_generators_play_no_part(self, engine, prompts, together):
        torch.manual_seed(99)
        state = torch.get_rng_state()
        completions = engine.generate(prompts, 4, self.PARAMS, seed=3)
        self.assert_same(rows_of(completions), together)
        assert torch.equal(torch.get_rng_state(), state)


def test_first_tokens_follow_the_model(engine, folder):
    """Compare token frequencies over many samples of one prompt to transformers' softmax."""
    prompt = prompt_of(0, [9, 21, 33])
    completions = engine.generate(
        [prompt], 4000, SamplingParams(max_length=1, temperature=1.5), seed=1
    )
    tokens = torch.tensor([prompt.tokens])
    logits = transformers_model(folder)(tokens).logits[0, -1].detach()
    expected = torch.softmax(logits / 1.5, dim=-1)
    frequencies = torch.bincount(completions.tokens[:, 0], minlength=63) / 4000
    bounds = 5 * torch.sqrt(expected / 4000) + 1e-3
    assert ((frequencies - expected).abs() < bounds).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_the_training_pass(temperature, engine, lm, prompts):
    params = SamplingParams(max_length=12, temperature=temperature, stop_token_ids=(EOS, 5, 6, 7))
    completions = engine.generate(prompts, 3, params, seed=5)
    sequences, prompt_lengths = join_prompts_and_responses(
        completions.repeat_to_samples(prompts), completions, pad_id=0
    )
    expected = response_log_probs(
        lm,
        lm,
        sequences,
        prompt_lengths,
        completions.lengths,
        temperature=temperature,
        width=completions.tokens.shape[1],
        chunk_tokens=16,
    )
    torch.testing.assert_close(
        completions.log_probs, expected.log_probs.detach().float(), atol=2e-6, rtol=0
    )
    assert completions.log_probs.dtype == torch.float32


class TestEnds:
    def test_every_stop_token_ends_a_response_and_belongs_to_it(self, engine, prompts):
        stops = (EOS, 20, 30, 40, 50)
        completions = engine.generate(
            prompts, 20, SamplingParams(max_length=40, stop_token_ids=stops), seed=0
        )
        ended_by = set()
        for tokens, reason in texts_of(completions):
            assert not set(tokens[:-1]) & set(stops)
            assert (reason == "stop") == (tokens[-1] in stops)
            assert reason == "stop" or len(tokens) == 40
            ended_by.add(tokens[-1])
        assert set(stops) <= ended_by

    def test_without_stop_tokens_all_reach_the_limit(self, engine, prompts):
        completions = engine.generate(prompts, 4, SamplingParams(max_length=9), seed=0)
        assert completions.lengths.tolist() == [9] * 20
        assert completions.finish_reasons == ("length",) * 20

    def test_stop_in_the_last_place_is_a_stop(self, engine, prompts):
        completions = engine.generate(
            prompts, 100, SamplingParams(max_length=1, stop_token_ids=tuple(range(32))), seed=0
        )
        for (token,), reason in texts_of(completions):
            assert reason == ("stop" if token < 32 else "length")

    def test_padding_behind_the_end(self, engine, prompts):
        completions = engine.generate(
            prompts, 8, SamplingParams(max_length=30, stop_token_ids=(20, 30, 40, 50)), seed=0
        )
        assert (
            completions.tokens.shape
            == completions.log_probs.shape
            == (40, int(completions.lengths.max()))
        )
        for row, length in enumerate(completions.lengths.tolist()):
            assert (completions.tokens[row, length:] == 0).all()
            assert (completions.log_probs[row, length:] == 0).all()

    def test_min_length(self, engine, prompts):
        params = SamplingParams(max_length=12, min_length=5, stop_token_ids=tuple(range(4, 40)))
        responses = texts_of(engine.generate(prompts, 20, params, seed=0))
        lengths = {len(tokens) for tokens, _ in responses}
        assert lengths >= {6, 7}
        for tokens, _ in responses:
            assert len(tokens) > 5
            assert not set(tokens[:5]) & set(params.stop_token_ids)

    def test_end_of_sequence_inside_the_prompt_is_not_an_end(self, engine, folder):
        """Chat templates end every turn with it."""
        prompt = prompt_of(0, [9, EOS, 21, EOS])
        params = SamplingParams(max_length=10, use_greedy=True, stop_token_ids=(EOS,))
        completions = engine.generate([prompt], 1, params, seed=0)
        (tokens, _), *_ = texts_of(completions)
        model = transformers_model(folder, torch.float64)
        assert [tokens] == greedy_of_transformers(
            model, [prompt], max_new_tokens=10, eos_token_id=EOS
        )

    def test_end_strings(self, engine, folder, prompts):
        tokenizer = load_tokenizer(folder)
        params = SamplingParams(max_length=40, end_strings=("e", "th", "zzzz"))
        responses = texts_of(engine.generate(prompts, 10, params, seed=0))
        ends = set()
        for tokens, reason in responses:
            text = tokenizer.decode(tokens)
            before = tokenizer.decode(tokens[:-1])
            for end in params.end_strings:
                assert end not in before
            hits = [end for end in params.end_strings if end in text]
            assert reason == ("stop" if hits else "length")
            ends.update(hits)
        assert "e" in ends

    def test_end_strings_end_nothing_before_min_length(self, engine, folder, prompts):
        """Earlier text counts as soon as there are enough tokens, and then ends the response."""
        tokenizer = load_tokenizer(folder)
        ends = ("e", "th")
        completions = engine.generate(prompts, 20, SamplingParams(max_length=20), seed=0)
        free = texts_of(completions)
        params = SamplingParams(max_length=20, min_length=7, end_strings=ends)
        responses = texts_of(engine.generate(prompts, 20, params, seed=0))
        first = []  # per response the length at which it has an end string, or 0
        for (tokens, _), given in zip(free, responses, strict=True):
            texts = [tokenizer.decode(tokens[:length]) for length in range(21)]
            ended = [i for i, text in enumerate(texts) if any(end in text for end in ends)]
            first.append(ended[0] if ended else 0)
            length = max(first[-1], 7) if first[-1] else 20
            expected = (tokens[:length], "stop" if first[-1] else "length")
            assert given == expected
        assert {0 < length < 7 for length in first} == {True, False}
        assert max(first) > 7
        assert 0 in first

    def test_end_string_in_the_prompt_is_not_an_end(self, engine, folder):
        tokenizer = load_tokenizer(folder)
        prompt = prompt_of(0, tokenizer("the").input_ids)
        params = SamplingParams(max_length=6, end_strings=("th", "the", "he"))
        completions = engine.generate([prompt], 20, params, seed=0)
        for tokens, reason in texts_of(completions):
            assert reason == "stop" or len(tokens) == 6
            assert reason == "length" or "h" in tokenizer.decode(tokens)

    def test_end_string_over_several_tokens(self, engine, folder, prompts):
        """The model drew its tokens anyway, so stopping changes nothing before the end."""
        tokenizer = load_tokenizer(folder)
        completions = engine.generate(prompts, 2, SamplingParams(max_length=20), seed=0)
        free = texts_of(completions)
        windows = [(row, start) for row in range(10) for start in range(4, 17)]
        ordinary = []
        for row, start in windows:
            window = free[row][0][start : start + 3]
            if min(window) > 3 and len(set(window)) > 1:
                ordinary.append((row, start))
        row, start = ordinary[0]
        tokens = free[row][0]
        end = tokenizer.decode(tokens[start : start + 3])
        assert len(end) == 3
        params = SamplingParams(max_length=20, end_strings=(end,))
        stopped = texts_of(engine.generate(prompts, 2, params, seed=0))
        length = next(n for n in range(1, 21) if end in tokenizer.decode(tokens[:n]))
        assert stopped[row] == (tokens[:length], "stop")

    def test_too_long_prompt(self, engine, lm):
        limit = lm.architecture.max_positions
        prompt = prompt_of(0, [5] * (limit - 4))
        assert engine.generate(
            [prompt], 1, SamplingParams(max_length=4), seed=0
        ).lengths.tolist() == [4]
        with raises_error("generation.prompt.too_long", limit - 4, 5, f"{limit} positions"):
            engine.generate([prompt], 1, SamplingParams(max_length=5), seed=0)


def test_one_prefill_a_prompt_and_finished_samples_cost_nothing(engine, lm, prompts):
    """Count the positions that the model's forward pass computes."""
    shapes = []
    handle = lm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    try:
        params = SamplingParams(max_length=16, stop_token_ids=tuple(range(4, 16)))
        completions = engine.generate(prompts, 6, params, seed=0)
    finally:
        handle.remove()
    assert shapes[0] == (5, 11)  # five prompts once, not thirty times
    unfinished = [int((completions.lengths > step).sum()) for step in range(1, 16)]
    assert unfinished[0] > unfinished[5] > 0
    # The last token of a response is not read again.
    expected = [(rows, 1) for rows in unfinished if rows]
    assert shapes[1:] == expected


def test_in_float32_tokens_differ_at_near_ties_only(folder, mesh, prompts, engine):
    """Compare with float64, with and without a bound, alone and together.

    The tokens agree up to a position with a near tie.
    """
    lm = megatron_model(folder, mesh)
    params = SamplingParams(max_length=30)
    exact = engine.generate(prompts, 4, params, seed=8)
    bounded = NativeGenerator(lm, load_tokenizer(folder), 100).generate(prompts, 4, params, seed=8)
    free = NativeGenerator(lm, load_tokenizer(folder)).generate(prompts, 4, params, seed=8)
    ties = 0
    for completions in (bounded, free):
        for row, (mine, expected) in enumerate(zip(completions.tokens, exact.tokens, strict=True)):
            different = (mine != expected).nonzero()[:, 0]
            if len(different):
                response = expected[: int(different[0])]
                assert _margin(folder, prompts[row // 4], row % 4, response, seed=8) < 1e-4
                ties += 1
    assert ties <= 2  # of 1200 positions


def _margin(folder, prompt: Prompt, sample: int, response: torch.Tensor, seed: int) -> float:
    """Return the margin between the two best perturbed logits of the next token."""
    tokens = torch.tensor([[*prompt.tokens, *response.tolist()]])
    logits = transformers_model(folder, torch.float64)(tokens).logits[0, -1].detach()
    keys = noise_keys(seed, np.array([prompt.id]), np.array([sample]), len(response) + 1)
    key = keys[:, -1]
    noise = gumbel_noise(key, len(logits))[0]
    first, second = (logits + noise).topk(2).values.tolist()
    return first - second


def test_mode_and_weights_are_left_as_they_were(engine, lm, prompts):
    weights = [p.clone() for p in lm.parameters()]
    for mode in (True, False):
        lm.train(mode)
        engine.generate(prompts, 1, SamplingParams(max_length=2), seed=0)
        assert lm.training is mode
    with raises_error("generation.prompt.too_long", 300):
        lm.train(True)
        engine.generate([prompt_of(0, [5] * 300)], 1, SamplingParams(max_length=2), seed=0)
    assert lm.training is True
    lm.eval()
    for a, b in zip(weights, lm.parameters(), strict=True):
        assert torch.equal(a, b)


def test_new_weights_are_used_at_once(folder, mesh, prompts):
    lm = megatron_model(folder, mesh)
    engine = NativeGenerator(lm, load_tokenizer(folder))
    params = SamplingParams(max_length=8, use_greedy=True)
    before = texts_of(engine.generate(prompts, 1, params, seed=0))
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    engine.refit()
    assert texts_of(engine.generate(prompts, 1, params, seed=0)) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype, folder, mesh, prompts):
    lm = megatron_model(folder, mesh, dtype)
    dtypes = {p.dtype for p in lm.parameters()}
    assert dtypes == {dtype}
    completions = NativeGenerator(lm, load_tokenizer(folder)).generate(
        prompts, 2, SamplingParams(max_length=5), seed=0
    )
    assert completions.log_probs.dtype == torch.float32


def drawn_by_two_ranks(folders):
    """Return tokens, lengths and log-probs by folder; bounded memory changes none."""
    params = TestSamplesDependOnTheirKeysAlone.PARAMS
    prompts = random_prompts(61, (3, 6, 9))
    drawn = []
    with parallel_mesh(2) as mesh:
        for folder in folders:
            lm = megatron_model(folder, mesh, torch.float64)
            tokenizer = load_tokenizer(folder)
            completions = NativeGenerator(lm, tokenizer).generate(prompts, 4, params, seed=3)
            engine = NativeGenerator(lm, tokenizer, max_tokens=60)
            bounded = engine.generate(prompts, 4, params, seed=3)
            assert torch.equal(bounded.tokens, completions.tokens)
            assert torch.equal(bounded.lengths, completions.lengths)
            drawn.append((completions.tokens, completions.lengths, completions.log_probs))
    return drawn


@pytest.mark.slow
def test_two_tensor_parallel_ranks_draw_the_same_tokens(mesh, tmp_path):
    folders = [
        tiny_llama_folder(tmp_path / "odd_vocabulary", logit_scale=2.0, vocab_size=63),
        tiny_llama_folder(
            tmp_path / "odd_groups", logit_scale=2.0, heads=9, groups=3, hidden=36, tied=False
        ),
    ]
    ranks = call_on_ranks(drawn_by_two_ranks, 2, folders)
    for position, folder in enumerate(folders):
        engine = NativeGenerator(
            megatron_model(folder, mesh, torch.float64), load_tokenizer(folder)
        )
        params = TestSamplesDependOnTheirKeysAlone.PARAMS
        expected = engine.generate(random_prompts(61, (3, 6, 9)), 4, params, seed=3)
        for drawn in ranks:
            tokens, lengths, log_probs = drawn[position]
            assert torch.equal(tokens, expected.tokens)
            assert torch.equal(lengths, expected.lengths)
            torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-6, rtol=0)


def test_no_prompts_no_responses(engine):
    completions = engine.generate([], 4, SamplingParams(max_length=5), seed=0)
    assert (
        completions.tokens.shape[0]
        == completions.lengths.numel()
        == len(completions.finish_reasons)
        == 0
    )
    assert completions.tokens.dtype == completions.lengths.dtype == torch.int64


@pytest.mark.parametrize("kind", ["plain", "static"])
def test_watching_shows_each_token_as_it_comes_and_changes_nothing(
    kind, lm, folder, prompts, monkeypatch
):
    params = SamplingParams(max_length=12, stop_token_ids=(EOS, 5, 6), end_strings=("th",))
    engine = NativeGenerator(
        lm, load_tokenizer(folder), 60, is_static=kind == "static", use_graphs=False
    )
    if kind == "static":
        decode_statically(monkeypatch)
    for watched in (params, replace(params, end_strings=())):
        seen: list[list[list[int]]] = []
        completions = engine.generate(prompts, 2, watched, 3, seen.append)
        assert rows_of(completions) == rows_of(engine.generate(prompts, 2, watched, 3))
        expected = [tokens for tokens, _ in texts_of(completions)]
        assert seen[-1] == expected
        for before, now in itertools.pairwise(seen):
            for old, new in zip(before, now, strict=True):
                # a first token comes with its prompt
                assert new[: len(old)] == old
                assert len(new) <= len(old) + 2

    class Enough(Exception):
        pass

    def enough(tokens: list[list[int]]) -> None:
        if max(map(len, tokens)) == 3:
            raise Enough

    lm.train()
    with pytest.raises(Enough):
        engine.generate(prompts, 2, params, 3, enough)
    assert lm.training, "as it was before"
    assert rows_of(engine.generate(prompts, 2, watched, 3)) == rows_of(completions)
