"""Both caches against attention over whole sequences, while rows start and end."""

from __future__ import annotations

import pytest
import torch
from helpers.flash import emulated_varlen_attention
from torch import Tensor

from reinforce_rl.megatron.model import decoding
from reinforce_rl.megatron.model.attention import causal_attention
from reinforce_rl.megatron.model.decoding import (
    CacheSizes,
    FlashCache,
    KVCache,
    LaneTokens,
    varlen_attention,
)

HEADS = 6
GROUPS = 2
SIZE = 8
LENGTHS = (5, 9, 1)
RESPONSE = 7
ROWS = 5


class Layer:
    """Queries, keys and values of all tokens of some sequences, and their expected attention."""

    def __init__(self, prompts: int, rows: int, seed: int):
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int, heads: int, length: int) -> Tensor:
            return torch.randn(count, heads, length, SIZE, generator=generator, dtype=torch.float64)

        self.of_prompts = [draw(prompts, heads, max(LENGTHS)) for heads in (HEADS, GROUPS, GROUPS)]
        self.of_rows = [draw(rows, heads, RESPONSE) for heads in (HEADS, GROUPS, GROUPS)]

    def expected(self, prompt: int, row: int, written: int, window: int | None) -> Tensor:
        """Return [h, d], the attention of response token `written`."""
        inputs = []
        for prompts, responses in zip(self.of_prompts, self.of_rows, strict=True):
            before = prompts[prompt, :, : LENGTHS[prompt]]
            response = responses[row, :, : written + 1]
            inputs.append(torch.cat((before, response), dim=1)[None])
        return causal_attention(*inputs, None, window)[0, :, -1]


@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_every_token_sees_its_prompt_and_its_own_response(window):
    """Five rows of three prompts are at different positions.

    Rows end, others move, and new ones start in slots that were used before.
    """
    prompt_of = [0, 1, 0, 2, 1, 2, 0]
    layers = [Layer(3, len(prompt_of), seed) for seed in (0, 1)]
    sizes = CacheSizes(
        range(3, 5), 3, max(LENGTHS), 5, RESPONSE, GROUPS, SIZE, torch.float64, "cpu", window
    )
    cache = KVCache(sizes)
    for slots, prompts in (([2, 0], [0, 1]), ([1], [2])):
        cache.read(slots)
        for number, layer in enumerate(layers, 3):
            q, k, v = (part[prompts] for part in layer.of_prompts)
            expected = causal_attention(q, k, v, None, window)
            torch.testing.assert_close(cache.attend(number, q, k, v, None), expected)
    slot_of = {0: 2, 1: 0, 2: 1}
    running = [(0, 0), (1, 0), (2, 0)]  # (row, tokens stored)
    # (order, new rows) of each step
    events = {1: ([0, 1, 2], [3, 4]), 3: ([4, 1, 2], []), 4: ([0, 1, 2], [5, 6])}
    for step in range(7):
        if step in events:
            order, new = events[step]
            cache.move([(new, old) for new, old in enumerate(order) if new != old])
            running = [running[i] for i in order] + [(row, 0) for row in new]
        rows = [row for row, _ in running]
        written = torch.tensor([count for _, count in running])
        cache.place([slot_of[prompt_of[row]] for row in rows])
        prompt_lengths = torch.tensor([LENGTHS[prompt_of[row]] for row in rows])
        cache.at(prompt_lengths, written, int(written.max()) + 1)
        for number, layer in enumerate(layers, 3):
            q, k, v = (part[rows, :, written][:, :, None] for part in layer.of_rows)
            outputs = cache.attend(number, q, k, v, None)
            assert outputs.shape == (len(rows), HEADS, 1, SIZE)
            for place, (row, count) in enumerate(running):
                torch.testing.assert_close(
                    outputs[place, :, 0], layer.expected(prompt_of[row], row, count, window)
                )
        running = [(row, count + 1) for row, count in running if count + 1 < RESPONSE]
        if len(running) < len(rows):
            left = [i for i, count in enumerate(written.tolist()) if count + 1 < RESPONSE]
            cache.move([(new, old) for new, old in enumerate(left) if new != old])


