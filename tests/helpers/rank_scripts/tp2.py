"""Two tensor-parallel ranks run tasks. Usage: tp2.py OUT TASK ARGUMENT... [-- TASK ARGUMENT...]

Rank 0 writes the results of a task to OUT.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from helpers import families, lora
from helpers.log_probs import head_inputs, scores_and_gradients
from helpers.policies import all_logits, megatron_model, random_tokens

from reinforce_rl.megatron.hf_weights import export_hf_folder
from reinforce_rl.megatron.lora import add_lora
from reinforce_rl.megatron.mesh import Mesh, parallel_mesh
from reinforce_rl.megatron.model.log_probs import chunked_log_probs
from reinforce_rl.megatron.model.model import VocabShard


def save(results: Any, path: Path, mesh: Mesh) -> None:
    if mesh.is_main:
        torch.save(results, path)


def family(mesh: Mesh, out: Path, *folders: str) -> None:
    """All results of `families.computed_here`: {folder name}.pt, and the exported folder."""
    for folder in map(Path, folders):
        save(
            families.computed_here(folder, mesh, out / folder.name), out / f"{folder.name}.pt", mesh
        )


def weights(mesh: Mesh, out: Path, *folders: str) -> None:
    """Import and export: {folder name}.pt with logits, and the exported folder."""
    for folder in map(Path, folders):
        lm = megatron_model(folder, mesh)
        logits = all_logits(lm, random_tokens(lm.architecture.vocab_size, 2, 40))
        export_hf_folder(lm, folder, out / folder.name)
        save(logits, out / f"{folder.name}.pt", mesh)


def scores(mesh: Mesh, out: Path, *folders: str) -> None:
    """Scores of a fixed batch and their gradient: {folder name}.pt."""
    for folder in map(Path, folders):
        save(scores_and_gradients(folder, mesh), out / f"{folder.name}.pt", mesh)


def chunked_head(mesh: Mesh, out: Path, *vocabularies: str) -> None:
    """The chunked output head, with its weight sharded.

    head.pt: {tokens: (log-probs, entropies, gradient of hidden, gradient of the whole weight)}.
    """
    results = {}
    for tokens in map(int, vocabularies):
        hidden, weight, targets = head_inputs(7, tokens, 16, scale=30.0)
        mine = weight.detach().chunk(2)[mesh.tp_rank].clone().requires_grad_()
        start = 8 * mesh.tp_rank
        shard = VocabShard(start, min(tokens - start, 8), mesh.tp_group)
        log_probs, entropy = chunked_log_probs(
            hidden, mine, targets, shard, temperature=0.6, chunk_tokens=3, with_entropy=True
        )
        assert entropy is not None
        gradients = torch.autograd.grad(log_probs.sum() - 0.3 * entropy.sum(), (hidden, mine))
        parts = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(parts, gradients[1], group=mesh.tp_group)
        results[tokens] = (
            log_probs.detach(),
            entropy.detach(),
            gradients[0],
            torch.cat(parts).detach(),
        )
    save(results, out / "head.pt", mesh)


def lora_cases(mesh: Mesh, out: Path, root: str) -> None:
    """All results of `lora.computed_here`, {case}.pt and {case}/, and an MLP.

    The MLP uses sequence parallelism.
    """
    for name, settings in lora.CASES.items():
        save(
            lora.computed_here(Path(root) / name, mesh, settings, out / name),
            out / f"{name}.pt",
            mesh,
        )
    whole, shared = (
        mlp_gradients(Path(root) / "llama_bias_padded", mesh, flag) for flag in (False, True)
    )
    torch.testing.assert_close(shared["output"], whole["output"][shared["own"]], atol=1e-12, rtol=0)
    for name, gradient in whole["gradients"].items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(
            shared["gradients"][name], gradient, atol=1e-11, rtol=0, msg=name
        )


def mlp_gradients(folder: Path, mesh: Mesh, sequence_parallel: bool) -> dict[str, Any]:
    """Return output and gradients of the first MLP.

    With sequence parallelism each rank has half of the positions.
    """
    lm = megatron_model(folder, mesh, torch.float64)
    mlp: Any = lm.decoder.layers[0].mlp
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        layer.sequence_parallel = sequence_parallel
    mlp.linear_fc1.allreduce_dgrad = not sequence_parallel
    add_lora(lm, lora.EVERY)
    lora.load_updates(lm, lora.random_updates(folder, lora.EVERY, torch.float64))
    x, weight = torch.randn(
        2, 6, 2, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    x.requires_grad_()
    local_rows = slice(3 * mesh.tp_rank, 3 * mesh.tp_rank + 3) if sequence_parallel else slice(None)
    output, _ = mlp(x[local_rows])
    (output * weight[local_rows]).sum().backward()
    parameters = {name: p for name, p in mlp.named_parameters() if p.requires_grad}
    gradients = {"x": x.grad, **{name: p.grad for name, p in parameters.items()}}
    if sequence_parallel:
        # megatron does this at the end of a batch for parameters that are marked
        assert x.grad is not None
        for value in (
            x.grad,
            *(p.grad for p in parameters.values() if getattr(p, "sequence_parallel", False)),
        ):
            torch.distributed.all_reduce(value, group=mesh.tp_group)
    return {"output": output.detach(), "own": local_rows, "gradients": gradients}


TASKS = {task.__name__: task for task in (family, weights, scores, chunked_head, lora_cases)}


def main() -> None:
    out, *words = sys.argv[1:]
    with parallel_mesh(tensor_model_parallel_size=2) as mesh:
        for is_end, task in itertools.groupby(words, lambda word: word == "--"):
            if not is_end:
                name, *arguments = task
                TASKS[name](mesh, Path(out), *arguments)


if __name__ == "__main__":
    main()
