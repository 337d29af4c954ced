"""Log-probs of this project's model on the device, held against those of transformers on the CPU in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from one_gpu.measure import free
from one_gpu.ours import OurSide
from one_gpu.plain import response_log_probs, transformers_model
from one_gpu.workload import Workload
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.preflight.memory import ModelSize

LARGEST = 2e9  # parameters: beyond it a CPU takes minutes and tens of gigabytes
PROMPT_LENGTHS, RESPONSE_LENGTHS = (48, 5, 31), (24, 32, 9)  # unequal, so that there is padding


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


def is_checked(arch: Architecture) -> bool:
    """Whether the model is small enough."""
    return ModelSize.from_architecture(arch, None).parameters <= LARGEST


def deviations(arch: Architecture, mesh: Mesh, dtypes: list[torch.dtype]) -> list[Deviation]:
    """How far the device's log-probs are off in each dtype.

    Args:
        arch: the model.
        mesh: of one rank, on the device.
        dtypes: of the model there. The CPU has fp32.
    """
    prompts, responses = torch.tensor(PROMPT_LENGTHS), torch.tensor(RESPONSE_LENGTHS)
    sequences = _sequences(arch.vocab_size, prompts + responses)
    expected = _expected(arch, mesh.device, sequences, prompts, responses)
    work = Workload(prompts=1, group=1, prompt_tokens=1, response_tokens=1, micro_batch=len(prompts))
    found = []
    for dtype in dtypes:
        log_probs = OurSide(arch, mesh, dtype, work).log_probs(sequences, prompts, responses)
        found.append(deviation(log_probs, expected, responses, dtype))
        free(mesh.device)
    return found


def deviation(found: Tensor, expected: Tensor, lengths: Tensor, dtype: torch.dtype) -> Deviation:
    """Of [N, T] log-probs in the first `lengths` [N] columns of each row. What is not finite counts as infinity."""
    pairs = zip(found, expected, lengths.tolist(), strict=True)
    differences = torch.cat([(own - other)[:length].abs() for own, other, length in pairs])
    differences = differences.nan_to_num(nan=float("inf"))
    return Deviation(str(dtype).removeprefix("torch."), float(differences.max()), float(differences.mean()))


def _sequences(vocab_size: int, lengths: Tensor) -> Tensor:
    """int64, random, right-padded with 0."""
    generator = torch.Generator().manual_seed(3)
    sequences = torch.randint(4, vocab_size, (len(lengths), int(lengths.max())), generator=generator)
    for row, length in zip(sequences, lengths.tolist(), strict=True):
        row[length:] = 0
    return sequences


@torch.no_grad()
def _expected(
    arch: Architecture, drawn_on: torch.device, sequences: Tensor, prompts: Tensor, responses: Tensor
) -> Tensor:
    """float32 [N, T]: one sequence at a time, without padding."""
    model = transformers_model(arch, torch.float32, torch.device("cpu"), drawn_on)
    rows = []
    for tokens, prompt, response in zip(sequences, prompts.tolist(), responses.tolist(), strict=True):
        log_probs = response_log_probs(model, tokens[None, : prompt + response], response)[0]
        rows.append(torch.nn.functional.pad(log_probs, (0, int(responses.max()) - response)))
    return torch.stack(rows)