def test_a_prompt_is_stored_once_whatever_its_samples():
    def numbers(rows: int) -> int:
        sizes = CacheSizes(range(4), 2, 100, rows, 10, GROUPS, SIZE, torch.float32, "cpu")
        cache = KVCache(sizes)
        return sum(t.numel() for t in vars(cache).values() if isinstance(t, Tensor))

    a_token = 4 * 2 * GROUPS * SIZE
    expected = (2 * 100 + 8 * 10) * a_token
    assert numbers(8) == expected
    assert numbers(16) - numbers(8) == 8 * 10 * a_token


def test_scale_and_bf16():
    torch.manual_seed(0)
    dtype = torch.bfloat16
    q = torch.randn(1, HEADS, 6, SIZE).to(dtype)
    k = torch.randn(1, GROUPS, 6, SIZE).to(dtype)
    v = torch.randn(1, GROUPS, 6, SIZE).to(dtype)
    sizes = CacheSizes(range(1), 1, 5, 1, 2, GROUPS, SIZE, dtype, "cpu")
    cache = KVCache(sizes)
    cache.read([0])
    prompt = [part[:, :, :5] for part in (q, k, v)]
    cache.attend(0, *prompt, 0.7)
    cache.place([0])
    cache.at(torch.tensor([5]), torch.tensor([0]), 1)
    response = [part[:, :, 5:] for part in (q, k, v)]
    outputs = cache.attend(0, *response, 0.7)
    expected = causal_attention(q.double(), k.double(), v.double(), 0.7)[:, :, 5:]
    assert outputs.dtype == dtype
    torch.testing.assert_close(outputs.double(), expected, atol=0.02, rtol=0.02)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(decoding, "varlen_attention", emulated_varlen_attention)


def sequences(count: int, length: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries, keys and values, [count, heads, length, d]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, heads, length, SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-6), (torch.bfloat16, 0.03)])
def test_flash_every_token_sees_its_prompt_and_its_own_response(dtype, error):
    """Two layers; rows of three prompts in lanes of any order, beside unused rows.

    The rows are at different positions.
    """
    sizes = CacheSizes(range(3, 5), 3, max(LENGTHS), ROWS, RESPONSE, GROUPS, SIZE, dtype, "cpu")
    cache = FlashCache(sizes)
    prompts = [sequences(3, max(LENGTHS), seed, dtype) for seed in (0, 1)]
    rows = [sequences(ROWS, RESPONSE, seed, dtype) for seed in (2, 3)]
    slots = [2, 0, 1]  # slots of the prompts
    for some in ([0, 1], [2]):
        cache.read([slots[i] for i in some], [LENGTHS[i] for i in some])
        for layer, parts in enumerate(prompts, 3):
            q, k, v = (part[some] for part in parts)
            torch.testing.assert_close(
                cache.attend(layer, q, k, v, 0.7), causal_attention(q, k, v, 0.7)
            )
    prompt_of = [1, 2, 2, 0, 0]
    lanes = [3, 0, 4, 1, 2]
    written = [0, 0, 0, 0, 0]
    for step in range(RESPONSE):
        # By slot, like in a decode step; some rows pause.
        going = [row for row in range(ROWS) if (row + step) % 4 != 0 and written[row] < RESPONSE]
        starts = [cache.lane_start(lanes[row]) for row in going] + [cache.spare] * 2
        stored = [written[row] for row in going] + [0, 0]
        counts = [sum(slots[prompt_of[row]] == slot for row in going) for slot in range(3)]
        firsts = torch.tensor([0, *counts, 2]).cumsum(0).int()
        cache.at(torch.tensor(starts), torch.tensor(stored), firsts, 2)
        for number, (before, responses) in enumerate(zip(prompts, rows, strict=True)):
            places = [written[row] for row in going]
            inputs = []
            for part in responses:
                tokens = part[going, :, places][:, :, None]
                spare = torch.randn_like(tokens[:1]).repeat(2, 1, 1, 1)
                inputs.append(torch.cat((tokens, spare)))
            outputs = cache.attend(3 + number, *inputs, 0.7)
            assert outputs.shape == inputs[0].shape
            assert outputs.dtype == dtype
            assert not outputs.isnan().any()
            for place, row in enumerate(going):
                prompt = prompt_of[row]
                count = written[row]
                whole = []
                for a, b in zip(before, responses, strict=True):
                    parts = (a[prompt, :, : LENGTHS[prompt]], b[row, :, : count + 1])
                    whole.append(torch.cat(parts, dim=1)[None].double())
                expected = causal_attention(*whole, 0.7)[0, :, -1]
                torch.testing.assert_close(
                    outputs[place, :, 0].double(), expected, atol=error, rtol=error
                )
        for row in going:
            written[row] += 1
    assert max(written) > min(written) > 4


