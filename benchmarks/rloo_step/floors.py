"""The least time that each phase of a step can take, from a machine's memory bandwidth and matrix rate.

Attention's own products are left out, so a floor is lower than it could be, by little for short sequences.

Notation: P prompts a step, G samples a prompt, N = P * G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BYTES = 4  # of a number in float32
# floating-point operations a parameter and token
FORWARD = 2
TRAINING = 6
# weight, gradient and two moments are read; the weight and the moments are written
ADAM_TRANSFERS = 7


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        bandwidth: bytes a second that are read from memory.
        flops: floating-point operations a second in large matrix products.
    """

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class ModelParts:
    """Parameters that take part in a pass.

    Attributes:
        body: of the layers and the last norm; an embedding is looked up.
        head: of the output layer.
        all: the trained ones, each once.
    """

    body: int
    head: int
    all: int


@dataclass(frozen=True)
class StepTokens:
    """What a step had to compute.

    Attributes:
        prompt_tokens: of the P prompts, each once.
        group: G.
        response_lengths: tokens of the N responses, in the batches that were decoded together.
    """

    prompt_tokens: float
    group: int
    response_lengths: Sequence[Sequence[int]]

    @property
    def responses(self) -> int:
        """Tokens of all responses."""
        return sum(sum(batch) for batch in self.response_lengths)

    @property
    def shared(self) -> float:
        """Tokens of a pass that has each prompt once."""
        return self.prompt_tokens + self.responses

    @property
    def repeated(self) -> float:
        """Tokens of a pass that has the prompt before each of its responses."""
        return self.prompt_tokens * self.group + self.responses


@dataclass(frozen=True)
class Floor:
    """The least seconds of a phase.

    Attributes:
        shared: with each prompt computed once for its group.
        repeated: with the prompt computed for each of its samples.
    """

    shared: float
    repeated: float


def matrix_flops(
    model: ModelParts, body_tokens: float, head_tokens: float, flops_a_parameter: int
) -> float:
    """Operations of a pass in the products with the weights.

    Args:
        model: that computes.
        body_tokens: that go through the layers.
        head_tokens: whose logits are taken.
        flops_a_parameter: `FORWARD` or `TRAINING`.
    """
    return flops_a_parameter * (model.body * body_tokens + model.head * head_tokens)


def decoding_seconds(machine: Machine, model: ModelParts, lengths: Sequence[int]) -> float:
    """Of one batch: a step reads each weight once, or computes for as long as its rows take.

    The first token of a response comes of its prompt, so a response of T tokens takes T - 1 steps.

    Args:
        machine: it runs on.
        model: that decodes.
        lengths: tokens of the responses; those that have ended take no part any more.
    """
    weights = model.body + model.head
    seconds = 0.0
    for written in range(1, max(lengths, default=0)):
        rows = sum(length > written for length in lengths)
        seconds += max(
            BYTES * weights / machine.bandwidth, FORWARD * weights * rows / machine.flops
        )
    return seconds


def generation_floor(machine: Machine, model: ModelParts, tokens: StepTokens) -> Floor:
    """Reading the prompts, and decoding."""
    decoding = math.fsum(
        decoding_seconds(machine, model, batch) for batch in tokens.response_lengths
    )
    samples = sum(len(batch) for batch in tokens.response_lengths)

    def prefill(times: int) -> float:
        head_tokens = samples / tokens.group * times
        return (
            matrix_flops(model, tokens.prompt_tokens * times, head_tokens, FORWARD) / machine.flops
        )

    return Floor(decoding + prefill(1), decoding + prefill(tokens.group))


def pass_floor(
    machine: Machine, model: ModelParts, tokens: StepTokens, flops_a_parameter: int
) -> Floor:
    """One pass over prompts and responses, the head at the responses' positions only.

    Args:
        machine: it runs on.
        model: that computes.
        tokens: of the step.
        flops_a_parameter: `FORWARD` or `TRAINING`.
    """

    def seconds(body_tokens: float) -> float:
        return matrix_flops(model, body_tokens, tokens.responses, flops_a_parameter) / machine.flops

    return Floor(seconds(tokens.shared), seconds(tokens.repeated))


def training_floor(machine: Machine, model: ModelParts, tokens: StepTokens) -> Floor:
    """Forward, backward, and Adam's passes over memory."""
    passes = pass_floor(machine, model, tokens, TRAINING)
    adam = ADAM_TRANSFERS * BYTES * model.all / machine.bandwidth
    return Floor(passes.shared + adam, passes.repeated + adam)
