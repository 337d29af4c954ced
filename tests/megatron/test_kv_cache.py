"""The cache against attention over whole sequences, one at a time, while rows come and go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reinforce_rl.megatron.model.attention import causal_attention
from reinforce_rl.megatron.model.kv_cache import KVCache

HEADS, GROUPS, SIZE = 6, 2, 8
LENGTHS = (5, 9, 1)
RESPONSE = 7


class Layer:
    """Queries, keys and values of every token of some sequences, and what attention over each alone gives."""

    def __init__(self, prompts: int, rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int, heads: int, length: int) -> Tensor:
            return torch.randn(count, heads, length, SIZE, generator=generator, dtype=torch.float64)

        self.of_prompts = [draw(prompts, heads, max(LENGTHS)) for heads in (HEADS, GROUPS, GROUPS)]
        self.of_rows = [draw(rows, heads, RESPONSE) for heads in (HEADS, GROUPS, GROUPS)]

    def expected(self, prompt: int, row: int, written: int, window: int | None) -> Tensor:
        """[h, d] of response token `written`."""
        parts = zip(self.of_prompts, self.of_rows, strict=True)
        q, k, v = (
            torch.cat((before[prompt, :, : LENGTHS[prompt]], own[row, :, : written + 1]), dim=1)[None]
            for before, own in parts
        )
        return causal_attention(q, k, v, None, window)[0, :, -1]


@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_every_token_sees_its_prompt_and_its_own_response(window):
    """Five rows of three prompts at different positions; rows end, others move, new ones begin in used places."""
    prompt_of = [0, 1, 0, 2, 1, 2, 0]
    layers = [Layer(3, len(prompt_of), seed) for seed in (0, 1)]
    cache = KVCache(range(3, 5), 3, max(LENGTHS), 5, RESPONSE, GROUPS, SIZE, torch.float64, "cpu", window)
    for slots, prompts in (([2, 0], [0, 1]), ([1], [2])):
        cache.read(slots)
        for number, layer in enumerate(layers, 3):
            q, k, v = (part[prompts] for part in layer.of_prompts)
            expected = causal_attention(q, k, v, None, window)
            torch.testing.assert_close(cache.attend(number, q, k, v, None), expected)
    slot_of = {0: 2, 1: 0, 2: 1}
    running = [(0, 0), (1, 0), (2, 0)]  # (row, tokens stored)
    events = {1: ([0, 1, 2], [3, 4]), 3: ([4, 1, 2], []), 4: ([0, 1, 2], [5, 6])}  # step: (order, newcomers)
    for step in range(7):
        if step in events:
            order, new = events[step]
            cache.keep(order)
            running = [running[i] for i in order] + [(row, 0) for row in new]
        rows = [row for row, _ in running]
        written = torch.tensor([count for _, count in running])
        cache.place([slot_of[prompt_of[row]] for row in rows])
        cache.at(torch.tensor([LENGTHS[prompt_of[row]] for row in rows]), written, int(written.max()) + 1)
        for number, layer in enumerate(layers, 3):
            q, k, v = (part[rows, :, written][:, :, None] for part in layer.of_rows)
            found = cache.attend(number, q, k, v, None)
            assert found.shape == (len(rows), HEADS, 1, SIZE)
            for place, (row, count) in enumerate(running):
                torch.testing.assert_close(found[place, :, 0], layer.expected(prompt_of[row], row, count, window))
        running = [(row, count + 1) for row, count in running if count + 1 < RESPONSE]
        if len(running) < len(rows):
            cache.keep([i for i, count in enumerate(written.tolist()) if count + 1 < RESPONSE])


def test_a_prompt_is_stored_once_whatever_its_samples():
    def numbers(rows: int) -> int:
        cache = KVCache(range(4), 2, 100, rows, 10, GROUPS, SIZE, torch.float32, "cpu")
        return sum(t.numel() for t in vars(cache).values() if isinstance(t, Tensor))

    a_token = 4 * 2 * GROUPS * SIZE
    assert numbers(8) == (2 * 100 + 8 * 10) * a_token
    assert numbers(16) - numbers(8) == 8 * 10 * a_token


def test_scale_and_bf16():
    torch.manual_seed(0)
    dtype = torch.bfloat16
    q, k, v = (torch.randn(1, heads, 6, SIZE).to(dtype) for heads in (HEADS, GROUPS, GROUPS))
    cache = KVCache(range(1), 1, 5, 1, 2, GROUPS, SIZE, dtype, "cpu")
    cache.read([0])
    cache.attend(0, q[:, :, :5], k[:, :, :5], v[:, :, :5], 0.7)
    cache.place([0])
    cache.at(torch.tensor([5]), torch.tensor([0]), 1)
    found = cache.attend(0, q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], 0.7)
    expected = causal_attention(q.double(), k.double(), v.double(), 0.7)[:, :, 5:]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.02)
