"""How long an inference engine takes for its responses: weights and keys over bandwidth, one CUDA graph a step.

Notation: n sequences of a call, t tokens of a response so far, mu their mean, T the most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.preflight.deep.machine import Machine

BF16 = 2
_SMALL_KERNELS = 5  # a layer, besides its four matrices: two norms, RoPE with the cache's write, attention, SwiGLU
_POINTS = 128  # of the integral over t


@dataclass(frozen=True)
class Lengths:
    """Response lengths: exponential, cut at `longest`, where their mean is known; else all are `longest`."""

    longest: int
    mean: float | None = None

    @property
    def average(self) -> float:
        return self.longest if self.mean is None else min(self.mean, self.longest)

    def alive(self, tokens: float) -> float:
        """The share of responses that are longer."""
        return float(tokens < self.longest) * (math.exp(-tokens / self._scale()) if self._scale() else 1.0)

    def expected_longest(self, count: float) -> float:
        """Of so many responses."""
        step = self.longest / _POINTS
        return sum(step * (1 - (1 - self.alive((i + 0.5) * step)) ** count) for i in range(_POINTS))

    def _scale(self) -> float:
        """The exponential's scale, whose mean after the cut is `mean`; 0 where nothing ends early."""
        if self.mean is None or self.mean >= 0.99 * self.longest:
            return 0.0
        low, high = self.mean / 100, 100.0 * self.longest
        for _ in range(60):
            scale = (low + high) / 2
            low, high = (scale, high) if scale * (1 - math.exp(-self.longest / scale)) < self.mean else (low, scale)
        return low


@dataclass(frozen=True)
class Engine:
    """An engine over some GPUs of a node.

    Attributes:
        architecture: of the model, served in bf16.
        machine: of its GPUs.
        gpus: tensor-parallel ranks.
        slots: sequences decoded together at most.
    """

    architecture: Architecture
    machine: Machine
    gpus: int
    slots: float

    @property
    def weight_bytes(self) -> float:
        """Of the whole model."""
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
        d, h = arch.head_size, arch.hidden_size
        qkv = (arch.num_heads + 2 * arch.num_groups) * d
        return [(h, qkv), (arch.num_heads * d, h), (h, 2 * arch.ffn_size), (arch.ffn_size, h)]

    def pass_seconds(self, rows: float, tokens: float, context: float) -> float:
        """One pass of all layers and the head.

        Args:
            rows: sequences.
            tokens: that are read of each: 1 in a decode step.
            context: tokens in the cache of each, on average.
        """
        arch, machine, t = self.architecture, self.machine, rows * tokens
        seconds = 0.0
        for inner, outer in self._matrices():
            numbers = inner * outer / self.gpus
            seconds += machine.kernel_seconds(2 * t * numbers, BF16 * (numbers + t * (inner + outer / self.gpus)))
        cache = rows * context * self.cache_bytes_of_token / arch.num_layers / self.gpus
        scores = 4 * t * context * arch.num_heads * arch.head_size / self.gpus
        seconds += machine.kernel_seconds(scores, cache) + (_SMALL_KERNELS - 1) * machine.kernel_seconds(
            0, 3 * BF16 * t * arch.hidden_size
        )
        nodes = -(-self.gpus // machine.gpus_per_node)
        seconds += 2 * machine.collective_seconds("all_reduce", BF16 * t * arch.hidden_size, self.gpus, nodes)
        head = arch.vocab_size * arch.hidden_size / self.gpus
        logits = machine.kernel_seconds(2 * rows * head, BF16 * head)
        # Softmax, noise and the choice go over fp32 logits a few times.
        sampling = 4 * machine.kernel_seconds(0, 8 * rows * arch.vocab_size)
        return arch.num_layers * seconds + logits + sampling

    def call_seconds(self, sequences: int, prompts: int, prompt_tokens: float, lengths: Lengths) -> float:
        """All responses of a call; with more of them than slots, one that ends makes room for the next."""
        rows = min(sequences, self.slots)
        mean, step = lengths.average, lengths.longest / _POINTS
        seconds = self.pass_seconds(prompts, prompt_tokens, prompt_tokens / 2)
        seconds += (sequences - rows) * mean / rows * self.pass_seconds(rows, 1, prompt_tokens + mean / 2)
        for i in range(_POINTS):
            tokens = (i + 0.5) * step
            share = lengths.alive(tokens)
            any_left = 1 - (1 - share) ** rows
            seconds += step * any_left * self.pass_seconds(max(rows * share, 1.0), 1, prompt_tokens + tokens)
        return seconds
