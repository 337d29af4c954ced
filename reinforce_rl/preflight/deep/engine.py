"""How long an inference engine takes for its responses: weights and keys over bandwidth, one CUDA graph a step.

Notation: n sequences of a call, t tokens of a response so far.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.deep.machine import Hardware

BF16 = 2
_SMALL_KERNELS = 4  # a layer, besides four matrices and attention: two norms, RoPE with the cache's write, SwiGLU
_POINTS, _DRAWS = 128, 64  # of the integral over t; of the ranks' lengths


@dataclass(frozen=True)
class Lengths:
    """Response lengths: exponential, cut at `longest`, where their mean is known; else all are `longest`."""

    longest: int
    mean: float | None = None

    @property
    def average(self) -> float:
        return self.longest if self.mean is None else min(self.mean, self.longest)

    @property
    def scale(self) -> float:
        """The mean of the exponential distribution that has the mean `mean` after the cut."""
        if self.average >= 0.99 * self.longest:
            return math.inf
        low, high = self.average / 2, 100.0 * self.longest
        for _ in range(60):
            scale = (low + high) / 2
            low, high = (scale, high) if scale * -math.expm1(-self.longest / scale) < self.average else (low, scale)
        return low

    def of_slowest(self, ranks: int, calls: int, together: int) -> tuple[float, float]:
        """Steps that a call takes on average, and the factor by which the slowest rank takes longer.

        Args:
            ranks: that generate side by side, and wait for each other at the end.
            calls: of each, one after another.
            together: sequences of a call, which ends with its longest.
        """
        scale, draw = self.scale, random.Random(0)
        if scale == math.inf:
            return self.longest, 1.0

        def steps() -> float:
            # Of n exponentials the longest has the distribution function F^n.
            return min(self.longest, -scale * math.log1p(-(draw.random() ** (1 / together))))

        sums = [[sum(steps() for _ in range(calls)) for _ in range(ranks)] for _ in range(_DRAWS)]
        mean = statistics.fmean(map(statistics.fmean, sums))
        return mean / calls, statistics.fmean(map(max, sums)) / mean


@dataclass(frozen=True)
class Engine:
    """An engine over some GPUs.

    Attributes:
        architecture: of the model, served in bf16.
        machine: of its GPUs.
        gpus: tensor-parallel ranks.
        slots: sequences decoded together at most.
    """

    architecture: Architecture
    machine: Hardware
    gpus: int
    slots: float

    @property
    def weight_bytes(self) -> float:
        """The size of the whole model's weights."""
        arch = self.architecture
        tables = (1 if arch.tied_embeddings else 2) * arch.vocab_size * arch.hidden_size
        return BF16 * (arch.num_layers * sum(map(math.prod, self._matrices())) + tables)

    @property
    def cache_bytes_of_token(self) -> float:
        """Keys and values of all layers."""
        arch = self.architecture
        return BF16 * 2 * arch.num_layers * arch.num_groups * arch.head_size

    def _matrices(self) -> list[tuple[int, int]]:
        arch = self.architecture
        h, d = arch.hidden_size, arch.head_size
        qkv = (arch.num_heads + 2 * arch.num_groups) * d
        return [(h, qkv), (arch.num_heads * d, h), (h, 2 * arch.ffn_size), (arch.ffn_size, h)]

    def pass_seconds(self, rows: float, tokens: float, context: float) -> float:
        """Time of one pass over `tokens` new tokens in each row, with `context` tokens of each row in the cache."""
        arch, machine, t, gpus = self.architecture, self.machine, rows * tokens, self.gpus
        layer = _SMALL_KERNELS * machine.kernel_seconds(0, 3 * BF16 * t * arch.hidden_size)
        for inner, outer in self._matrices():
            numbers = inner * outer / gpus
            layer += machine.kernel_seconds(2 * t * numbers, BF16 * (numbers + t * (inner + outer / gpus)))
        cache = rows * context * self.cache_bytes_of_token / arch.num_layers / gpus
        layer += machine.kernel_seconds(4 * t * context * arch.num_heads * arch.head_size / gpus, cache)
        nodes = -(-gpus // machine.gpus_per_node)
        layer += 2 * machine.collective_seconds("all_reduce", BF16 * t * arch.hidden_size, gpus, nodes)
        head = arch.vocab_size * arch.hidden_size / gpus
        # Softmax, noise and the choice go over fp32 logits a few times.
        last = machine.kernel_seconds(2 * rows * head, BF16 * head) + 4 * machine.kernel_seconds(
            0, 8 * rows * arch.vocab_size
        )
        return arch.num_layers * layer + last

    def call_seconds(self, sequences: int, prompts: int, prompt_tokens: float, lengths: Lengths) -> float:
        """All responses of a call; with more of them than slots, one that ends makes room for the next."""
        rows, step = min(sequences, self.slots), lengths.longest / _POINTS
        waiting = (sequences - rows) * lengths.average / rows
        seconds = self.pass_seconds(prompts, prompt_tokens, prompt_tokens / 2)
        seconds += waiting * self.pass_seconds(rows, 1, prompt_tokens + lengths.average / 2)
        for i in range(_POINTS):
            tokens = (i + 0.5) * step
            share = math.exp(-tokens / lengths.scale)
            any_left = 1 - (1 - share) ** rows
            seconds += step * any_left * self.pass_seconds(max(rows * share, 1.0), 1, prompt_tokens + tokens)
        return seconds
