"""The operations that training on a workload's padded batch takes, whoever does it.

Products with the weights as `rloo_step.floors` counts them: 6 operations a parameter and token, the
output layer's at response positions alone. Attention on top. What an implementation computes twice
does not count.
"""

from __future__ import annotations

from rloo_step.floors import TRAINING, matrix_flops
from rloo_step.parts import parts_of

from gpu_checks.workload import Workload
from reinforce_rl.megatron.architecture import Architecture


def attention_flops(arch: Architecture, length: int, flops_a_product: int) -> float:
    """Of one sequence in all layers.

    A position's product with each key before it and its own, and as much for values.

    Args:
        arch: the model, without a sliding window.
        length: positions of the sequence.
        flops_a_product: `FORWARD` or `TRAINING`, for each multiplication and addition.
    """
    pairs = length * (length + 1) / 2
    return flops_a_product * 2 * pairs * arch.num_layers * arch.num_heads * arch.head_size


def training_flops(arch: Architecture, workload: Workload) -> float:
    """Forward and backward of the padded batch, whose last tokens go through no layer."""
    length = workload.prompt_tokens + workload.response_tokens - 1
    count = workload.sequences
    weights = matrix_flops(
        parts_of(arch),
        count * length,
        count * workload.response_tokens,
        TRAINING,
    )
    return weights + count * attention_flops(arch, length, TRAINING)
