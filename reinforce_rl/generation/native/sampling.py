"""Sample tokens from logits, with noise that depends only on its key.

Notation: R rows (unfinished samples), V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reinforce_rl.generation.base import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def sample_seeds(seed: int, prompt_ids: np.ndarray, sample_ids: np.ndarray) -> np.ndarray:
    """Return a 64-bit seed per (seed, prompt, sample), uint64 [R], which keys its noise.

    Applies the SplitMix64 finaliser to the three integers in turn (Steele et al., "Fast Splittable
    Pseudorandom Number Generators", 2014).
    """
    with np.errstate(over="ignore"):
        state = _mix(np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
        return _mix(
            _mix(state + _GOLDEN * prompt_ids.astype(np.uint64))
            + _GOLDEN * sample_ids.astype(np.uint64)
        )


def position_keys(seeds: np.ndarray, num_positions: int) -> Tensor:
    """Return 64-bit keys of each sample's positions, each as two int32.

    Maps uint64 [R] to int32 [R, num_positions, 2].
    """
    with np.errstate(over="ignore"):
        positions = np.arange(1, num_positions + 1, dtype=np.uint64)
        keys = _mix(seeds[:, None] + _GOLDEN * positions[None, :])
    return torch.from_numpy(
        np.ascontiguousarray(keys).view(np.int32).reshape(len(seeds), num_positions, 2)
    )


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    z: np.ndarray = np.asarray(value, dtype=np.uint64) + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


class Workspace:
    """Preallocated buffers for sampling, since allocating pages costs more than the computation."""

    def __init__(self, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device):
        self._ints = torch.empty((2, rows, vocab_size), dtype=torch.int32, device=device)
        self._reals = torch.empty((2, rows, vocab_size), dtype=dtype, device=device)

    def ints(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return two int32 [R, V] buffers; any later call in this module overwrites them."""
        return self._ints[0, :rows], self._ints[1, :rows]

    def reals(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return two [R, V] buffers in the logits' dtype: for results, and for scaled logits."""
        return self._reals[0, :rows], self._reals[1, :rows]

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        if temperature == 1.0:
            return logits
        return torch.div(logits, temperature, out=self.reals(len(logits))[1])


def _negative_noise(keys: Tensor, bits: Tensor, scratch: Tensor) -> Tensor:
    """Compute negated standard Gumbel noise, float32 [R, V], from keys int32 [R, 2].

    `bits` and `scratch` are int32 [R, V]; the result uses the memory of `scratch`. It is equal in
    any batch and on any device. The generator is counter-based: it hashes the token id with 32-bit
    multiplications and shifts (constants of C. Wellons' "lowbias32", 2018). The second half of the
    key enters between the two rounds.
    """
    tokens = torch.arange(bits.shape[1], dtype=torch.int32, device=keys.device) * _as_int32(
        0x9E3779B1
    )
    torch.add(tokens[None, :], keys[:, :1], out=bits)
    _xor_shift(bits, scratch, 16)
    bits.mul_(_as_int32(0x7FEB352D)).bitwise_xor_(keys[:, 1:])
    _xor_shift(bits, scratch, 15)
    bits.mul_(_as_int32(0x846CA68B))
    _xor_shift(bits, scratch, 16)
    # 31 bits plus half a step. Small values, which make a token win, keep full precision. The
    # second factor keeps values that round up to 2^31 below 1, where the noise is minus infinity.
    uniform = scratch.view(torch.float32).copy_(bits.bitwise_and_(0x7FFFFFFF))
    return uniform.add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24)).log1p_().neg_().log_()


def _xor_shift(bits: Tensor, scratch: Tensor, by: int) -> None:
    """Compute unsigned bits ^= bits >> by in place; torch's shift is arithmetic, hence the mask."""
    if by == 16 and bits.is_cuda:
        return _fold_halves(bits)
    torch.bitwise_right_shift(bits, by, out=scratch)
    bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - by)) - 1))


def _fold_halves(bits: Tensor) -> None:
    """Compute bits ^= bits >> 16 (little-endian) in one pass over memory instead of three."""
    low, high = bits.view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
    low.bitwise_xor_(high)


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def choose_tokens(logits: Tensor, keys: Tensor, params: SamplingParams, work: Workspace) -> Tensor:
    """Draw one token per row by the Gumbel-max trick, or the likeliest if `use_greedy`: int64 [R].

    The trick samples the softmax exactly, and rounding matters only at near ties; an inverted
    cumulative sum would accumulate errors over the vocabulary. Logits [R, V] have penalties and
    bans applied, but no temperature.
    """
    if params.use_greedy:
        return logits.argmax(dim=-1)
    logits = work.scaled(logits, params.temperature)
    if params.top_k and params.top_k < logits.shape[1]:
        smallest_kept = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if params.top_p < 1.0:
        logits = _cut_tail(logits, params.top_p)
    perturbed, _ = work.reals(len(logits))
    return torch.sub(logits, _negative_noise(keys, *work.ints(len(logits))), out=perturbed).argmax(
        dim=-1
    )


def _cut_tail(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens with probability top_p (Holtzman et al. 2019)."""
    ordered, order = logits.sort(dim=-1, descending=True)
    before = torch.softmax(ordered, dim=-1).cumsum(dim=-1) - torch.softmax(ordered, dim=-1)
    cut = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
    return logits.masked_fill(cut, float("-inf"))


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens in `seen`, bool [R, V], less likely.

    Divides positive logits [R, V] by the penalty and multiplies negative ones.
    """
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float, work: Workspace) -> Tensor:
    """Return log softmax(logits / temperature) at the tokens, float32 [R].

    `logits` are [R, V], `tokens` int64 [R].
    """
    out, _ = work.reals(len(logits))
    torch.log_softmax(work.scaled(logits, temperature), dim=-1, out=out)
    return out.gather(1, tokens[:, None])[:, 0].float()
