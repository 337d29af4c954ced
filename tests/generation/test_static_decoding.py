"""Decoding like on a GPU in bf16, with an emulated flash kernel, gives a CPU's samples."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.flash import decode_statically
from helpers.models import tiny_llama_folder
from helpers.policies import megatron_model, random_prompts
from helpers.ranks import call_on_ranks
from helpers.recorded_graphs import stand_in

from reinforce_rl.data.batches import Completions
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native import generator
from reinforce_rl.generation.native.generator import (
    NativeGenerator,
    StaticDecoding,
    can_decode_statically,
    padded_rows,
)
from reinforce_rl.megatron.mesh import parallel_mesh

PARAMS = SamplingParams(max_length=20, stop_token_ids=(2, 5, 6, 7))
KINDS = {
    "stop tokens": PARAMS,
    "no end but the limit": SamplingParams(max_length=20),
    "one token": replace(PARAMS, max_length=1),
    "two tokens": replace(PARAMS, max_length=2),
    "as many as a block": replace(PARAMS, max_length=9),
    "greedy": replace(PARAMS, use_greedy=True),
    "rules": replace(
        PARAMS, min_length=3, repetition_penalty=1.3, temperature=0.8, top_k=20, top_p=0.9
    ),
    "end strings": replace(PARAMS, end_strings=("e", "th"), min_length=2),
}


def assert_same(completions: Completions, expected: Completions) -> None:
    assert torch.equal(completions.tokens, expected.tokens)
    assert torch.equal(completions.lengths, expected.lengths)
    assert completions.finish_reasons == expected.finish_reasons
    assert completions.log_probs is not None
    assert expected.log_probs is not None
    torch.testing.assert_close(completions.log_probs, expected.log_probs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("max_tokens", [None, 75])
@pytest.mark.parametrize("kind", KINDS)
def test_same_samples(kind, max_tokens, lm, folder, prompts, monkeypatch):
    engine = NativeGenerator(lm, load_tokenizer(folder), max_tokens, use_graphs=False)
    expected = engine.generate(prompts, 4, KINDS[kind], seed=3)
    decode_statically(monkeypatch)
    completions = engine.generate(prompts, 4, KINDS[kind], seed=3)
    assert_same(completions, expected)


@pytest.mark.parametrize("samples", [1, 7])
def test_same_samples_of_another_number(samples, lm, folder, prompts, monkeypatch):
    engine = NativeGenerator(lm, load_tokenizer(folder), use_graphs=False)
    expected = engine.generate(prompts, samples, PARAMS, seed=5)
    decode_statically(monkeypatch)
    assert_same(engine.generate(prompts, samples, PARAMS, seed=5), expected)


def test_shapes_are_few_and_the_host_looks_each_eighth_step(lm, folder, prompts, monkeypatch):
    decode_statically(monkeypatch)
    shapes = []
    looks = []
    look = StaticDecoding._look
    monkeypatch.setattr(
        StaticDecoding, "_look", lambda self, steps: (looks.append(steps), look(self, steps))[1]
    )
    handle = lm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    try:
        engine = NativeGenerator(lm, load_tokenizer(folder), use_graphs=False)
        params = replace(PARAMS, max_length=64, stop_token_ids=tuple(range(4, 10)))
        completions = engine.generate(prompts, 6, params, seed=0)
    finally:
        handle.remove()
    assert shapes[0] == (5, 11)
    assert {rows for rows, _ in shapes[1:]} <= {1, 2, 4, 8, 16, 32}
    assert {seq for _, seq in shapes[1:]} == {1}
    assert set(looks[:-1]) == {8}
    assert sum(looks) == len(shapes) - 1 <= int(completions.lengths.max()) - 1 + 7
    assert len({rows for rows, _ in shapes[1:]}) > 1  # rows that ended are dropped after a while


@pytest.mark.parametrize("kind", ["stop tokens", "rules", "end strings"])
def test_graphs_give_the_same_samples(kind, lm, folder, prompts, monkeypatch):
    """Steps are recorded once per number of rows and replayed on the same memory."""
    params = replace(KINDS[kind], max_length=48)
    expected = NativeGenerator(lm, load_tokenizer(folder), use_graphs=False).generate(
        prompts, 4, params, seed=3
    )
    decode_statically(monkeypatch)
    recorded = stand_in()
    monkeypatch.setattr(generator, "cuda", recorded)
    shapes = []
    handle = lm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    try:
        engine = NativeGenerator(lm, load_tokenizer(folder))
        assert_same(engine.generate(prompts, 4, params, seed=3), expected)
    finally:
        handle.remove()
    steps = shapes[1:]
    graphs = recorded.graphs
    assert len(graphs) >= 2
    assert len(graphs) <= len(set(steps))
    # Per number of rows Python runs a step twice: eagerly, and captured.
    for shape in steps:
        assert steps.count(shape) <= 2
    assert sum(graph.replays for graph in graphs) > 2 * len(graphs)


def test_a_capture_that_waits_for_the_device_fails(lm, folder, prompts, monkeypatch):
    """Otherwise the recorder could not detect it."""
    decode_statically(monkeypatch)
    recorded = stand_in()
    monkeypatch.setattr(generator, "cuda", recorded)
    draw = StaticDecoding._draw
    monkeypatch.setattr(
        StaticDecoding, "_draw", lambda self, *args: (args[2].max().item(), draw(self, *args))[1]
    )
    engine = NativeGenerator(lm, load_tokenizer(folder))
    with pytest.raises(RuntimeError, match="capturing: _local_scalar_dense"):
        engine.generate(prompts, 4, PARAMS, seed=3)


def decode_both_ways(folder, tp, pp):
    """Check that static decoding draws what decoding on a CPU draws, in float64."""
    prompts = random_prompts(61, (3, 6, 9))
    stops = SamplingParams(
        max_length=16, stop_token_ids=(2, 5, 6, 7, 8, 9, 10, 11), repetition_penalty=1.2
    )
    plain = SamplingParams(max_length=11)
    with parallel_mesh(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, timeout_seconds=60
    ) as mesh:
        lm = megatron_model(folder, mesh, torch.float64)
        tokenizer = load_tokenizer(folder)
        passes = []
        whole = StaticDecoding._read

        def noted(decoding, group):
            passes.append(group)
            return whole(decoding, group)

        for params, samples, max_tokens in (
            (stops, 4, None),
            (stops, 4, 60),
            (plain, 5, None),
            (stops, 1, 30),
        ):
            engine = NativeGenerator(lm, tokenizer, max_tokens, use_graphs=False)
            expected = engine.generate(prompts, samples, params, seed=3)
            passes.clear()
            with pytest.MonkeyPatch.context() as patch:
                decode_statically(patch)
                patch.setattr(StaticDecoding, "_read", noted)
                completions = engine.generate(prompts, samples, params, seed=3)
            assert_same(completions, expected)
            # Stages alternate between groups, so they never work on the same group at once.
            assert len({id(group) for group in passes}) == pp
            if pp > 1:
                for previous, following in itertools.pairwise(passes):
                    assert previous is not following


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)], ids=["PP2", "TP2"])
def test_two_ranks(tp, pp, folder, tmp_path):
    """Two stages with a group of rows each at a time, and two ranks that share each weight."""
    folder = tiny_llama_folder(tmp_path / "model", vocab_size=63, logit_scale=2.0, layers=4)
    call_on_ranks(decode_both_ways, 2, folder, tp, pp, timeout=150)


@pytest.mark.parametrize("use_graphs", [False, True])
def test_the_cache_is_freed_at_once(use_graphs, lm, folder, prompts, monkeypatch):
    """Training needs this memory, and Python collects cycles at any time."""
    decode_statically(monkeypatch)
    monkeypatch.setattr(generator, "cuda", stand_in())
    caches = []
    new_cache = lm.new_cache

    def noted(*args, **options):
        cache = new_cache(*args, **options)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(lm, "new_cache", noted)
    gc.collect()
    gc.disable()
    try:
        NativeGenerator(lm, load_tokenizer(folder), use_graphs=use_graphs).generate(
            prompts, 2, PARAMS, seed=0
        )
        assert isinstance(caches[0], weakref.ref)
        assert caches[0]() is None
    finally:
        gc.enable()


def test_padded_rows():
    padded_of = {rows: padded_rows(rows) for rows in range(1, 200)}
    expected = {1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224}
    assert set(padded_of.values()) == expected
    for rows, padded in padded_of.items():
        assert rows <= padded < 2 * rows + 1
        assert padded - rows < 32


@pytest.mark.parametrize(
    ("head_size", "dtype", "window", "longest", "expected"),
    [
        (128, torch.bfloat16, None, 9000, True),
        (64, torch.float16, 4096, 4096, True),
        (128, torch.float32, None, 10, False),
        (128, torch.bfloat16, 4096, 4097, False),
        (320, torch.bfloat16, None, 10, False),
        (100, torch.bfloat16, None, 10, False),
    ],
)
def test_what_the_kernel_can(head_size, dtype, window, longest, expected):
    lm = SimpleNamespace(
        architecture=SimpleNamespace(head_size=head_size, window=window),
        config=SimpleNamespace(params_dtype=dtype),
        mesh=SimpleNamespace(device=torch.device("cuda")),
    )
    assert can_decode_statically(lm, longest) is expected


def test_a_cpu_decodes_as_before(lm):
    assert not can_decode_statically(lm, 10)
