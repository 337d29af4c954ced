"""Two ranks: the gradient of one batch, however it is split over them. Usage: gradients.py FOLDER OUT TP_SIZE"""

from __future__ import annotations

import sys

import torch
from helpers.batches import actor_of, gradient_of, rows_of, sequences, whole_batch

from reinforce_rl.config.model import OptimConfig
from reinforce_rl.megatron.mesh import parallel_mesh
from reinforce_rl.megatron.optimizer import ActorOptimizer, build_optimizer

# Rows of the two data-parallel ranks, prompt groups whole.
SPLITS = {
    "even": ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]),
    "uneven": ([0, 1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]),
    "one rank has none": (list(range(12)), []),
}


def main() -> None:
    folder, out, tp_size = sys.argv[1:]
    with parallel_mesh(tensor_model_parallel_size=int(tp_size)) as mesh:
        actor = actor_of(folder, mesh, with_reference=False)
        optim = OptimConfig(lr=1e-3, weight_decay=0.0, betas=[0.9, 0.95])
        optimizer = ActorOptimizer(
            *build_optimizer(actor.ddp, optim, clip_grad=1.0, total_steps=10)
        )
        batch = whole_batch()
        results = {}
        for name, split in SPLITS.items():
            mine = rows_of(batch, split[mesh.dp_rank]) if mesh.dp_size == 2 else batch
            share = actor.get_loss_and_metrics(mine, sequences(10))
            loss = mesh.sum_over_dp(torch.tensor(share.loss, dtype=torch.float64))
            results[name] = {"loss": float(loss), "gradient": gradient_of(actor)}
        # A rank whose samples are all invalid.
        all_invalid = whole_batch()
        all_invalid.trains[6:] = False
        mine = (
            rows_of(all_invalid, SPLITS["even"][mesh.dp_rank]) if mesh.dp_size == 2 else all_invalid
        )
        actor.get_loss_and_metrics(mine, sequences(5))
        results["one rank has no valid one"] = {"gradient": gradient_of(actor)}

        actor.get_loss_and_metrics(
            rows_of(batch, SPLITS["even"][mesh.dp_rank]) if mesh.dp_size == 2 else batch,
            sequences(10),
        )
        optimizer.megatron.prepare_grads()
        results["foreach norm"] = optimizer._foreach_norm()
        results["norm"] = optimizer.step().grad_norm
        results["log_probs"] = actor.get_inference_log_probs(
            batch.rollouts.sequences, batch.rollouts.prompt_lengths, batch.rollouts.response_lengths
        )
        torch.save(results, f"{out}.{mesh.rank}")


if __name__ == "__main__":
    main()
