"""Results with the fake Transformer Engine on PYTHONPATH. Usage: te_layouts.py OUT FAMILY...

Writes OUT/FAMILY/LAYOUT.pt and exports the policy to OUT/FAMILY/LAYOUT. One layout also runs the
other families, and records the kernels of a training step and of generation, and checkpoints and
losses as in `helpers.resharding`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformer_engine
from helpers import resharding
from helpers.errors import check_error
from helpers.layouts import Layout, computed
from helpers.policies import megatron_model
from helpers.with_te import CASES, ONE, SAVED, TE_LAYOUTS
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

from reinforce_rl.data.batches import Prompt
from reinforce_rl.data.tokenizer import load_tokenizer
from reinforce_rl.errors import ConfigError
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
        drawn.append(
            generator.generate(
                [Prompt(0, "", (5, 6))], 2, SamplingParams(max_length=4), seed=0
            ).tokens
        )
    assert torch.equal(*drawn)
    return {"training": training, "generation": dict(counts)}


def check_that_passes_add_up(out: Path, layout: str, mesh: Mesh) -> None:
    """Check two passes through a new model in one micro-batch; backward starts with the second."""
    run = resharding.run_of(out, "tied", layout, "passes", mesh)
    first, second = torch.randint(4, 61, (2, 3, 12))
    gradients = []
    for passes in ([first, second], [first], [second]):
        run.ddp.zero_grad_buffer()
        torch.stack([run.lm(tokens).square().sum() for tokens in passes]).sum().backward()
        parts: list[Any] = [parameter.main_grad for parameter in run.lm.parameters()]
        gradients.append(torch.cat([part.flatten() for part in parts]))
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2], rtol=1e-4, atol=1e-4)


def check_that_an_old_one_is_refused(model: Path, layout: Layout, mesh: Mesh) -> None:
    known = layers.OLDEST_VERSION
    layers.OLDEST_VERSION = "99.0"
    try:
        megatron_model(model, mesh, options=layout.model)
    except ConfigError as error:
        check_error(error, "config.transformer_engine.missing_or_old", "2.11.0", "99.0")
    else:
        raise AssertionError("no error")
    finally:
        layers.OLDEST_VERSION = known


def main() -> None:
    out, *families = sys.argv[1:]
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    layouts = TE_LAYOUTS[torch.distributed.get_world_size()]
    resharding.ALL_LAYOUTS.update(layouts)
    saved = SAVED[torch.distributed.get_world_size()]
    report: dict = {"losses": {}}
    for name, layout in layouts.items():
        with layout.mesh() as mesh:
            for family in families if name == saved else families[:1]:
                folder = Path(out) / family
                results = computed(layout, folder / "model", mesh, folder / name)
                if mesh.is_main:
                    torch.save(results, folder / f"{name}.pt")
            if name == saved:
                report |= kernels(Path(out), name, mesh)
                check_that_passes_add_up(Path(out), name, mesh)
                check_that_an_old_one_is_refused(Path(out) / families[0] / "model", layout, mesh)
                for case in CASES:
                    report["losses"][case] = {
                        "saved": resharding.save_and_train(Path(out), case, name, mesh)[0],
                        "loaded": resharding.load_and_train(Path(out), case, ONE, name, mesh)[0],
                    }
    if torch.distributed.get_rank() == 0:
        (Path(out) / f"{saved}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
