"""Log-probs of this project's model on the device, against transformers' on the CPU in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_checks.measure import free
from gpu_checks.our_side import OurSide
from gpu_checks.plain_side import response_log_probs, transformers_model
from gpu_checks.workload import Workload
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh

# Unequal, so that there is padding.
PROMPT_LENGTHS = (48, 5, 31)
RESPONSE_LENGTHS = (24, 32, 9)


@dataclass(frozen=True)
class Deviation:
    """In nats, over all response tokens.

    Attributes:
        dtype: on the device.
        largest, mean: of the absolute differences.
    """

    dtype: str
    largest: float
    mean: float


def deviations(arch: Architecture, mesh: Mesh, dtypes: list[torch.dtype]) -> list[Deviation]:
    """How far the device's log-probs are off in each dtype.

    Args:
        arch: the model.
        mesh: of one rank, on the device.
        dtypes: of the model there. The CPU has fp32.
    """
    prompts = torch.tensor(PROMPT_LENGTHS)
    responses = torch.tensor(RESPONSE_LENGTHS)
    sequences = _sequences(arch.vocab_size, prompts + responses)
    expected = _expected(arch, mesh.device, sequences, prompts, responses)
    work = Workload(
        prompts=1,
        group=1,
        prompt_tokens=1,
        response_tokens=1,
        micro_batch=len(prompts),
    )
    rows = []
    for dtype in dtypes:
        log_probs = OurSide(arch, mesh, dtype, work).log_probs(sequences, prompts, responses)
        rows.append(deviation(log_probs, expected, responses, dtype))
        free(mesh.device)
    return rows


def deviation(
    log_probs: Tensor,
    expected: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
) -> Deviation:
    """Of [N, T] log-probs in the first `lengths` [N] columns of each row.

    What is not finite counts as infinity.
    """
    parts = []
    for ours, theirs, length in zip(log_probs, expected, lengths.tolist(), strict=True):
        parts.append((ours - theirs)[:length].abs())
    differences = torch.cat(parts).nan_to_num(nan=float("inf"))
    return Deviation(
        str(dtype).removeprefix("torch."),
        float(differences.max()),
        float(differences.mean()),
    )


def _sequences(vocab_size: int, lengths: Tensor) -> Tensor:
    """int64, random, right-padded with 0."""
    generator = torch.Generator().manual_seed(3)
    sequences = torch.randint(
        4,
        vocab_size,
        (len(lengths), int(lengths.max())),
        generator=generator,
    )
    for row, length in zip(sequences, lengths.tolist(), strict=True):
        row[length:] = 0
    return sequences


@torch.no_grad()
def _expected(
    arch: Architecture,
    drawn_on: torch.device,
    sequences: Tensor,
    prompts: Tensor,
    responses: Tensor,
) -> Tensor:
    """float32 [N, T]: one sequence at a time, without padding."""
    model = transformers_model(arch, torch.float32, torch.device("cpu"), drawn_on)
    rows = []
    for tokens, prompt, response in zip(
        sequences,
        prompts.tolist(),
        responses.tolist(),
        strict=True,
    ):
        log_probs = response_log_probs(model, tokens[None, : prompt + response], response)[0]
        rows.append(torch.nn.functional.pad(log_probs, (0, int(responses.max()) - response)))
    return torch.stack(rows)
