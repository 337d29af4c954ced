"""The GPU's cache, its kernel emulated, against attention over whole sequences, while rows come and go."""

from __future__ import annotations

import pytest
import torch
from helpers.flash import emulated_varlen_attention

from reinforce_rl.megatron.model import kv_cache as flash_cache
from reinforce_rl.megatron.model.attention import causal_attention
from reinforce_rl.megatron.model.kv_cache import FlashCache, varlen_attention

HEADS, GROUPS, SIZE = 6, 2, 8
LENGTHS, RESPONSE, ROWS = (5, 9, 1), 7, 5


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(flash_cache, "varlen_attention", emulated_varlen_attention)


def sequences(count: int, length: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values, [count, heads, length, d]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(count, heads, length, SIZE, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-6), (torch.bfloat16, 0.03)])
def test_every_token_sees_its_prompt_and_its_own_response(dtype, error):
    """Two layers; rows of three prompts in lanes of any order, at different positions, beside rows of nobody."""
    cache = FlashCache(range(3, 5), 3, max(LENGTHS), ROWS, RESPONSE, GROUPS, SIZE, dtype, "cpu")
    prompts = [sequences(3, max(LENGTHS), seed, dtype) for seed in (0, 1)]
    rows = [sequences(ROWS, RESPONSE, seed, dtype) for seed in (2, 3)]
    slots = [2, 0, 1]  # of the prompts
    for some in ([0, 1], [2]):
        cache.read([slots[i] for i in some], [LENGTHS[i] for i in some])
        for layer, parts in enumerate(prompts, 3):
            q, k, v = (part[some] for part in parts)
            torch.testing.assert_close(cache.attend(layer, q, k, v, 0.7), causal_attention(q, k, v, 0.7))
    prompt_of, lanes = [1, 2, 2, 0, 0], [3, 0, 4, 1, 2]
    written = [0, 0, 0, 0, 0]
    for step in range(RESPONSE):
        # By slot, as a step has them; some pause meanwhile.
        going = [row for row in range(ROWS) if (row + step) % 4 != 0 and written[row] < RESPONSE]
        starts = [cache.lane_start(lanes[row]) for row in going] + [cache.spare] * 2
        stored = [written[row] for row in going] + [0, 0]
        counts = [sum(slots[prompt_of[row]] == slot for row in going) for slot in range(3)]
        firsts = torch.tensor([0, *counts, 2]).cumsum(0).int()
        cache.at(torch.tensor(starts), torch.tensor(stored), firsts, 2)
        for number, (before, own) in enumerate(zip(prompts, rows, strict=True)):
            q, k, v = (part[going, :, [written[row] for row in going]][:, :, None] for part in own)
            q, k, v = (torch.cat((part, torch.randn_like(part[:1]).repeat(2, 1, 1, 1))) for part in (q, k, v))
            found = cache.attend(3 + number, q, k, v, 0.7)
            assert found.shape == q.shape and found.dtype == dtype and not found.isnan().any()
            for place, row in enumerate(going):
                prompt, count = prompt_of[row], written[row]
                whole = [
                    torch.cat((a[prompt, :, : LENGTHS[prompt]], b[row, :, : count + 1]), dim=1)[None].double()
                    for a, b in zip(before, own, strict=True)
                ]
                expected = causal_attention(whole[0], whole[1], whole[2], 0.7)[0, :, -1]
                torch.testing.assert_close(found[place, :, 0].double(), expected, atol=error, rtol=error)
        for row in going:
            written[row] += 1
    assert max(written) > min(written) > 4


def test_a_prompt_is_stored_once_and_nothing_is_copied_to_read_it():
    """One token more than the tokens of slots and lanes, in the model's dtype."""
    cache = FlashCache(range(4), 2, 100, 8, 10, GROUPS, SIZE, torch.bfloat16, "cpu")
    assert cache._pool.numel() == (2 * 100 + 8 * 10 + 1) * 4 * 2 * GROUPS * SIZE
    _, keys, values = cache._layers[1]
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr() == cache._pool.data_ptr()


def test_torchs_operator_takes_what_it_is_given():
    """Its shapes, by torch's own rule for tensors without data; the kernel itself runs on GPUs alone."""
    pool = torch.empty(50, GROUPS, 2, SIZE, dtype=torch.bfloat16, device="meta")
    query = torch.empty(12, GROUPS, SIZE, dtype=torch.bfloat16, device="meta")
    starts, used = (torch.empty(n, dtype=torch.int32, device="meta") for n in (5, 4))
    out, log_sum = varlen_attention(query, pool[:, :, 0], pool[:, :, 1], starts, starts, used, (3, 20))
    assert out.shape == query.shape and out.dtype == query.dtype
    assert log_sum.shape == (GROUPS, 12) and log_sum.dtype == torch.float32
