"""Two tensor-parallel ranks: all of `computed_here`, and an MLP with sequence parallelism. Usage: lora_tp2.py OUT ROOT

OUT gets {case}.pt, {case}/ and sequence_parallel.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from helpers.lora import CASES, EVERY, computed_here, load_updates, random_updates
from helpers.policies import megatron_model

from reinforce_rl.megatron.lora import add_lora
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh


def mlp_gradients(folder: Path, mesh: Mesh, sequence_parallel: bool) -> dict[str, Any]:
    """Output and gradients of the first MLP: with sequence parallelism each rank has half of the positions."""
    lm = megatron_model(folder, mesh, torch.float64)
    mlp: Any = lm.decoder.layers[0].mlp
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.sequence_parallel = sequence_parallel
    mlp.linear_fc1.allreduce_dgrad = not sequence_parallel
    add_lora(lm, EVERY)
    load_updates(lm, random_updates(folder, EVERY, torch.float64))
    x, weight = torch.randn(2, 6, 2, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    own = slice(3 * mesh.tp_rank, 3 * mesh.tp_rank + 3) if sequence_parallel else slice(None)
    output, _ = mlp(x[own])
    (output * weight[own]).sum().backward()
    parameters = {name: p for name, p in mlp.named_parameters() if p.requires_grad}
    gradients = {"x": x.grad, **{name: p.grad for name, p in parameters.items()}}
    if sequence_parallel:  # what megatron does at the end of a batch for parameters that are marked so
        assert x.grad is not None
        for value in (x.grad, *(p.grad for p in parameters.values() if getattr(p, "sequence_parallel", False))):
            torch.distributed.all_reduce(value, group=mesh.tp_group)
    return {"output": output.detach(), "own": own, "gradients": gradients}


def main() -> None:
    out, root = map(Path, sys.argv[1:])
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for name, settings in CASES.items():
            found = computed_here(root / name, mesh, settings, out / name)
            if mesh.is_main:
                torch.save(found, out / f"{name}.pt")
        whole, shared = (mlp_gradients(root / "llama_bias_padded", mesh, flag) for flag in (False, True))
        torch.testing.assert_close(shared["output"], whole["output"][shared["own"]], atol=1e-12, rtol=0)
        for name, gradient in whole["gradients"].items():
            assert gradient.abs().max() > 1e-3
            torch.testing.assert_close(shared["gradients"][name], gradient, atol=1e-11, rtol=0, msg=name)


if __name__ == "__main__":
    main()
