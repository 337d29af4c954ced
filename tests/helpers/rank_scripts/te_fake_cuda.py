"""Transformer Engine's fake on fake CUDA tensors, in bf16. Usage: te_fake_cuda.py FOLDER

Runs two tensor-parallel ranks with it in turn, to check the order of collectives. Prints, as JSON,
the kernels of a forward and a backward pass by operator, without and with Transformer Engine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from helpers.fake_cuda.machine import install


def main() -> None:
    machine = install()  # before anything imports torch
    import torch
    from helpers.batches import actor_of, rows_of, sequences, whole_batch
    from helpers.fake_cuda.workloads import check_collectives, kernels_by_name, run_layout
    from helpers.layouts import LAYOUTS, LORA_LAYOUTS, Layout
    from helpers.with_te import with_te

    folder = Path(sys.argv[1])
    for layout in (LAYOUTS["TP2 SP full recompute"], LORA_LAYOUTS["TP2 SP LoRA"]):
        ledgers = run_layout(machine, with_te(replace(layout, dtype=torch.bfloat16)), folder)
        assert check_collectives(ledgers) > 0
    kernels = {}
    for name, layout in {"without": Layout(), "with": with_te(Layout())}.items():
        with machine.rank(), layout.mesh() as mesh:
            actor = actor_of(
                folder, mesh, model=layout.model, dtype=torch.bfloat16, shared_prefix=False
            )
            with machine.gpu.counting() as ledger:
                actor.get_loss_and_metrics(rows_of(whole_batch(), [0, 3]), sequences(2))
            kernels[name] = kernels_by_name(ledger)
    print(json.dumps(kernels))


if __name__ == "__main__":
    main()
