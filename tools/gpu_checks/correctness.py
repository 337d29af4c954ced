"""The device's numbers against transformers on the CPU in fp32.

Compared are log-probs, loss, gradients, an update and greedy tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpu_checks.base import CPU, Context, Finding, judged
from gpu_checks.deviations import deviations
from gpu_checks.measure import free
from gpu_checks.our_side import OurSide
from gpu_checks.plain_side import PlainSide, response_log_probs
from gpu_checks.random_weights import fill_transformers
from gpu_checks.shapes import SHAPES
from gpu_checks.workload import LEARNING_RATE, TRAINING, Workload
from reinforce_rl.megatron.architecture import Architecture
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh

WORKLOAD = Workload(prompts=2, group=2, prompt_tokens=40, response_tokens=24, micro_batch=3)
# The most that a right implementation may be off by in fp32 and in bf16: nats of a token; of the
# loss, relative above 1; of the gradient, the norm of the difference over the norm; nats that a
# greedy token is less likely than the likeliest; of an update, learning rates. Sums in another
# order make 1e-6 in fp32, a wrong weight 1e-2. For bf16 three times what bf16 on a CPU was off by
# at the 135M shape.
TOLERANCES = {
    "log-probs": (1e-3, 0.25),
    "mean log-probs": (1e-4, 0.05),
    "greedy": (1e-3, 0.1),
    "loss": (1e-3, 0.1),
    "gradient": (1e-3, 0.1),
    "worst tensor": (1e-2, 0.2),
    "update": (0.02, None),  # Adam's first step is the gradient's sign
}
DTYPES = (torch.float32, torch.bfloat16)
SECONDS_OF_LARGE = 60  # that a slow CPU takes for its part of the 135M shape


def check(context: Context) -> Finding:
    rows: list[dict[str, Any]] = []
    with parallel_mesh() as mesh:
        for shape in ("tiny",) if context.mode == CPU else ("tiny", "135m"):
            if shape == "tiny" or context.left() > SECONDS_OF_LARGE:
                rows += of_shape(shape, mesh)
    faults = [
        f"{row['shape']} {row['dtype']}: {name} off by {row[name]:.2g} ({row['tensor']}), "
        f"expected {limits[number]:g}"
        for row in rows
        for name, limits in TOLERANCES.items()
        for number in [row["dtype"] != "float32"]
        if limits[number] is not None and not row[name] <= limits[number]  # NaN is no pass
    ]
    worst = max(row["log-probs"] for row in rows if row["dtype"] == "float32")
    shapes = ", ".join(dict.fromkeys(row["shape"] for row in rows))
    return judged(
        faults,
        f"{shapes}: fp32 log-probs within {worst:.1e} nats of the CPU's",
        {"deviations": rows},
    )


def of_shape(shape: str, mesh: Mesh) -> list[dict[str, Any]]:
    """A row of deviations a dtype."""
    arch = Architecture.from_hf(SHAPES[shape], shape)
    reference = PlainSide(arch, torch.device("cpu"), torch.float32, WORKLOAD)
    fill_transformers(reference.model, mesh.device)
    loss, gradient = reference.gradients()
    rows = []
    for dtype, deviation in zip(DTYPES, deviations(arch, mesh, list(DTYPES)), strict=True):
        side = OurSide(arch, mesh, dtype, WORKLOAD)
        row: dict[str, Any] = {
            "shape": shape,
            "dtype": deviation.dtype,
            "log-probs": deviation.largest,
        }
        row |= {"mean log-probs": deviation.mean, "greedy": _greedy_shortfall(side, reference)}
        own_loss, our_gradients = side.gradients()
        row["loss"] = abs(own_loss - loss) / max(1.0, abs(loss))
        rows.append(row | _gradient_errors(our_gradients, gradient))
        del side, our_gradients
        free(mesh.device)
    # last: the reference's weights are others afterwards
    side = OurSide(arch, mesh, torch.float32, WORKLOAD)
    side.run(TRAINING)
    reference.run(TRAINING)
    after = side.weights()
    differences = []
    for name, value in reference.model.named_parameters():
        difference = (after[name] - value.detach()).abs().mean()
        differences.append(float(difference) / LEARNING_RATE)
    rows[0]["update"] = max(differences)
    return rows


def _gradient_errors(
    gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Relative error of all gradients together, and of the worst tensor."""
    wrong = {
        name: float((gradients[name].float() - value).norm()) for name, value in expected.items()
    }
    size = {name: float(value.norm()) for name, value in expected.items()}
    relative = {
        name: wrong[name] / size[name] if wrong[name] >= 0 else float("inf") for name in wrong
    }
    worst = max(relative, key=lambda name: relative[name])
    whole = sum(value**2 for value in wrong.values()) / sum(value**2 for value in size.values())
    return {"gradient": whole**0.5, "worst tensor": relative[worst], "tensor": worst}


@torch.no_grad()
def _greedy_shortfall(side: OurSide, reference: PlainSide) -> float:
    """The largest shortfall, in nats, of the greedily drawn tokens below the CPU model's likeliest.

    Whole sequences are not compared: after one near tie they have nothing to do with each other.
    """
    sequences = side.greedy()
    logits = reference.model(sequences[:, :-1], use_cache=False).logits[
        :, -WORKLOAD.response_tokens :
    ]
    log_probs = response_log_probs(reference.model, sequences, WORKLOAD.response_tokens)
    return float((logits.log_softmax(dim=-1).amax(dim=-1) - log_probs).max())
