"""Batching changes float32 logits in the last bits, and so a sample only at a near tie.

Samples are drawn together, one prompt at a time, with a bound on the cache, through megatron's own
layers, and with a GPU's static steps. Each draw records the gap between its two best perturbed
logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.flash import decode_statically
from helpers.gumbel import gumbel_noise, noise_keys
from helpers.models import smollm2_folder, tiny_llama_folder
from helpers.policies import megatron_model

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native import decoding
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.generation.native.sampling import choose_tokens

NEAR = 1e-4
GROUP = 4


@pytest.fixture
def gaps(monkeypatch) -> dict[tuple[int, ...], float]:
    """Record the gap of each draw, by its key."""
    gap_of_key: dict[tuple[int, ...], float] = {}

    def noting(logits, keys, params, work=None):
        best = (
            (logits / params.temperature + gumbel_noise(keys, logits.shape[1]))
            .topk(2, dim=-1)
            .values
        )
        pairs = zip(map(tuple, keys.tolist()), (best[:, 0] - best[:, 1]).tolist(), strict=True)
        gap_of_key.update(pairs)
        return choose_tokens(logits, keys, params, work)

    monkeypatch.setattr(decoding, "choose_tokens", noting)
    return gap_of_key


def ways(lm, tokenizer, prompts, params) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield the same samples, drawn in different ways: one row of tokens each."""

    def rows(engine, some):
        out = engine.generate(some, GROUP, params, seed=5)
        return [row[:length] for row, length in zip(out.tokens, out.lengths.tolist(), strict=True)]

    engine = NativeGenerator(lm, tokenizer, use_graphs=False)
    yield "one prompt at a time", [row for prompt in prompts for row in rows(engine, [prompt])]
    longest = max(len(prompt.tokens) for prompt in prompts) + params.max_length
    yield "with a bound on the cache", rows(NativeGenerator(lm, tokenizer, 3 * longest), prompts)
    yield "through megatron's layers", rows(NativeGenerator(lm, tokenizer, is_lean=False), prompts)
    with pytest.MonkeyPatch.context() as patch:
        decode_statically(patch)
        yield "by static steps", rows(engine, prompts)


def check(lm, tokenizer, prompts, params, gaps) -> None:
    together = NativeGenerator(lm, tokenizer).generate(prompts, GROUP, params, seed=5)
    draws = int(together.lengths.sum())
    near = sum(gap < NEAR for gap in gaps.values())
    assert len(gaps) == draws
    assert near < 0.001 * draws
    ids = [p.id for p in prompts for _ in range(GROUP)]
    keys = noise_keys(
        5, torch.tensor(ids).numpy(),
        torch.arange(GROUP).repeat(len(prompts)).numpy(), params.max_length,
    )  # fmt: skip
    gap_at = [[gaps.get(tuple(key), 1.0) for key in row] for row in keys.tolist()]
    for name, rows in ways(lm, tokenizer, prompts, params):
        for number, row in enumerate(rows):
            ties = (t for t, gap in enumerate(gap_at[number]) if gap < NEAR)
            until = next(ties, int(together.lengths[number]))
            assert torch.equal(row[:until], together.tokens[number, :until]), (name, number)


def test_tiny_model(tmp_path, mesh, gaps):
    folder = tiny_llama_folder(tmp_path / "model", vocab_size=63, logit_scale=2.0)
    prompts = [Prompt(i, "", tuple(range(4, 5 + i))) for i in range(7)]
    params = SamplingParams(max_length=40, stop_token_ids=(2,))
    check(megatron_model(folder, mesh), load_tokenizer(folder), prompts, params, gaps)


@pytest.mark.slow
def test_smollm2(mesh, gaps):
    folder = smollm2_folder()
    tokenizer = load_tokenizer(folder)
    texts = (
        "The sea is",
        "Two plus two makes",
        "Dear neighbour, I am writing to you because",
        "Once",
    )
    prompts = [Prompt(i, text, tuple(tokenizer.encode(text))) for i, text in enumerate(texts)]
    params = SamplingParams(max_length=128, stop_token_ids=(tokenizer.eos_token_id,))
    check(megatron_model(folder, mesh), tokenizer, prompts, params, gaps)
