"""Log-probs, loss, gradients, an update and greedy tokens on the device, against transformers on the CPU in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from one_gpu.correctness import deviations
from one_gpu.measure import free
from one_gpu.ours import OurSide
from one_gpu.plain import PlainSide, response_log_probs
from one_gpu.shapes import SHAPES
from one_gpu.weights import fill_transformers
from one_gpu.workload import LEARNING_RATE, TRAINING, Workload
from torch import Tensor

from gpu_checks.base import CPU, Context, Finding, judged
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh

WORKLOAD = Workload(prompts=2, group=2, prompt_tokens=40, response_tokens=24, micro_batch=3)
SECONDS_OF_LARGEST = 60  # that a CPU may take for its part of the 135M shape


@dataclass(frozen=True)
class Tolerance:
    """Largest deviations that a right implementation may have.

    Attributes:
        log_probs, mean_log_probs: nats of a token.
        loss: relative, or absolute below 1.
        gradient: norm of the difference over the norm, of the whole gradient and of each tensor's.
        greedy: nats that a greedily chosen token may be less likely than the likeliest.
    """

    log_probs: float
    mean_log_probs: float
    loss: float
    gradient: float
    tensor: float
    greedy: float


# Sums in another order make 1e-6 in fp32, a wrong weight 1e-2. For bf16 three times what a CPU's bf16 deviates by.
TOLERANCES = {
    torch.float32: Tolerance(1e-3, 1e-4, 1e-3, 1e-3, 1e-2, 1e-3),
    torch.bfloat16: Tolerance(0.25, 0.05, 0.1, 0.1, 0.2, 0.1),
}
UPDATE_TOLERANCE = 0.02  # mean difference of updates, in learning rates: Adam's first step is the gradient's sign


def check(context: Context) -> Finding:
    shapes = ["tiny"] if context.mode == CPU else ["tiny", "135m"]
    faults: list[str] = []
    numbers: dict[str, Any] = {"deviations": []}
    with parallel_mesh() as mesh:
        for shape in shapes:
            if shape != "tiny" and context.left() < SECONDS_OF_LARGEST:
                numbers["left out"] = f"{shape}: no time left"
                continue
            numbers["deviations"] += of_shape(shape, mesh, faults)
    worst = max(row["log-probs"] for row in numbers["deviations"] if row["dtype"] == "float32")
    return judged(faults, f"{', '.join(shapes)}: fp32 log-probs within {worst:.1e} nats of the CPU's", numbers)


def of_shape(shape: str, mesh: Mesh, faults: list[str]) -> list[dict[str, Any]]:
    """A row of numbers a dtype; what exceeds the tolerances is added to `faults`."""
    arch = Architecture.from_hf(SHAPES[shape], shape)
    reference = PlainSide(arch, torch.device("cpu"), torch.float32, WORKLOAD)
    fill_transformers(reference.model, mesh.device)
    loss, gradient = reference.gradients()
    before = {name: value.detach().clone() for name, value in reference.model.named_parameters()}
    rows = []
    for dtype, found in zip(TOLERANCES, deviations(arch, mesh, list(TOLERANCES)), strict=True):
        row: dict[str, Any] = {"shape": shape, "dtype": found.dtype}
        row |= {"log-probs": found.largest, "mean log-probs": found.mean}
        side = OurSide(arch, mesh, dtype, WORKLOAD)
        row["greedy"] = _greedy_shortfall(side, reference)
        own_loss, own = side.gradients()
        row["loss"] = abs(own_loss - float(loss)) / max(1.0, abs(float(loss)))
        row |= _gradient_errors(own, gradient)
        if dtype == torch.float32:
            side.run(TRAINING)
            reference.run(TRAINING)
            after = side.weights()
            row["update"] = max(
                float((after[name] - value.detach()).abs().mean()) / LEARNING_RATE
                for name, value in reference.model.named_parameters()
            )
            _judge(row, "update", UPDATE_TOLERANCE, faults)
            with torch.no_grad():  # the next dtype begins with the same weights
                for name, value in reference.model.named_parameters():
                    value.copy_(before[name])
        limits = TOLERANCES[dtype]
        for name, limit in (
            ("log-probs", limits.log_probs),
            ("mean log-probs", limits.mean_log_probs),
            ("loss", limits.loss),
            ("gradient", limits.gradient),
            ("worst tensor", limits.tensor),
            ("greedy", limits.greedy),
        ):
            _judge(row, name, limit, faults)
        rows.append(row)
        del side, own
        free(mesh.device)
    return rows


def _judge(row: dict[str, Any], name: str, limit: float, faults: list[str]) -> None:
    if not row[name] <= limit:  # NaN is no pass
        which = f" ({row['tensor']})" if name == "worst tensor" else ""
        faults.append(
            f"{row['shape']} {row['dtype']}: {name}{which} off by {row[name]:.2g}, expected {limit:g} at most"
        )


def _gradient_errors(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of all gradients together, and of the tensor that is off most."""
    wrong, whole, worst = 0.0, 0.0, (-1.0, "")
    for name, value in expected.items():
        difference, size = float((own[name].float() - value).norm()), float(value.norm())
        wrong, whole = wrong + difference**2, whole + size**2
        relative = difference / size if difference == difference else float("inf")
        worst = max(worst, (relative, name))
    return {"gradient": (wrong / whole) ** 0.5, "worst tensor": worst[0], "tensor": worst[1]}


@torch.no_grad()
def _greedy_shortfall(side: OurSide, reference: PlainSide) -> float:
    """Nats that the CPU's model gives the greedily drawn tokens less than its likeliest ones, at most.

    Whole sequences are not compared: after one near tie they have nothing to do with each other.
    """
    sequences = side.greedy()
    logits = reference.model(sequences[:, :-1], use_cache=False).logits[:, -WORKLOAD.response_tokens :]
    log_probs = response_log_probs(reference.model, sequences, WORKLOAD.response_tokens)
    return float((logits.log_softmax(dim=-1).amax(dim=-1) - log_probs).max())