def test_a_prompt_is_stored_once_and_nothing_is_copied_to_read_it():
    """The cache holds one token more than the slots and lanes, in the model's dtype."""
    sizes = CacheSizes(range(4), 2, 100, 8, 10, GROUPS, SIZE, torch.bfloat16, "cpu")
    cache = FlashCache(sizes)
    expected = (2 * 100 + 8 * 10 + 1) * 4 * 2 * GROUPS * SIZE
    assert cache._pool.numel() == expected
    _, keys, values = cache._layers[1]
    assert (
        keys.untyped_storage().data_ptr()
        == values.untyped_storage().data_ptr()
        == cache._pool.data_ptr()
    )


def test_torchs_operator_takes_what_it_is_given():
    """Check shapes with torch's own rule for tensors without data.

    The kernel itself only runs on GPUs.
    """
    pool = torch.empty(50, GROUPS, 2, SIZE, dtype=torch.bfloat16, device="meta")
    query = torch.empty(12, GROUPS, SIZE, dtype=torch.bfloat16, device="meta")
    starts = torch.empty(5, dtype=torch.int32, device="meta")
    used = torch.empty(4, dtype=torch.int32, device="meta")
    keys, values = pool.unbind(2)
    out, log_sum = varlen_attention(query, keys, values, starts, starts, used, (3, 20))
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    assert log_sum.shape == (GROUPS, 12)
    assert log_sum.dtype == torch.float32


@pytest.mark.parametrize("window", [None, 1, 4, 8])
def test_several_tokens_of_a_row_in_one_pass(window):
    """Rows get 3, 1 and 2 tokens, behind 0, 4 and 2 of their own, in lanes that then move."""
    prompt_of = [0, 1, 0]
    layers = [Layer(2, len(prompt_of), seed) for seed in (0, 1)]
    sizes = CacheSizes(
        range(3, 5), 2, max(LENGTHS), 4, RESPONSE, GROUPS, SIZE, torch.float64, "cpu", window
    )
    cache = KVCache(sizes)
    cache.read([1, 0])
    for number, layer in enumerate(layers, 3):
        cache.attend(number, *(part[[0, 1]] for part in layer.of_prompts), None)
    slot_of = {0: 1, 1: 0}

    def extend(lanes: list[int], passes: list[tuple[int, int]]) -> None:
        """Add tokens to rows; `passes` are (tokens stored, tokens to add) of each row."""
        rows = []
        for row, (stored, count) in enumerate(passes):
            if count:
                prompt = prompt_of[row]
                rows.append(LaneTokens(lanes[row], slot_of[prompt], LENGTHS[prompt], stored, count))
        cache.extend(rows, beside=0)
        tokens = [
            (row, stored + offset)
            for row, (stored, count) in enumerate(passes)
            for offset in range(count)
        ]
        of_row, at = zip(*tokens, strict=True)
        for number, layer in enumerate(layers, 3):
            q, k, v = (part[of_row, :, at][:, :, None] for part in layer.of_rows)
            outputs = cache.attend(number, q, k, v, None)
            assert outputs.shape == (len(tokens), HEADS, 1, SIZE)
            for place, (row, count) in enumerate(tokens):
                torch.testing.assert_close(
                    outputs[place, :, 0], layer.expected(prompt_of[row], row, count, window)
                )

    extend([0, 3, 2], [(0, 0), (0, 4), (0, 2)])
    extend([0, 3, 2], [(0, 3), (4, 1), (2, 2)])
    cache.move([(0, 3), (3, 2), (1, 0)])
    extend([1, 0, 3], [(3, 1), (5, 1), (4, 1)])
