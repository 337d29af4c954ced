"""Results with the fake Transformer Engine on PYTHONPATH. Usage: te_layouts.py OUT FAMILY...

Writes OUT/FAMILY/LAYOUT.pt and exports the policy to OUT/FAMILY/LAYOUT. One layout also runs the
other families, and records the kernels of a training step and of generation, and checkpoints and
losses as in `helpers.resharding`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformer_engine
from helpers import resharding
from helpers.errors import raises_error
from helpers.layouts import Layout, computed
from helpers.policies import megatron_model
from helpers.ranks import one_group
from helpers.with_te import CASES, SAVED, TE_LAYOUTS
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.generation.base import SamplingParams
from reinforce_rl.generation.native.generator import NativeGenerator
from reinforce_rl.megatron.mesh import Mesh
from reinforce_rl.megatron.model import layers


def kernels(out: Path, layout: str, mesh: Mesh) -> dict[str, dict[str, int]]:
    run = resharding.run_of(out, "tied", layout, "kernels", mesh)
    run.lm.train()
    column = [m for m in run.lm.modules() if isinstance(m, TEColumnParallelLinear)]
    counts: Counter[str] = transformer_engine.KERNELS
    counts.clear()
    run.train_on(0, 1)
    training = {**counts, "column layers": len(column)}
    drawn = []
    for is_lean in (False, True):  # megatron's own layers; this project's decode steps
        counts.clear()
        generator = NativeGenerator(run.lm, load_tokenizer(out / "tied/model"), is_lean=is_lean)
        params = SamplingParams(max_length=4)
        completions = generator.generate([Prompt(0, "", (5, 6))], 2, params, seed=0)
        drawn.append(completions.tokens)
    assert torch.equal(*drawn)
    return {"training": training, "generation": dict(counts)}


def check_that_passes_add_up(out: Path, layout: str, mesh: Mesh) -> None:
    """Check two passes through a new model in one micro-batch; backward starts with the second."""
    run = resharding.run_of(out, "tied", layout, "passes", mesh)
    first, second = torch.randint(4, 61, (2, 3, 12))
    gradients = []
    for passes in ([first, second], [first], [second]):
        run.ddp.zero_grad_buffer()
        sums = [run.lm(tokens).square().sum() for tokens in passes]
        torch.stack(sums).sum().backward()
        parts: list[Any] = [parameter.main_grad for parameter in run.lm.parameters()]
        gradients.append(torch.cat([part.flatten() for part in parts]))
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2], rtol=1e-4, atol=1e-4)


def check_that_an_old_one_is_refused(model: Path, layout: Layout, mesh: Mesh) -> None:
    oldest = mock.patch.object(layers, "OLDEST_VERSION", "99.0")
    key = "config.transformer_engine.missing_or_old"
    with oldest, raises_error(key, "2.11.0", "99.0"):
        megatron_model(model, mesh, options=layout.model)


def losses(out: Path, case: str, layout: str, mesh: Mesh) -> dict[str, Any]:
    saved, _ = resharding.save_and_train(out, case, layout, mesh)
    loaded, _ = resharding.load_and_train(out, case, resharding.ONE, layout, mesh)
    return {"saved": saved, "loaded": loaded}


def main() -> None:
    out = Path(sys.argv[1])
    families = sys.argv[2:]
    with one_group():
        layouts = TE_LAYOUTS[torch.distributed.get_world_size()]
        saved = SAVED[torch.distributed.get_world_size()]
        resharding.ALL_LAYOUTS.update(layouts)
        for name, layout in layouts.items():
            for family in families if name == saved else families[:1]:
                folder = out / family
                with layout.mesh() as mesh:
                    results = computed(layout, folder / "model", mesh, folder / name)
                    if mesh.is_main:
                        torch.save(results, folder / f"{name}.pt")
        with layouts[saved].mesh() as mesh:
            report: dict[str, Any] = kernels(out, saved, mesh)
            report["losses"] = {case: losses(out, case, saved, mesh) for case in CASES}
            check_that_passes_add_up(out, saved, mesh)
            check_that_an_old_one_is_refused(out / families[0] / "model", layouts[saved], mesh)
            if mesh.is_main:
                (out / f"{saved}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
